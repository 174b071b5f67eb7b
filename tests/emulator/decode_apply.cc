// Tests the emulated device decoder on the output of the host encoder: every method and word size,
// streams and chunks at any address. Also tests that `check` of encoder/delta.h finds the same
// offsets and the same damage as its `apply`.

#include <cstdio>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda/device.h"
#include "encoder/delta.h"
#include "memory.h"

using namespace deltacheck;
using check::Memory;

namespace {

std::mt19937_64 random_bits(7);
std::set<std::pair<uint32_t, int>> seen;  // (method, bytes of a word)

uint64_t below(uint64_t end) { return random_bits() % end; }

uint64_t get(const uint8_t* words, int w, uint64_t i) {
  uint64_t word = 0;
  std::memcpy(&word, words + i * w, w);
  return word;
}
void set(uint8_t* words, int w, uint64_t i, uint64_t word) { std::memcpy(words + i * w, &word, w); }

// A leaf in two states.
struct Leaf {
  int word_bytes;
  std::vector<uint64_t> bounds;
  std::vector<uint8_t> base, current;

  Run run() const { return {bounds.data(), bounds.size() - 1, word_bytes}; }
};

// `density` in 1/1000; differences up to `most`; bytes of values drawn from `symbols`.
Leaf leaf_of(int w, std::vector<uint64_t> bounds, uint64_t density, uint64_t most,
             uint64_t symbols) {
  Leaf leaf{w, std::move(bounds), {}, {}};
  const uint64_t words = leaf.bounds.back();
  leaf.base.resize(words * w);
  for (uint8_t& byte : leaf.base) byte = static_cast<uint8_t>(below(symbols));
  leaf.current = leaf.base;
  for (uint64_t i = 0; i < words; ++i) {
    if (below(1000) >= density) continue;
    const uint64_t d = 1 + below(most);
    set(leaf.current.data(), w, i, get(leaf.base.data(), w, i) + (below(2) ? d : 0 - d));
  }
  return leaf;
}

// Every byte value is equally frequent in every plane, so no method is smaller than raw.
template <int W>
Leaf flat_leaf(uint64_t words) {
  Leaf leaf = leaf_of(W, {0, 512, words}, 0, 1, 256);
  for (uint64_t i = 0; i < words; ++i) {
    uint64_t word = 0;
    for (uint64_t k = 0; k < W; ++k) word |= ((i + 77 * k) & 255) << (8 * k);
    set(leaf.current.data(), W, i, rotated_right<W>(static_cast<typename Word<W>::type>(word)));
  }
  return leaf;
}

void check_apply(const Leaf& leaf, bool with_base, const char* what) {
  const Run run = leaf.run();
  std::vector<uint8_t> shadow = leaf.base;
  const Encoded encoded = encode(run, leaf.current.data(), with_base ? shadow.data() : nullptr);
  std::vector<Memory> content;
  content.reserve(kStreams);
  StreamView views[kStreams];
  const uint8_t* streams[kStreams];
  for (int stream = 0; stream < kStreams; ++stream) {
    const Bytes& bytes = encoded.streams[stream];
    content.emplace_back(bytes.data.get(), bytes.size, below(9));
    streams[stream] = bytes.size > 0 ? content.back().data() : nullptr;
    views[stream] = {streams[stream], bytes.size};
  }
  for (const Row& row : encoded.rows) seen.emplace(row.method, leaf.word_bytes);

  std::vector<uint64_t> offsets;
  CHECK(deltacheck::check(run, encoded.rows.data(), encoded.rows.size(), views, &offsets).empty());
  CHECK(offsets.size() == encoded.rows.size() * kStreams);
  uint64_t sums[kStreams] = {};
  for (size_t i = 0; i < encoded.rows.size(); ++i) {
    const Row& row = encoded.rows[i];
    const uint64_t words = run.bounds[row.chunk + 1] - run.bounds[row.chunk];
    for (int stream = 0; stream < kStreams; ++stream) {
      const uint64_t size = stream_bytes(row, stream, words, run.word_bytes);
      CHECK(size == 0 || offsets[i * kStreams + stream] == sums[stream]);
      sums[stream] += size;
    }
  }

  std::vector<Memory> chunks;
  chunks.reserve(run.chunks);
  std::vector<device::Chunk> table;
  for (uint64_t chunk = 0; chunk < run.chunks; ++chunk) {
    const uint64_t start = run.bounds[chunk] * run.word_bytes,
                   end = run.bounds[chunk + 1] * run.word_bytes;
    chunks.emplace_back(leaf.base.data() + start, end - start, below(40) * run.word_bytes);
    const uint32_t words = static_cast<uint32_t>(run.bounds[chunk + 1] - run.bounds[chunk]);
    table.push_back({nullptr, chunks.back().data(), words, static_cast<uint32_t>(run.word_bytes)});
  }
  const device::ApplyArguments arguments{table.data(), encoded.rows.data(),
                                         static_cast<uint32_t>(encoded.rows.size()), streams,
                                         offsets.data()};
  CHECK(device::apply(arguments, nullptr) == cudaSuccess);
  for (uint64_t chunk = 0; chunk < run.chunks; ++chunk) {
    const uint64_t start = run.bounds[chunk] * run.word_bytes;
    const bool same =
        chunks[chunk].size() == 0 ||
        std::memcmp(chunks[chunk].data(), leaf.current.data() + start, chunks[chunk].size()) == 0;
    if (!same) check::fail(__FILE__, __LINE__, what, "chunk " + std::to_string(chunk) + " differs");
  }

  // One damaged byte, or one truncated stream: both functions refuse it, or not, with the same
  // text.
  for (int turn = 0; turn < 4; ++turn) {
    std::vector<Row> rows = encoded.rows;
    std::vector<std::vector<uint8_t>> copies;
    StreamView damaged[kStreams];
    const uint64_t flip = below(kStreams + 2);
    for (int stream = 0; stream < kStreams; ++stream) {
      copies.emplace_back(views[stream].data, views[stream].data + views[stream].size);
      std::vector<uint8_t>& bytes = copies.back();
      if (flip == static_cast<uint64_t>(stream) && !bytes.empty()) {
        if (below(4) == 0)
          bytes.pop_back();
        else
          bytes[below(bytes.size())] ^= static_cast<uint8_t>(1 + below(255));
      }
      damaged[stream] = {bytes.empty() ? nullptr : bytes.data(), bytes.size()};
    }
    if (flip >= kStreams && !rows.empty())
      (&rows[below(rows.size())].chunk)[below(kRowWidth)] ^= 1u << below(32);
    std::vector<uint8_t> target = leaf.base;
    const std::string one = apply(run, rows.data(), rows.size(), damaged, target.data());
    const std::string other = deltacheck::check(run, rows.data(), rows.size(), damaged, &offsets);
    CHECK(one == other);
  }
}

}  // namespace

