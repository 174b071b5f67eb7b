// Fuzzes `apply` with any rows and streams. It refuses them, or they are exactly the output of the
// encoder, since the format has one encoding only for given positions and differences. All kernels
// and numbers of threads agree.

#include <algorithm>
#include <optional>

#include "encoder/order.h"
#include "target.h"

using namespace deltacheck;

namespace {

constexpr uint32_t kMostWords = 70000, kMostChunks = 8, kMostStreamBytes = 1 << 20;

struct Case {
  int word_bytes = 1;
  std::vector<uint64_t> bounds{0};
  std::vector<Row> rows;
  std::vector<uint8_t> streams[kStreams];

  Run run() const { return {bounds.data(), bounds.size() - 1, word_bytes}; }
};

Input input_of(const Case& made, uint8_t kernels, uint8_t threads) {
  Input input;
  put<uint8_t>(&input, static_cast<uint8_t>(__builtin_ctz(static_cast<unsigned>(made.word_bytes))));
  put<uint8_t>(&input, kernels);
  put<uint8_t>(&input, threads);
  put<uint8_t>(&input, static_cast<uint8_t>(made.bounds.size() - 1));
  for (size_t i = 1; i < made.bounds.size(); ++i)
    put(&input, static_cast<uint32_t>(made.bounds[i] - made.bounds[i - 1]));
  put<uint8_t>(&input, static_cast<uint8_t>(made.rows.size()));
  for (const Row& row : made.rows) put(&input, row);
  for (const auto& stream : made.streams) {
    put(&input, static_cast<uint32_t>(stream.size()));
    input.insert(input.end(), stream.begin(), stream.end());
  }
  return input;
}

Case case_of(Reader* reader) {
  Case made;
  made.word_bytes = some_word_bytes(reader->take<uint8_t>());
  reader->take<uint8_t>();                             // selects the kernels
  const bool fitting = reader->take<uint8_t>() & 128;  // selects the threads
  for (uint32_t chunks = reader->take<uint8_t>() % (kMostChunks + 1); chunks > 0; --chunks)
    made.bounds.push_back(made.bounds.back() + reader->take<uint32_t>() % kMostWords);
  for (uint32_t rows = reader->take<uint8_t>() % (kMostChunks + 2); rows > 0; --rows)
    made.rows.push_back(reader->take<Row>());
  for (auto& stream : made.streams) {
    stream.resize(std::min<size_t>(reader->take<uint32_t>(), reader->left()));
    for (uint8_t& byte : stream) byte = reader->take<uint8_t>();
  }
  // Streams of the lengths that the rows declare: otherwise no mutation of a row would pass the
  // check of sizes.
  for (int stream = 0; fitting && stream < kStreams; ++stream) {
    uint64_t size = 0;
    for (const Row& row : made.rows) {
      if (row.chunk < made.run().chunks)
        size += stream_bytes(row, stream, made.bounds[row.chunk + 1] - made.bounds[row.chunk],
                             made.word_bytes);
    }
    if (size < kMostStreamBytes) made.streams[stream].resize(size);
  }
  return made;
}

void fill(uint8_t* base, size_t size) {
  for (size_t i = 0; i < size; ++i) base[i] = static_cast<uint8_t>(i * 7 + (i >> 8));
}

// The streams in memory of exactly their size.
struct Views {
  explicit Views(const Case& made) {
    memory.reserve(kStreams);
    for (int stream = 0; stream < kStreams; ++stream) {
      const auto& content = made.streams[stream];
      if (content.empty()) continue;
      memory.emplace_back(content.size(), 1);
      std::memcpy(memory.back().data(), content.data(), content.size());
      views[stream] = {memory.back().data(), content.size()};
    }
  }

