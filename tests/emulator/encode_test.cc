// Compares the emulated device encoder with the host encoder: rows, streams, head and bases, byte
// for byte.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/device.h"
#include "encoder/delta.h"
#include "memory.h"

using namespace deltacheck;
using check::Memory;

namespace {

std::mt19937_64 random_bits(20240607);

uint64_t below(uint64_t end) { return random_bits() % end; }
bool chance(double probability) {
  return static_cast<double>(random_bits() >> 11) * 0x1p-53 < probability;
}

struct Piece {
  int word_bytes;
  uint64_t words;
  Memory current, base;
  bool has_base = true, ordered = false;
  Method method = kUnchanged;  // that of the law
  AdamLaw law{};

  Piece(int word_bytes, uint64_t words, size_t offset = 0)
      : word_bytes(word_bytes),
        words(words),
        current(words * word_bytes, offset * word_bytes),
        base(words * word_bytes, offset * word_bytes % 48) {}

  uint64_t get(uint64_t i) const {
    uint64_t word = 0;
    std::memcpy(&word, base.data() + i * word_bytes, word_bytes);
    return word;
  }
  void set(uint64_t i, uint64_t word) {
    std::memcpy(current.data() + i * word_bytes, &word, word_bytes);
  }
  // Adds the difference with zigzag code z > 0 of word_bytes bytes.
  void change(uint64_t i, uint64_t z) { set(i, get(i) + ((z >> 1) ^ (0 - (z & 1)))); }
};

using Group = std::vector<std::unique_ptr<Piece>>;

// --- the comparison ------------------------------------------------------------------------------

struct Digested {
  std::vector<uint32_t> chunks;
} digested;

struct Expected {
  std::vector<Row> rows;
  std::vector<uint8_t> payload;
  uint64_t sizes[kStreams] = {};
};

// Each chunk is a run of its own, so that a group may contain words of every size.
Expected expected_of(const Group& group) {
  Expected expected;
  std::vector<uint8_t> streams[kStreams];
  for (uint32_t i = 0; i < group.size(); ++i) {
    const Piece& piece = *group[i];
    const uint64_t bounds[2] = {0, piece.words};
    Memory base(piece.base.size());
    std::memcpy(base.data(), piece.base.data(), base.size());
    const Encoded encoded =
        encode({bounds, 1, piece.word_bytes}, piece.current.data(),
               piece.has_base ? base.data() : nullptr, piece.method, piece.ordered, &piece.law);
    for (Row row : encoded.rows) {
      row.chunk = i;
      expected.rows.push_back(row);
    }
    for (int stream = 0; stream < kStreams; ++stream) {
      const Bytes& bytes = encoded.streams[stream];
      if (bytes.size != 0)
        streams[stream].insert(streams[stream].end(), bytes.data.get(),
                               bytes.data.get() + bytes.size);
    }
  }
  for (int stream = 0; stream < kStreams; ++stream) {
    expected.sizes[stream] = streams[stream].size();
    expected.payload.insert(expected.payload.end(), streams[stream].begin(), streams[stream].end());
  }
  return expected;
}

std::set<std::pair<int, uint32_t>> methods_seen;

// `missing`: the number of bytes by which the payload is too small.
void check_group(const Group& group, const std::string& name, uint64_t missing = 0,
                 bool digests = false) {
  const auto expect = [&](bool condition, const std::string& what) {
    if (!condition) check::fail(__FILE__, __LINE__, name.c_str(), what);
  };
  const Expected expected = expected_of(group);
  if (expected.payload.size() < missing) return;
  std::vector<device::Chunk> table;
  uint64_t bytes = 0;
  for (const std::unique_ptr<Piece>& piece : group) {
    table.push_back({piece->current.data(), piece->has_base ? piece->base.data() : nullptr,
                     static_cast<uint32_t>(piece->words), static_cast<uint16_t>(piece->word_bytes),
                     static_cast<uint8_t>(piece->ordered), static_cast<uint8_t>(piece->method),
                     piece->law});
    bytes +=
        piece->current.size() * (piece->ordered || is_law(piece->method) ? device::kMorePieces : 1);
  }
  const uint32_t chunks = static_cast<uint32_t>(group.size());
  const Memory scratch(device::scratch_bytes(chunks, bytes)),
      payload(expected.payload.size() - missing, 3);
  std::vector<Row> rows(chunks);
  std::vector<uint64_t> head(kHeadEntries, ~uint64_t{0}), digest_memory(2 * chunks);
  digested.chunks.clear();
  const cudaError_t error =
      device::encode({table.data(), chunks, scratch.data(), rows.data(), head.data(),
                      payload.data(), payload.size(), digests ? digest_memory.data() : nullptr},
                     nullptr);
  expect(error == cudaSuccess, "failed");
  expect(payload.untouched_before(), "wrote outside its memory");
  expect(head[kHeadRows] == expected.rows.size(), "has another number of rows");
  expect(head[kHeadOverflow] == (missing != 0), "has another overflow");
  for (int stream = 0; stream < kStreams; ++stream) {
    expect(head[kHeadStreams + stream] == expected.sizes[stream],
           std::string("has another size of ") + kStreamNames[stream]);
  }
  for (size_t i = 0; i < expected.rows.size(); ++i) {
    const Row &row = rows[i], &right = expected.rows[i];
    methods_seen.insert({group[right.chunk]->word_bytes, right.method});
    expect(std::memcmp(&row, &right, sizeof row) == 0,
           "row " + std::to_string(i) + " of chunk " + std::to_string(right.chunk) + ": " +
               std::to_string(row.chunk) + " " + std::to_string(row.method) + " " +
               std::to_string(row.changed) + " " + std::to_string(row.gap_bytes) + " " +
               std::to_string(row.wide_count) + ", expected method " +
               std::to_string(right.method) + " " + std::to_string(right.changed) + " " +
               std::to_string(right.gap_bytes) + " " + std::to_string(right.wide_count));
    if (digests)
      expect(i < digested.chunks.size() && digested.chunks[i] == right.chunk,
             "has another list for digests");
  }
  if (missing == 0 && head[kHeadRows] == expected.rows.size()) {
    const auto at =
        std::mismatch(expected.payload.begin(), expected.payload.end(), payload.data()).first;
    expect(at == expected.payload.end(),
           "differs at byte " + std::to_string(at - expected.payload.begin()));
  }
  for (const std::unique_ptr<Piece>& piece : group) {
    expect(piece->current.untouched_before() && piece->base.untouched_before(),
           "wrote outside a chunk");
    if (piece->has_base)
      expect(std::memcmp(piece->current.data(), piece->base.data(), piece->base.size()) == 0,
             "left another base");
  }
}

// --- contents of chunks --------------------------------------------------------------------------

uint64_t random_word(int word_bytes) { return random_bits() >> (64 - 8 * word_bytes); }

// Words near one value, as weights are: their top bytes have few values.
uint64_t alike_word(int word_bytes) {
  const uint64_t top = 0x3d + below(3);
  return top << (8 * word_bytes - 8) | random_word(word_bytes) >> 8;
}

enum class Size { kNarrow, kWide, kMixed, kEdge };

uint64_t some_z(int word_bytes, Size size) {
  const uint64_t most = word_bytes == 8 ? ~uint64_t{0} : (uint64_t{1} << (8 * word_bytes)) - 1;
  if (size == Size::kMixed) size = chance(0.05) ? Size::kWide : Size::kNarrow;
  if (size == Size::kNarrow) return 1 + below(std::min<uint64_t>(1 + below(12), 255));
  if (size == Size::kEdge) return std::min<uint64_t>(most, 254 + below(4));
  return std::max<uint64_t>(1, random_word(word_bytes));
}

std::unique_ptr<Piece> piece_of(int word_bytes, uint64_t words, size_t offset, double density,
                                Size size, uint64_t (*word)(int) = alike_word) {
  auto piece = std::make_unique<Piece>(word_bytes, words, offset);
  for (uint64_t i = 0; i < words; ++i) {
    const uint64_t value = word(word_bytes);
    std::memcpy(piece->base.data() + i * word_bytes, &value, word_bytes);
  }
  std::memcpy(piece->current.data(), piece->base.data(), piece->base.size());
  for (uint64_t i = 0; i < words; ++i) {
    if (chance(density)) piece->change(i, some_z(word_bytes, size));
  }
  return piece;
}

constexpr int kWordBytes[] = {1, 2, 4, 8};
constexpr double kDensities[] = {0, 0.0001, 0.001, 0.02, 0.1, 0.3, 0.5, 0.8, 1};

std::vector<uint64_t> sizes_around_tiles(int word_bytes) {
  const uint64_t tile = kTileBytes / static_cast<uint64_t>(word_bytes);
  return {0,
          1,
          2,
          3,
          7,
          8,
          9,
          31,
          255,
          256,
          257,
          tile - 1,
          tile,
          tile + 1,
          2 * tile + 5,
          16 * tile,
          16 * tile + 1,
          17 * tile - 3};
}

// --- tests ---------------------------------------------------------------------------------------

void test_sizes_around_tiles() {
  for (const int word_bytes : kWordBytes) {
    Group group;
    for (const uint64_t words : sizes_around_tiles(word_bytes)) {
      for (const double density : {0.01, 0.7})
        group.push_back(piece_of(word_bytes, words, below(2) * below(20), density, Size::kMixed));
    }
    check_group(group, "sizes around tiles, words of " + std::to_string(word_bytes));
  }
}

void test_densities() {
  for (const int word_bytes : kWordBytes) {
    const uint64_t tile = kTileBytes / static_cast<uint64_t>(word_bytes);
    for (const Size size : {Size::kNarrow, Size::kWide, Size::kMixed, Size::kEdge}) {
      Group group;
      for (const double density : kDensities) {
        group.push_back(piece_of(word_bytes, tile + below(2 * tile), 0, density, size));
        group.push_back(piece_of(word_bytes, tile / 2, below(16), density, size, random_word));
      }
      check_group(group, "densities, words of " + std::to_string(word_bytes));
    }
  }
}

void test_gaps_around_escapes() {
  for (const int word_bytes : kWordBytes) {
    Group group;
    for (const uint64_t gap : {0, 253, 254, 255, 256, 509, 510, 511, 1000, 2047}) {
      auto piece = piece_of(word_bytes, 2 * kTileBytes / word_bytes + 77, 0, 0, Size::kNarrow);
      for (uint64_t i = gap; i < piece->words; i += gap + 1)
        piece->change(i, chance(0.1) ? 200 : 1);
      group.push_back(std::move(piece));
    }
    auto last = piece_of(word_bytes, 3 * kTileBytes / word_bytes, 0, 0, Size::kNarrow);
    last->change(kTileBytes / word_bytes - 1, 1);  // the longest gap, and the last word
    last->change(last->words - 1, some_z(word_bytes, Size::kWide));
    group.push_back(std::move(last));
    check_group(group, "gaps, words of " + std::to_string(word_bytes));
  }
}

// Tiles 1 to 15, which are not in the sample, have `wide` wide and `narrow` narrow changes, one
// after the other. Tile 0 has a single change.
std::unique_ptr<Piece> piece_larger_than_it_seemed(int word_bytes, uint64_t wide, uint64_t narrow) {
  const uint64_t tile = kTileBytes / static_cast<uint64_t>(word_bytes);
  auto piece = piece_of(word_bytes, 16 * tile, 0, 0, Size::kNarrow);
  piece->change(5, 1);
  for (uint64_t i = 0; i < wide + narrow; ++i)
    piece->change(tile + i, i < wide && word_bytes > 1 ? 1000 : 1);
  return piece;
}

// The sample predicts sparse, but the streams are as large as the chunk or larger. The method
// becomes raw, and the base is nevertheless up to date. Neighbouring slots are not touched.
void test_streams_that_are_not_smaller_than_the_chunk() {
  for (const int word_bytes : kWordBytes) {
    const std::string name = "not smaller, words of " + std::to_string(word_bytes);
    const uint64_t limit = 16 * kTileBytes, entries = 16 * kTileEntryBytes, narrow_bytes = 2;
    const uint64_t wide_bytes =
        narrow_bytes + (word_bytes > 1 ? static_cast<uint64_t>(word_bytes) : 0);
    const uint64_t wide = (limit - entries - 10 * narrow_bytes) / wide_bytes;
    const uint64_t narrow = (limit - entries - wide * wide_bytes) / narrow_bytes;
    Group group;
    for (const uint64_t one_less : {2, 1}) {  // the change in tile 0 is the last narrow one
      group.push_back(piece_larger_than_it_seemed(word_bytes, wide, narrow - one_less));
      group.push_back(piece_of(word_bytes, 10000, 0, 0.03, Size::kMixed));
    }
    const Expected expected = expected_of(group);
    CHECK(expected.rows.size() == 4 && expected.rows[0].method == kSparse &&
          expected.rows[2].method == kRaw);
    check_group(group, name);
    group.clear();
    for (const uint64_t tiles : {15, 11, 12}) {
      group.push_back(piece_of(word_bytes, 10000, 0, 0.03, Size::kMixed));
      group.push_back(piece_larger_than_it_seemed(word_bytes, tiles * kTileBytes / word_bytes, 0));
    }
    check_group(group, name);
    group.clear();
    for (uint64_t words = 1; words < 20; ++words) {
      for (uint64_t changed = 0; changed <= words; changed += 1 + words / 3) {
        group.push_back(piece_of(word_bytes, words, 0, 0, Size::kNarrow));
        for (uint64_t i = 0; i < changed; ++i) group.back()->change(i, 1 + i % 3);
      }
    }
    check_group(group, name);
  }
}

// A chunk in which the first `changes` changes have been made.
struct Changes {
  std::unique_ptr<Piece> before;
  std::vector<uint64_t> places, z;

