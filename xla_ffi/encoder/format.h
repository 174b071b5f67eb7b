// The constants and the scalar arithmetic of docs/reference/format.md, section 4. Everything here
// is part of the format: a change makes existing checkpoints unreadable.
//
// Host and device code include this file. Functions have internal linkage. The file is compiled
// once for each instruction set, and the linker must not use a copy made for a newer processor on
// an older one.

#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#  define DELTACHECK_HD __host__ __device__ static inline
#else
#  define DELTACHECK_HD static inline
#endif

namespace deltacheck {

// Permanent constants of the format.
// Bytes of a chunk that make a tile. The same on every processor.
constexpr uint32_t kTileBytes = 16384;
// In gaps: 255 more unchanged words follow. In values: the difference is in the stream wide.
constexpr uint32_t kEscape = 255;
// Tiles 0, 16, 32, .. are the sample from which the method is chosen.
constexpr uint32_t kSampleEvery = 16;
// A tile's entry in the stream tiles: three 16-bit numbers (4.3).
constexpr uint32_t kTileEntryBytes = 6;
// A chunk's entry in the stream law (4.6), and the parts of such a chunk: weight, m, v.
constexpr uint32_t kLawBytes = 64, kLawParts = 3, kLawWordBytes = 4;

enum Method : uint32_t {
  kUnchanged = 0,
  kSparse = 1,
  kBitmap = 2,
  kDiff = 3,
  kPlanes = 4,
  kRaw = 5,
  kOrderedSparse = 6,
  kOrderedBitmap = 7,
  kGradientLaw = 8,
  kMeanLaw = 9,
  kStepsLaw = 10
};
constexpr uint32_t kMethods = 11;
constexpr const char* kMethodNames[kMethods] = {
    "unchanged",      "sparse",         "bitmap",       "diff",     "planes",   "raw",
    "ordered sparse", "ordered bitmap", "gradient law", "mean law", "steps law"};

// The streams, in the order in which they are listed everywhere. Diff and planes have one stream
// for each byte of a word.
enum Stream : int {
  kTiles,
  kGaps,
  kBits,
  kValues,
  kWide,
  kDiff0,
  kPlane0 = kDiff0 + 8,
  kWords = kPlane0 + 8,
  kLaw,
  kStreams
};
constexpr const char* kStreamNames[kStreams] = {
    "tiles",  "gaps",   "bitmap", "values", "wide",   "diff0",  "diff1",  "diff2",
    "diff3",  "diff4",  "diff5",  "diff6",  "diff7",  "plane0", "plane1", "plane2",
    "plane3", "plane4", "plane5", "plane6", "plane7", "raw",    "law"};

struct Row {
  uint32_t chunk, method, changed, gap_bytes, wide_count;
};
constexpr uint32_t kRowWidth = 5;

// The entries of the head of a call that cannot size its results in advance: the number of rows, 1
// if the streams did not fit (else 0), then the bytes of every stream.
enum Head : int { kHeadRows, kHeadOverflow, kHeadStreams, kHeadEntries = kHeadStreams + kStreams };

// Unsigned words of W bytes. `Memory` is the same type for memory of any alignment and any declared
// type: may_alias, because tensors of all types are read through it.
template <int W>
struct Word;
template <>
struct Word<1> {
  using type = uint8_t;
  using signed_type = int8_t;
  typedef uint8_t Memory;
};
template <>
struct Word<2> {
  using type = uint16_t;
  using signed_type = int16_t;
  typedef uint16_t Memory __attribute__((may_alias, aligned(1)));
};
template <>
struct Word<4> {
  using type = uint32_t;
  using signed_type = int32_t;
  typedef uint32_t Memory __attribute__((may_alias, aligned(1)));
};
template <>
struct Word<8> {
  using type = uint64_t;
  using signed_type = int64_t;
  typedef uint64_t Memory __attribute__((may_alias, aligned(1)));
};

template <int W>
constexpr uint32_t kTileWords = kTileBytes / W;

DELTACHECK_HD uint64_t tiles_of(uint64_t words, int word_bytes) {
  return (words * word_bytes + kTileBytes - 1) / kTileBytes;
}

DELTACHECK_HD uint32_t words_of_tile(uint64_t words, uint64_t tile, uint32_t tile_words) {
  const uint64_t rest = words - tile * tile_words;
  return static_cast<uint32_t>(rest < tile_words ? rest : tile_words);
}

// Returns the zigzag code of current - base: small differences of either sign become small unsigned
// numbers.
template <int W>
DELTACHECK_HD typename Word<W>::type zigzag(typename Word<W>::type current,
                                            typename Word<W>::type base) {
  using U = typename Word<W>::type;
  using S = typename Word<W>::signed_type;
  const U d = static_cast<U>(current - base);
  return static_cast<U>(static_cast<U>(d << 1) ^ static_cast<U>(static_cast<S>(d) >> (8 * W - 1)));
}

// Returns the difference of a zigzag code.
template <int W>
DELTACHECK_HD typename Word<W>::type unzigzag(typename Word<W>::type z) {
  using U = typename Word<W>::type;
  return static_cast<U>(static_cast<U>(z >> 1) ^ static_cast<U>(0 - (z & 1)));
}

// Rotates the sign to the lowest bit, so that the top byte of bfloat16 and float32 holds all
// exponent bits. Exponents vary little within a tensor, so this plane compresses best.
template <int W>
DELTACHECK_HD typename Word<W>::type rotated_left(typename Word<W>::type word) {
  using U = typename Word<W>::type;
  if (W != 2 && W != 4) return word;
  return static_cast<U>(static_cast<U>(word << 1) | static_cast<U>(word >> (8 * W - 1)));
}

template <int W>
DELTACHECK_HD typename Word<W>::type rotated_right(typename Word<W>::type word) {
  using U = typename Word<W>::type;
  if (W != 2 && W != 4) return word;
  return static_cast<U>(static_cast<U>(word >> 1) | static_cast<U>(word << (8 * W - 1)));
}

DELTACHECK_HD uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

DELTACHECK_HD float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Words of 2 bytes are ordered by their class, which is the exponent of a bfloat16 (4.1).
constexpr int kOrderedWordBytes = 2;
constexpr uint32_t kClasses = 256, kClassBits = 0x7f80;

DELTACHECK_HD uint32_t class_of_word(uint16_t word) { return (word & kClassBits) >> 7; }

// Returns the method whose streams a chunk has, in the order of its words.
DELTACHECK_HD uint32_t unordered(uint32_t method) {
  if (method == kOrderedSparse) return kSparse;
  return method == kOrderedBitmap ? static_cast<uint32_t>(kBitmap) : method;
}

DELTACHECK_HD bool is_law(uint32_t method) { return method >= kGradientLaw && method <= kStepsLaw; }

// Returns true for the laws whose exceptions are stored as sparse words.
DELTACHECK_HD bool has_exceptions(uint32_t method) {
  return method == kGradientLaw || method == kMeanLaw;
}

// Returns the number of bytes that a chunk of `words` words owns in `stream`, as its row implies.
DELTACHECK_HD uint64_t stream_bytes(const Row& row, int stream, uint64_t words, int word_bytes) {
  const uint32_t method =
      has_exceptions(row.method) ? static_cast<uint32_t>(kSparse) : unordered(row.method);
  const bool positions = method == kSparse || method == kBitmap;
  if (stream == kTiles) return positions ? kTileEntryBytes * tiles_of(words, word_bytes) : 0;
  if (stream == kGaps) return method == kSparse ? row.gap_bytes : 0;
  if (stream == kLaw) return is_law(row.method) ? kLawBytes : 0;
  if (stream == kBits) return method == kBitmap ? (words + 7) / 8 : 0;
  if (stream == kValues) return positions ? row.changed : 0;
  if (stream == kWide) return positions ? uint64_t{row.wide_count} * word_bytes : 0;
  if (stream == kWords) return row.method == kRaw ? words * word_bytes : 0;
  const bool dense = row.method == kDiff || row.method == kStepsLaw;
  if (stream < kPlane0) {
    if (stream - kDiff0 >= word_bytes) return 0;
    return dense ? words : row.method == kMeanLaw ? words / kLawParts : 0;
  }
  if (row.method == kGradientLaw) return stream - kPlane0 < 2 ? words / kLawParts : 0;
  return row.method == kPlanes && stream - kPlane0 < word_bytes ? words : 0;
}

// --- 4.4: the cost of a byte string, in 1/256 bit ------------------------------------------------

constexpr uint64_t kByteCost = 8 * 256;

// Returns L(x) as the format defines it, by repeated squaring: the classic bit-by-bit binary
// logarithm. Integers only, so that every processor selects the same method. Slow; log2_256 returns
// the same. REQUIRES: x >= 1.
DELTACHECK_HD constexpr uint32_t log2_256_by_squaring(uint64_t x) {
  uint32_t e = 0;
  while (x >> e > 1) ++e;
  uint64_t m = e <= 31 ? x << (31 - e) : x >> (e - 31);
  uint32_t r = e;
  for (int step = 0; step < 8; ++step) {
    m = (m * m) >> 31;
    r *= 2;
    if (m >> 32) {
      m >>= 1;
      ++r;
    }
  }
  return r;
}

// A table for L. L is 256 e + f(m), and f is monotonic from 0 to 255, so the least m of each of its
// values determines f. By the 8 bits of m below the leading one, `first` gives f at the low end of
// that eighth. f increases by at most 2 up to the high end (256 log2' <= 1.4427 per step).
struct Log2Table {
  uint32_t least[258];
  uint8_t first[256];
};

static constexpr Log2Table make_log2_table() {
  Log2Table table{};
  for (uint32_t f = 0; f < 256; ++f) {
    uint64_t low = uint64_t{1} << 31, high = uint64_t{1} << 32;  // least m with f(m) >= f
    while (low < high) {
      const uint64_t middle = low + (high - low) / 2;
      if (log2_256_by_squaring(middle) - 31 * 256 >= f)
        high = middle;
      else
        low = middle + 1;
    }
    table.least[f] = static_cast<uint32_t>(low);
  }
  table.least[256] = table.least[257] = 0xffffffffu;
  for (uint32_t step = 0; step < 256; ++step) {
    table.first[step] = static_cast<uint8_t>(
        log2_256_by_squaring((uint64_t{1} << 31) + (uint64_t{step} << 23)) - 31 * 256);
  }
  return table;
}

#ifdef __CUDACC__
// Each thread needs one value, and a table would have to be loaded from memory.
DELTACHECK_HD uint32_t log2_256(uint64_t x) { return log2_256_by_squaring(x); }
#else
static constexpr Log2Table kLog2Table = make_log2_table();

// Returns L(x). REQUIRES: x >= 1.
static constexpr uint32_t log2_256(uint64_t x) {
  const uint32_t e = 63 - __builtin_clzll(x);
  const uint32_t m = static_cast<uint32_t>(e <= 31 ? x << (31 - e) : x >> (e - 31));
  const uint32_t f = kLog2Table.first[(m >> 23) & 255];
  return 256 * e + f + (f < 255 && m >= kLog2Table.least[f + 1]) +
         (f < 254 && m >= kLog2Table.least[f + 2]);
}

// f is monotonic, so the table is correct everywhere if it is correct on both sides of each
// increment.
static constexpr bool log2_256_is_exact() {
  for (uint32_t f = 1; f < 256; ++f) {
    const uint64_t m = kLog2Table.least[f];
    if (log2_256(m) != 31 * 256 + f || log2_256(m - 1) != 31 * 256 + f - 1) return false;
  }
  return log2_256(1) == 0 && log2_256(uint64_t{1} << 32) == 32 * 256 &&
         log2_256((uint64_t{1} << 32) - 1) == 32 * 256 - 1;
}
static_assert(log2_256_is_exact());
#endif

// Returns L(x), fast for small x, which are the most frequent. REQUIRES: x >= 1.
#ifdef __CUDACC__
DELTACHECK_HD uint32_t log2_of_count(uint64_t x) { return log2_256(x); }
#else
struct Log2Small {
  static constexpr uint32_t kEntries = 2048;
  uint16_t of[kEntries];
};

static constexpr Log2Small make_log2_small() {
  Log2Small small{};
  for (uint32_t x = 1; x < Log2Small::kEntries; ++x)
    small.of[x] = static_cast<uint16_t>(log2_256(x));
  return small;
}

static constexpr Log2Small kLog2Small = make_log2_small();

static inline uint32_t log2_of_count(uint64_t x) {
  return x < Log2Small::kEntries ? kLog2Small.of[x] : log2_256(x);
}
#endif

// Returns the contribution of a histogram entry to the entropy of a string. `whole`: L of its
// length.
DELTACHECK_HD uint64_t entropy_term(uint64_t entry, uint32_t whole) {
  return entry == 0 ? 0 : entry * (whole - log2_of_count(entry));
}

// Returns the cost of n bytes whose terms sum to `entropy` and whose largest entry is `most`. With
// `skew = false` it omits the skew term and is a lower bound.
DELTACHECK_HD uint64_t cost_of(uint64_t entropy, uint64_t most, uint64_t n, bool skew) {
  uint64_t sum = entropy;
  if (skew && 2 * most > n) sum += kByteCost * ((n - most) * (2 * most - n) / n);
  return sum < kByteCost * n ? sum : kByteCost * n;
}

// Returns the cost of a histogram. REQUIRES: its entries sum to n. A template, so that counters may
// have 32 or 64 bits.
template <typename Counter>
static inline uint64_t cost(const Counter* histogram, uint64_t n, bool skew = true) {
  if (n == 0) return 0;
  const uint32_t whole = log2_256(n);
  uint64_t entropy = 0, most = 0;
  for (int byte = 0; byte < 256; ++byte) {
    const uint64_t entry = histogram[byte];
    entropy += entropy_term(entry, whole);
    most = entry > most ? entry : most;
  }
  return cost_of(entropy, most, n, skew);
}

// Entropy is concave, so the cost of a part of the bytes is a lower bound of the cost of all bytes,
// up to the rounding of L. L(x) and 256 log2 x differ by less than 2, on both sides of a
// comparison. This is the largest error per byte.
constexpr uint64_t kRoundingCost = 4;

struct Choice {
  Method method;
  uint64_t cost;
};

// Returns the method of least cost, the first one among equal costs (4.4, 5). Planes are compared
// last.
DELTACHECK_HD Choice least_of(uint64_t diff, uint64_t sparse, uint64_t bitmap, uint64_t raw) {
  Choice least{kDiff, diff};
  if (sparse < least.cost) least = {kSparse, sparse};
  if (bitmap < least.cost) least = {kBitmap, bitmap};
  if (raw < least.cost) least = {kRaw, raw};
  return least;
}

}  // namespace deltacheck