  std::vector<Exact> memory;
  StreamView views[kStreams] = {};
};

std::string applied(const Case& made, uint8_t* base) {
  const Views streams(made);
  return apply(made.run(), made.rows.data(), made.rows.size(), streams.views, base);
}

// Returns the streams of one chunk as the plain kernels write them, or nothing if they would choose
// another method.
std::optional<std::vector<std::vector<uint8_t>>> written(const Case& made, Row* row,
                                                         const uint8_t* current,
                                                         const uint8_t* before, uint64_t words) {
  const uint64_t bytes = words * static_cast<uint64_t>(made.word_bytes);
  static const std::unique_ptr<Scratch> scratch(new Scratch);
  std::vector<uint8_t> base(before, before + bytes);
  std::vector<std::vector<uint8_t>> out(kStreams);
  if (is_law(row->method)) return std::nullopt;  // any law may be chosen: see laws.cc
  const uint32_t method = unordered(row->method);
  if (method == kSparse || method == kBitmap) {
    const int places = method == kSparse ? kGaps : kBits;
    std::vector<uint8_t> ordered(bytes);
    if (method != row->method) {
      if (made.word_bytes != kOrderedWordBytes) return std::nullopt;
      take_differences(current, base.data(), words, ordered.data());
      base.assign(bytes, 0);
      current = ordered.data();
    }
    out[kTiles].resize(kTileEntryBytes * tiles_of(words, made.word_bytes));
    for (int stream : {places, int{kValues}, int{kWide}})
      out[stream].resize(bytes + kMostTileBytes);
    const PositionStreams to{out[kTiles].data(), out[places].data(), out[kValues].data(),
                             out[kWide].data()};
    if (!kKernelsPlain.encode_positions(made.word_bytes, static_cast<Method>(method), current,
                                        base.data(), words, 0, scratch.get(), to, row))
      return std::nullopt;
    promise(bytes == 0 || std::memcmp(base.data(), current, bytes) == 0,
            "the base becomes the current chunk");
  } else {
    uint8_t* to[8] = {};
    const int first = row->method == kDiff ? kDiff0 : row->method == kPlanes ? kPlane0 : kWords;
    for (int k = 0; k < (row->method == kRaw ? 1 : made.word_bytes); ++k) {
      out[first + k].resize(row->method == kRaw ? bytes : words);
      to[k] = out[first + k].data();
    }
    kKernelsPlain.encode_dense(made.word_bytes, static_cast<Method>(row->method), current,
                               base.data(), words, scratch.get(), to);
    promise(bytes == 0 || std::memcmp(base.data(), current, bytes) == 0,
            "the base becomes the current chunk");
  }
  for (int stream = 0; stream < kStreams; ++stream)
    out[stream].resize(stream_bytes(*row, stream, words, made.word_bytes));
  return out;
}

void check_accepted(const Case& made, const uint8_t* before, const uint8_t* after) {
  uint64_t taken[kStreams] = {};
  for (const Row& row : made.rows) {
    const uint64_t start = made.bounds[row.chunk] * static_cast<uint64_t>(made.word_bytes);
    const uint64_t words = made.bounds[row.chunk + 1] - made.bounds[row.chunk];
    Row found = row;
    const auto streams = written(made, &found, after + start, before + start, words);
    if (streams) {
      const uint32_t method = unordered(row.method);
      if (method == kSparse || method == kBitmap)
        promise(std::memcmp(&found, &row, sizeof row) == 0,
                "what is accepted has the counts that the encoder gives");
      for (int stream = 0; stream < kStreams; ++stream) {
        const auto& mine = (*streams)[stream];
        promise(
            mine.empty() || std::memcmp(mine.data(), made.streams[stream].data() + taken[stream],
                                        mine.size()) == 0,
            "what is accepted is what the encoder writes");
      }
    }
    for (int stream = 0; stream < kStreams; ++stream)
      taken[stream] += stream_bytes(row, stream, words, made.word_bytes);
  }
  for (int stream = 0; stream < kStreams; ++stream)
    promise(taken[stream] == made.streams[stream].size(),
            "every byte of what is accepted belongs to a chunk");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Reader reader(data, size);
  const Case made = case_of(&reader);
  const size_t bytes = made.run().bytes();
  Exact before(bytes), once(bytes), again(bytes, 1);
  for (Exact* memory : {&before, &once, &again}) fill(memory->data(), bytes);
  use_instruction_set("plain");
  set_threads(1);
  const std::string refusal = applied(made, once.data());
  use_some_kernels(size > 1 ? data[1] : 0);
  set_threads(1 + (size > 2 ? data[2] : 0) % 3);
  promise(applied(made, again.data()) == refusal, "all kernels refuse the same");
  if (!refusal.empty()) return 0;
  promise(bytes == 0 || std::memcmp(once.data(), again.data(), bytes) == 0,
          "all kernels decode the same");
  check_accepted(made, before.data(), once.data());
  return 0;
}

std::vector<Input> seeds() {
  std::vector<Input> all;
  uint64_t random = 1;
  const auto next = [&] {
    return (random = random * 6364136223846793005u + 1442695040888963407u) >> 33;
  };
  for (int word_bytes : {1, 2, 4, 8}) {
    for (uint32_t method = kSparse; method < kMethods; ++method) {
      // Long chunks, and short ones, in which every byte of an input matters.
      for (uint32_t one_in : {300u, 20u, 3u, 2u}) {
        Case made;
        made.word_bytes = word_bytes;
        const uint64_t most = one_in == 3 ? 13 : 16384 / static_cast<uint64_t>(word_bytes) + 5;
        for (uint64_t words : {uint64_t{0}, uint64_t{1}, uint64_t{77}, most})
          made.bounds.push_back(made.bounds.back() + (one_in == 3 ? words % 20 : words));
        std::vector<uint8_t> before(made.run().bytes());
        fill(before.data(), before.size());
        for (uint32_t chunk = 0; chunk < made.run().chunks; ++chunk) {
          const uint64_t start = made.bounds[chunk] * static_cast<uint64_t>(word_bytes);
          const uint64_t words = made.bounds[chunk + 1] - made.bounds[chunk];
          if (words == 0) continue;
          std::vector<uint8_t> after(
              before.begin() + static_cast<int64_t>(start),
              before.begin() +
                  static_cast<int64_t>(start + words * static_cast<uint64_t>(word_bytes)));
          for (uint8_t& byte : after)
            if (next() % (one_in * static_cast<uint32_t>(word_bytes)) == 0)
              byte = static_cast<uint8_t>(byte + 1 + next() % 3);
          Row row{chunk, method, static_cast<uint32_t>(words), 0, 0};
          const auto streams = written(made, &row, after.data(), before.data() + start, words);
          if (!streams) continue;
          made.rows.push_back(row);
          for (int stream = 0; stream < kStreams; ++stream)
            made.streams[stream].insert(made.streams[stream].end(), (*streams)[stream].begin(),
                                        (*streams)[stream].end());
        }
        all.push_back(input_of(made, static_cast<uint8_t>(method),
                               static_cast<uint8_t>(one_in == 20 ? 1 : 128)));
      }
    }
  }
  return all;
}