int main() {
  for (int w : {1, 2, 4, 8}) {
    const uint64_t tile = kTileBytes / w, top = w == 1   ? 127
                                                : w == 8 ? uint64_t{1} << 62
                                                         : (uint64_t{1} << (8 * w - 1)) - 1;
    // Sparse with long gaps and escapes; narrow and wide differences; the edges of tiles and of the
    // portion of a lane.
    for (const uint64_t density : {1, 20, 250}) {
      for (const uint64_t most : {uint64_t{3}, uint64_t{127}, top}) {
        check_apply(leaf_of(w, {0, tile + 5, tile + 5, 3 * tile + 77}, density, most, 256), true,
                    "sparse");
      }
    }
    check_apply(leaf_of(w, {0, 2 * tile + 9}, 500, 2, 256), true, "bitmap");
    check_apply(leaf_of(w, {0, tile, 2 * tile + 9}, 500, top, 256), true, "bitmap, wide");
    check_apply(leaf_of(w, {0, tile + 1, 2 * tile + 9}, 1000, 3, 256), true, "diff");
    check_apply(leaf_of(w, {0, tile - 1, 2 * tile + 9}, 1000, top, 2), true, "planes");
    check_apply(leaf_of(w, {0, 1023, 2 * tile + 9}, 1000, top, 256), true, "raw");
    check_apply(leaf_of(w, {0, 1, 1, 4, 300}, 0, 1, 256), false, "first save");
    check_apply(leaf_of(w, {0, 1, 2, 5, 36, 69, 1000}, 300, 5, 256), true, "few words");
  }
  check_apply(flat_leaf<1>(512 + 1024), false, "flat");
  check_apply(flat_leaf<2>(512 + 1024), false, "flat");
  check_apply(flat_leaf<4>(512 + 1024), false, "flat");
  check_apply(flat_leaf<8>(512 + 1024), false, "flat");
  // More tiles than threads: offsets continue from one batch of tiles to the next.
  {
    const uint64_t words = 300 * kTileBytes / 8 + 3;
    Leaf leaf = leaf_of(8, {0, words}, 0, 1, 256);
    for (uint64_t tile = 0; tile < 301; ++tile) {
      for (uint64_t k = 0; k < 3; ++k) {
        const uint64_t i = tile * (kTileBytes / 8) + (700 + tile) * k;
        if (i < words)
          set(leaf.current.data(), 8, i, get(leaf.base.data(), 8, i) + (tile + k) * 37 + 1);
      }
    }
    check_apply(leaf, true, "many tiles");
    check_apply(leaf_of(8, {0, words}, 500, 3, 2), true, "many tiles of a bitmap");
  }
  // Gaps of one less than one escape, of one, and of two; a tile in which only the last word
  // changed.
  {
    Leaf leaf = leaf_of(1, {0, 3 * kTileBytes}, 0, 1, 256);
    uint64_t at = 0;
    for (const uint64_t gap : {254, 255, 256, 509, 510, 511, 0, 0, 1}) {
      at += gap;
      leaf.current[at++] ^= 1;
    }
    leaf.current[2 * kTileBytes - 1] ^= 1;
    leaf.current[3 * kTileBytes - 1] ^= 1;
    check_apply(leaf, true, "escapes");
  }
  for (int w : {1, 2, 4, 8}) {
    for (uint32_t method = kSparse; method <= kRaw; ++method) {
      if (seen.count({method, w}) == 0)
        check::fail(__FILE__, __LINE__, kMethodNames[method],
                    "of words of " + std::to_string(w) + " was not seen");
    }
  }
  return check::result();
}