  std::unique_ptr<Piece> made(uint64_t changes) const {
    auto piece = std::make_unique<Piece>(before->word_bytes, before->words);
    for (Memory* to : {&piece->base, &piece->current})
      std::memcpy(to->data(), before->base.data(), to->size());
    for (uint64_t i = 0; i < changes; ++i) piece->change(places[i], z[i]);
    return piece;
  }
  uint32_t method(uint64_t changes) const {
    Group group;
    group.push_back(made(changes));
    const Expected expected = expected_of(group);
    return expected.rows.empty() ? uint32_t{kUnchanged} : expected.rows[0].method;
  }
};

// One more changed word makes another method the cheapest. Small errors of the costs show there.
void test_both_sides_of_every_border_between_methods() {
  for (const int word_bytes : kWordBytes) {
    Group group;
    for (int round = 0; round < 8; ++round) {
      const uint64_t words = kTileBytes / static_cast<uint64_t>(word_bytes) / (1 + below(3));
      Changes changes{piece_of(word_bytes, words, 0, 0, Size::kNarrow,
                               round % 4 == 3 ? random_word : alike_word),
                      {},
                      {}};
      for (uint64_t i = 0; i < words; ++i) {
        changes.places.push_back(i);
        changes.z.push_back(some_z(word_bytes, static_cast<Size>(round % 4)));
      }
      const uint64_t clump = round % 2 == 0 ? 1 : 4;
      for (uint64_t i = words / clump - 1; i > 0; --i) {
        const uint64_t other = below(i + 1);
        for (uint64_t j = 0; j < clump; ++j)
          std::swap(changes.places[i * clump + j], changes.places[other * clump + j]);
      }
      uint64_t low = 0;
      uint32_t method = kUnchanged;
      for (uint64_t high = 1; high <= words; high = std::max(high + 1, high * 5 / 4)) {
        const uint32_t next = changes.method(high);
        uint64_t left = low, right = high;
        while (next != method && right - left > 1) {
          const uint64_t middle = (left + right) / 2;
          (changes.method(middle) == method ? left : right) = middle;
        }
        if (next != method && method != kUnchanged) {
          group.push_back(changes.made(left));
          group.push_back(changes.made(right));
        }
        low = high;
        method = next;
      }
    }
    CHECK(group.size() > 12);
    check_group(group, "borders, words of " + std::to_string(word_bytes));
  }
}

void test_chunks_without_base() {
  Group group;
  for (const int word_bytes : kWordBytes) {
    for (const uint64_t words : {uint64_t{0}, uint64_t{1}, uint64_t{5}, uint64_t{20000}}) {
      group.push_back(piece_of(word_bytes, words, below(3), 0, Size::kNarrow));
      group.push_back(piece_of(word_bytes, words, below(3), 0, Size::kNarrow, random_word));
      group.push_back(
          piece_of(word_bytes, words, below(3), 0, Size::kNarrow, [](int) { return uint64_t{0}; }));
    }
  }
  for (const std::unique_ptr<Piece>& piece : group) piece->has_base = false;
  group.push_back(piece_of(2, 10000, 0, 0.02, Size::kNarrow));
  check_group(group, "no base", 0, true);
}

std::unique_ptr<Piece> any_piece() {
  const int word_bytes = kWordBytes[below(4)];
  const uint64_t words =
      below(4) != 0 ? below(3000) : below(50000 / static_cast<uint64_t>(word_bytes));
  auto piece = piece_of(word_bytes, words, below(2) * below(32), kDensities[below(9)],
                        static_cast<Size>(below(4)), below(4) != 0 ? alike_word : random_word);
  piece->has_base = below(10) != 0;
  return piece;
}

void test_many_chunks_of_many_leaves() {
  for (const size_t chunks : {0, 1, 47, 260}) {
    Group group;
    while (group.size() < chunks) group.push_back(any_piece());
    check_group(group, std::to_string(chunks) + " chunks", 0, true);
  }
}

void test_payload_too_small() {
  for (const uint64_t missing : {0, 1, 1000}) {
    Group group;
    for (int i = 0; i < 30; ++i) group.push_back(any_piece());
    check_group(group, "payload too small by " + std::to_string(missing), missing, true);
  }
}

// More tiles than the store kernel sums at a time, and several samples.
void test_long_chunks() {
  for (const int word_bytes : kWordBytes) {
    const uint64_t tile = kTileBytes / static_cast<uint64_t>(word_bytes);
    Group group;
    group.push_back(piece_of(word_bytes, 65 * tile + 3, 0, 0.02, Size::kMixed));
    if (word_bytes == 2) group.push_back(piece_of(word_bytes, 130 * tile, 1, 0.4, Size::kMixed));
    // Unchanged except for a few tiles in the middle.
    auto piece = piece_of(word_bytes, 40 * tile, 0, 0, Size::kNarrow);
    for (uint64_t i = 19 * tile; i < 33 * tile; i += 1 + below(300))
      piece->change(i, some_z(word_bytes, Size::kMixed));
    group.push_back(std::move(piece));
    check_group(group, "long chunks, words of " + std::to_string(word_bytes));
  }
}

// Bfloat16 words with exponents as weights have them, and others.
uint64_t weight_word(int) {
  const uint64_t exponent = chance(0.02) ? below(256) : 118 + below(8);
  return below(2) << 15 | exponent << 7 | below(128);
}

void test_ordered_chunks() {
  for (const Size size : {Size::kNarrow, Size::kWide, Size::kMixed, Size::kEdge}) {
    Group group;
    for (const double density : kDensities) {
      group.push_back(piece_of(2, 8192 + below(20000), below(5), density, size, weight_word));
      group.push_back(piece_of(2, 1 + below(3000), 0, density, size, random_word));
    }
    for (const std::unique_ptr<Piece>& piece : group) piece->ordered = true;
    check_group(group, "ordered chunks");
  }
  Group group;
  for (const uint64_t words : sizes_around_tiles(2)) {
    for (const double density : {0.01, 0.7})
      group.push_back(piece_of(2, words, below(2) * below(20), density, Size::kMixed, weight_word));
  }
  for (const std::unique_ptr<Piece>& piece : group) piece->ordered = below(4) != 0;
  group.push_back(piece_of(2, 5000, 0, 0.1, Size::kNarrow, weight_word));
  group.back()->ordered = true;
  group.back()->has_base = false;
  check_group(group, "ordered chunks of all sizes, and others", 0, true);
}

// --- chunks with a law ---------------------------------------------------------------------------

AdamLaw some_law() {
  AdamLaw law{};
  law.mean = static_cast<uint32_t>(below(kMeanForms));
  law.square = static_cast<uint32_t>(below(kSquareForms));
  law.weight = static_cast<uint32_t>(below(kWeightForms));
  law.beta1 = 0.9f, law.rest1 = 0.1f, law.inverse1 = 10.0f;
  law.beta2 = 0.999f, law.rest2 = 0.001f;
  law.eps = 1e-8f, law.rate = -1e-3f, law.earlier = 5e-4f;
  law.keep = 0.9999f, law.pull = -1e-4f;
  law.scale = chance(0.5) ? 0.37f : 1.0f, law.unscale = 1 / law.scale;
  return law;
}

float some_float(float size) { return size * (static_cast<float>(below(1 << 24)) * 0x1p-23f - 1); }

// A group after some steps. `misses`: the share of words that the law misses.
std::unique_ptr<Piece> group_of(Method method, uint64_t count, double misses, size_t offset = 0) {
  auto piece = std::make_unique<Piece>(4, 3 * count, offset);
  const AdamLaw law = piece->law = some_law();
  piece->method = method;
  const auto put = [&](const Memory& array, uint64_t i, float value) {
    std::memcpy(array.data() + 4 * i, &value, sizeof value);
  };
  for (uint64_t i = 0; i < count; ++i) {
    const float m = some_float(1e-3f), v = std::abs(some_float(1e-6f)), w = some_float(0.1f);
    const float g = float_of(bits_of(some_float(1e-3f)) & 0xffff0000u) * law.scale;
    const float next_m = mean_of(law.mean, law, m, g);
    // Under the mean law the gradient is that of m.
    const float gradient = method == kMeanLaw ? gradient_of(law, m, next_m) : g;
    const float next_v = square_of(law.square, law, v, gradient);
    const float update = method == kStepsLaw ? later_update_of(law, m, v, next_m, next_v)
                                             : update_of(law, next_m, next_v);
    put(piece->base, i, w), put(piece->base, count + i, m), put(piece->base, 2 * count + i, v);
    put(piece->current, i, weight_of(law.weight, law, w, update));
    put(piece->current, count + i, next_m);
    put(piece->current, 2 * count + i, next_v);
  }
  for (uint64_t i = 0; i < 3 * count; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, piece->current.data() + 4 * i, 4);
    if (chance(misses)) piece->set(i, word + 1 + below(chance(0.1) ? 100000 : 3));
  }
  return piece;
}

void test_laws() {
  for (const Method method : {kGradientLaw, kMeanLaw, kStepsLaw}) {
    Group group;
    for (const double misses : {0.0, 0.001, 0.02, 0.2, 1.0}) {
      for (int round = 0; round < 5; ++round)
        group.push_back(group_of(method, 1 + below(9000), misses, below(2) * below(8)));
    }
    // Infinite and undefined values, of which each processor makes its own.
    for (const float odd : {std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::quiet_NaN(), -0.0f, 1e-42f}) {
      auto piece = group_of(method, 3000, 0.001);
      for (int i = 0; i < 300; ++i) {
        std::memcpy(piece->current.data() + 4 * below(piece->words), &odd, 4);
        std::memcpy(piece->base.data() + 4 * below(piece->words), &odd, 4);
      }
      group.push_back(std::move(piece));
    }
    // No group: the chunk is unchanged, has another number of words, or has no base.
    group.push_back(group_of(method, 2000, 0));
    std::memcpy(group.back()->current.data(), group.back()->base.data(), group.back()->base.size());
    group.push_back(piece_of(4, 3001, 0, 0.02, Size::kNarrow));
    group.back()->method = method;
    group.push_back(group_of(method, 2000, 0));
    group.back()->has_base = false;
    group.push_back(any_piece());
    check_group(group, std::string("groups, ") + kMethodNames[method], 0, true);
    Group large;
    for (const double misses : {0.0, 0.001, 1.0}) large.push_back(group_of(method, 5000, misses));
    check_group(large, std::string("groups, small payload, ") + kMethodNames[method], 7);
  }
}

void test_every_method_was_seen() {
  for (const int word_bytes : kWordBytes) {
    for (uint32_t method = kSparse; method <= kRaw; ++method) {
      if (methods_seen.count({word_bytes, method}) == 0)
        check::fail(__FILE__, __LINE__, kMethodNames[method],
                    "never chosen for words of " + std::to_string(word_bytes));
    }
  }
  for (uint32_t method = kOrderedSparse; method <= kStepsLaw; ++method) {
    if (methods_seen.count({is_law(method) ? 4 : 2, method}) == 0)
      check::fail(__FILE__, __LINE__, kMethodNames[method], "never chosen");
  }
}

}  // namespace

// Replaces digest.cu: records its arguments.
cudaError_t deltacheck::device::enqueue_digests(const Chunk*, const Row* rows,
                                                const uint64_t* count, uint32_t most, uint64_t*,
                                                cudaStream_t) {
  CHECK(*count <= most);
  for (uint64_t i = 0; i < *count; ++i) digested.chunks.push_back(rows[i].chunk);
  return cudaSuccess;
}

int main() {
  set_threads(1);
  test_sizes_around_tiles();
  test_densities();
  test_gaps_around_escapes();
  test_streams_that_are_not_smaller_than_the_chunk();
  test_both_sides_of_every_border_between_methods();
  test_chunks_without_base();
  test_many_chunks_of_many_leaves();
  test_payload_too_small();
  test_long_chunks();
  test_ordered_chunks();
  test_laws();
  test_every_method_was_seen();
  return check::result();
}
