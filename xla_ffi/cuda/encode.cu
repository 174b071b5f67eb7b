// The encoder of device.h. One thread block processes one chunk from its first tile to its last. So
// no block ever waits for another, and the bytes do not depend on their scheduling. The places of
// the streams depend on all chunks; they are computed between two kernels:
//
//   lay_out  the slot of each chunk in scratch
//   prepare  of each chunk that is ordered or has a law, whether it differs from its base; the
//            prediction by the law (4.6 of docs/reference/format.md)
//   compact  the method of each chunk, from its sample (4.4); sparse and bitmap chunks, and the
//            exceptions of predictions: their streams into their slots; their bases
//   place    the place of each chunk's part of each stream; the rows
//   store    slots, and all other chunks directly from memory, into the payload; the other bases
//
// Chunks that are ordered or have a law have kernels of their own beside `compact` and `store`, so
// that the others need not their registers.
//
// The kernels are limited by memory, if the arithmetic for each word stays small and no thread
// waits for memory without need. So a tile is compared in units of 16 bytes, and bytes are packed
// in shared memory before they are stored. What was tried and was slower is in
// docs/lab/benchmarks.md.

#include <cstring>
#include <type_traits>

#include "cuda/block.cuh"
#include "cuda/device.h"
#include "cuda/law.cuh"
#include "cuda/order.cuh"

namespace deltacheck {
namespace device {
namespace {

// Slots begin at multiples of a memory transaction, so that aligned stores stay aligned.
constexpr uint64_t kSlotAlignment = 256;

// The state of a chunk between two kernels.
struct Entry {
  uint64_t slot;      // offset from the first slot
  Row row;            // for diff, planes, raw and the steps law, `changed` is computed last
  uint32_t place;     // index of its row, if it has one
  bool is_unchanged;  // of a group and of an ordered chunk: it equals its base
};

struct Job {
  EncodeArguments arguments;
  Entry* entries;
  uint64_t* offsets;  // (kStreams, chunks): offset of each chunk's part in a stream
  uint8_t* slots;
};

DELTACHECK_HD uint64_t rounded_up(uint64_t bytes) {
  return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

// Returns the room of a slot. No chunk is stored in more bytes than it has.
__device__ inline uint64_t slot_bytes(const Chunk& chunk) {
  return rounded_up(uint64_t{chunk.words} * chunk.word_bytes);
}

// Returns the pieces of so many bytes that a chunk has in scratch: its slot and, of a chunk whose
// words are ordered, their differences and as many zeros, and of a chunk with a law, its prediction
// and its gradients.
__device__ inline uint64_t pieces_of(const Chunk& chunk) {
  return is_ordered(chunk) || is_group(chunk) ? kMorePieces : 1;
}

// Returns a piece of a chunk; 0 is the slot.
__device__ inline uint8_t* piece(const Job& job, const Chunk& chunk, const Entry& entry,
                                 uint64_t number) {
  return job.slots + entry.slot + number * slot_bytes(chunk);
}

// Calls `function` with an integral constant that is the number of bytes of a word.
template <typename Function>
__device__ inline void with_word(uint32_t word_bytes, Function function) {
  switch (word_bytes) {
    case 1:
      return function(std::integral_constant<int, 1>());
    case 2:
      return function(std::integral_constant<int, 2>());
    case 4:
      return function(std::integral_constant<int, 4>());
    default:
      return function(std::integral_constant<int, 8>());
  }
}

// Shared memory for words of any size.
template <template <int> class Of>
union ForAnyWord {
  Of<1> one;
  Of<2> two;
  Of<4> four;
  Of<8> eight;

  __device__ operator Of<1>&() { return one; }
  __device__ operator Of<2>&() { return two; }
  __device__ operator Of<4>&() { return four; }
  __device__ operator Of<8>&() { return eight; }
};

// --- one tile: comparison of its words -----------------------------------------------------------

// Each thread compares kUnits units of a tile. The units of a warp are neighbours, and so are those
// that its lanes load at once.
constexpr uint32_t kUnitBytes = sizeof(uint4);
constexpr uint32_t kUnits = kTileBytes / (kUnitBytes * kBlockThreads);
template <int W>
constexpr uint32_t kUnitWords = kUnitBytes / W;

// Returns the place in the tile of a unit of this thread.
__device__ inline uint32_t place_of_unit(uint32_t unit) {
  return (warp_of_thread() * kUnits + unit) * kWarpThreads + lane_of_thread();
}

// Four numbers of 16 bits, one for each unit of a thread: bits of its words, or counts.
using PerUnit = uint64_t;
static_assert(kUnits == 4 && kWarpThreads * kUnitWords<1> < 1 << 16);

__device__ inline uint32_t of_unit(PerUnit numbers, uint32_t unit) {
  return static_cast<uint32_t>(numbers >> (16 * unit)) & 0xffffu;
}

template <int W>
struct Tile {
  using U = typename Word<W>::type;

  __device__ Tile(const Chunk& chunk, uint64_t tile)
      : current(reinterpret_cast<const U*>(chunk.current) + tile * kTileWords<W>),
        base(chunk.base == nullptr ? nullptr
                                   : reinterpret_cast<U*>(chunk.base) + tile * kTileWords<W>),
        words(words_of_tile(chunk.words, tile, kTileWords<W>)) {}

  const U* current;
  U* base;
  uint32_t words;
};

template <int W>
__device__ inline bool in_whole_units(const Tile<W>& tile) {
  const uintptr_t addresses =
      reinterpret_cast<uintptr_t>(tile.current) | reinterpret_cast<uintptr_t>(tile.base);
  return tile.words == kTileWords<W> && addresses % kUnitBytes == 0;
}

// The units of one thread, of both arrays.
struct Units {
  uint4 current[kUnits], base[kUnits];
};

// Loads the unit that begins at a word of a tile. Words behind the end of the tile are 0. A call,
// so that it takes no registers of its callers: few tiles are not aligned, or the last of a chunk.
template <int W>
__device__ __noinline__ uint4 load_words(const typename Word<W>::type* array, uint32_t first,
                                         uint32_t end) {
  typename Word<W>::type words[kUnitWords<W>];
#pragma unroll
  for (uint32_t i = 0; i < kUnitWords<W>; ++i) words[i] = first + i < end ? array[first + i] : 0;
  uint4 unit;
  memcpy(&unit, words, kUnitBytes);
  return unit;
}

// Loads the units of this thread. All loads are in flight at once. Without a base, both are
// current.
template <int W>
__device__ inline void load_units(const Tile<W>& tile, Units& units) {
  const auto* const base = tile.base != nullptr ? tile.base : tile.current;
  if (in_whole_units(tile)) {
#pragma unroll
    for (uint32_t unit = 0; unit < kUnits; ++unit) {
      units.current[unit] = reinterpret_cast<const uint4*>(tile.current)[place_of_unit(unit)];
      units.base[unit] = reinterpret_cast<const uint4*>(base)[place_of_unit(unit)];
    }
    return;
  }
#pragma unroll
  for (uint32_t unit = 0; unit < kUnits; ++unit) {
    const uint32_t first = place_of_unit(unit) * kUnitWords<W>;
    units.current[unit] = load_words<W>(tile.current, first, tile.words);
    units.base[unit] = load_words<W>(base, first, tile.words);
  }
}

// Returns the highest bit of each byte (W = 1) or half (W = 2) of x that is not 0.
template <int W>
__device__ inline uint32_t marks(uint32_t x) {
  constexpr uint32_t kBelow = W == 1 ? 0x7f7f7f7fu : 0x7fff7fffu;
  return (((x & kBelow) + kBelow) | x) & ~kBelow;
}

// Returns bit i for word i of a unit if it differs.
template <int W>
__device__ inline uint32_t differing_words(const uint4& current, const uint4& base) {
  const uint32_t x = current.x ^ base.x, y = current.y ^ base.y, z = current.z ^ base.z,
                 w = current.w ^ base.w;
  if (W == 1) {  // the multiplication gathers the bits 0, 8, 16 and 24 in 24 to 27
    constexpr uint32_t kGather = 0x01020408u;
    return (marks<1>(x) >> 7) * kGather >> 24 | (marks<1>(y) >> 7) * kGather >> 24 << 4 |
           (marks<1>(z) >> 7) * kGather >> 24 << 8 | (marks<1>(w) >> 7) * kGather >> 24 << 12;
  }
  if (W == 2) {  // the low halves have the even bits, and the high ones the odd bits
    const uint32_t halves =
        marks<2>(x) >> 15 | marks<2>(y) >> 13 | marks<2>(z) >> 11 | marks<2>(w) >> 9;
    return (halves | halves >> 15) & 0xffu;
  }
  if (W == 4) {
    return static_cast<uint32_t>(x != 0) | static_cast<uint32_t>(y != 0) << 1 |
           static_cast<uint32_t>(z != 0) << 2 | static_cast<uint32_t>(w != 0) << 3;
  }
  return static_cast<uint32_t>((x | y) != 0) | static_cast<uint32_t>((z | w) != 0) << 1;
}

// Compares the units of this thread and holds the bits of the changed words. The loads are those of
// `load_units`, whose calls for tiles that are not aligned would spill 160 bytes of registers here.
template <int W>
__device__ inline PerUnit changed_words(const Tile<W>& tile) {
  PerUnit changed = 0;
  if (in_whole_units(tile)) {
    uint4 current[kUnits], base[kUnits];
#pragma unroll
    for (uint32_t unit = 0; unit < kUnits; ++unit) {
      current[unit] = reinterpret_cast<const uint4*>(tile.current)[place_of_unit(unit)];
      base[unit] = reinterpret_cast<const uint4*>(tile.base)[place_of_unit(unit)];
    }
#pragma unroll
    for (uint32_t unit = 0; unit < kUnits; ++unit)
      changed |= PerUnit{differing_words<W>(current[unit], base[unit])} << (16 * unit);
    return changed;
  }
  for (uint32_t unit = 0; unit < kUnits; ++unit) {
    const uint32_t first = place_of_unit(unit) * kUnitWords<W>;
    for (uint32_t i = 0; i < kUnitWords<W> && first + i < tile.words; ++i)
      changed |= PerUnit{tile.current[first + i] != tile.base[first + i]} << (16 * unit + i);
  }
  return changed;
}

template <int W>
__device__ inline bool has_changed_words(const Chunk& chunk) {
  for (uint64_t index = 0; index < tiles_of(chunk.words, W); ++index) {
    if (__syncthreads_or(changed_words(Tile<W>(chunk, index)) != 0)) return true;
  }
  return false;
}

// Lists the positions of the changed words, ascending; returns their number.
template <int W>
__device__ inline uint32_t list_positions(PerUnit changed, uint16_t* positions,
                                          BlockScratch& scratch) {
  PerUnit counts = 0;
  for (uint32_t unit = 0; unit < kUnits; ++unit)
    counts |= static_cast<PerUnit>(__popc(of_unit(changed, unit))) << (16 * unit);
  const PerUnit inclusive = warp_inclusive_sum(counts),
                totals = __shfl_sync(kAllLanes, inclusive, kWarpThreads - 1);
  uint32_t words, in_warp = 0;
  for (uint32_t unit = 0; unit < kUnits; ++unit) in_warp += of_unit(totals, unit);
  uint32_t start = sum_below_warp(in_warp, scratch, &words);  // of the words of a warp's units
  for (uint32_t unit = 0; unit < kUnits; ++unit) {
    const uint32_t first = place_of_unit(unit) * kUnitWords<W>;
    uint32_t at = start + of_unit(inclusive - counts, unit);
    for (uint32_t bits = of_unit(changed, unit); bits != 0; bits &= bits - 1)
      positions[at++] = static_cast<uint16_t>(first + static_cast<uint32_t>(__ffs(bits)) - 1);
    start += of_unit(totals, unit);
  }
  __syncthreads();
  return words;
}

__device__ inline uint32_t gap_before(const uint16_t* positions, uint32_t k) {
  return k == 0 ? positions[0] : positions[k] - positions[k - 1] - 1u;
}

// Calls put(index, byte) for this thread's bytes of the bitmap of the tile.
template <int W, typename Put>
__device__ inline void bitmap_bytes(PerUnit changed, uint32_t words, Put put) {
  constexpr uint32_t kByteUnits = W <= 2 ? 1 : W / 2;  // units that share a byte
  for (uint32_t unit = 0; unit < kUnits; ++unit) {
    uint32_t bits = of_unit(changed, unit);
    for (uint32_t by = 1; by < kByteUnits; by *= 2)
      bits |= __shfl_down_sync(kAllLanes, bits, by) << (by * kUnitWords<W>);
    if (threadIdx.x % kByteUnits != 0) continue;
    const uint32_t first = place_of_unit(unit) * kUnitWords<W>;
    for (uint32_t word = 0; word < kUnitWords<W> && first + word < words; word += 8)
      put((first + word) / 8, static_cast<uint8_t>(bits >> word));
  }
}

// --- scans over all chunks, by one block ---------------------------------------------------------

// Calls use(chunk, sum of size(chunk) of the preceding chunks) for each chunk; returns the sum over
// all chunks.
template <typename Size, typename Use>
__device__ inline uint64_t scan_chunks(uint32_t chunks, Size size, Use use, BlockScratch& scratch) {
  uint64_t before = 0;
  for (uint64_t start = 0; start < chunks; start += kBlockThreads) {
    const uint64_t chunk = start + threadIdx.x;
    uint64_t total;
    const uint64_t sum =
        block_exclusive_sum(chunk < chunks ? size(chunk) : uint64_t{0}, scratch, &total);
    if (chunk < chunks) use(chunk, before + sum);
    before += total;
  }
  return before;
}

__global__ void __launch_bounds__(kBlockThreads) lay_out(Job job) {
  DELTACHECK_SHARED(BlockScratch, scratch);
  const Chunk* const table = job.arguments.table;
  scan_chunks(
      job.arguments.chunks,
      [&](uint64_t chunk) { return pieces_of(table[chunk]) * slot_bytes(table[chunk]); },
      [&](uint64_t chunk, uint64_t slot) { job.entries[chunk].slot = slot; }, scratch);
}

// One block for each stream, and one for the rows.
__global__ void __launch_bounds__(kBlockThreads) place(Job job) {
  DELTACHECK_SHARED(BlockScratch, scratch);
  const EncodeArguments& arguments = job.arguments;
  Entry* const entries = job.entries;
  if (blockIdx.x < kStreams) {
    const int stream = static_cast<int>(blockIdx.x);
    uint64_t* const offsets = job.offsets + uint64_t{blockIdx.x} * arguments.chunks;
    const auto size = [&](uint64_t chunk) {
      const Chunk& of = arguments.table[chunk];
      return stream_bytes(entries[chunk].row, stream, of.words, static_cast<int>(of.word_bytes));
    };
    const uint64_t total = scan_chunks(
        arguments.chunks, size, [&](uint64_t chunk, uint64_t offset) { offsets[chunk] = offset; },
        scratch);
    if (threadIdx.x == 0) arguments.head[kHeadStreams + stream] = total;
    return;
  }
  const auto has_row = [&](uint64_t chunk) -> uint64_t {
    return entries[chunk].row.method != kUnchanged;
  };
  const auto put = [&](uint64_t chunk, uint64_t at) {
    if (!has_row(chunk)) return;
    arguments.rows[at] = entries[chunk].row;
    entries[chunk].place = static_cast<uint32_t>(at);
  };
  const uint64_t rows = scan_chunks(arguments.chunks, has_row, put, scratch);
  if (threadIdx.x == 0) {
    arguments.head[kHeadRows] = rows;
    arguments.head[kHeadOverflow] = 0;
  }
}

// --- 4.4: the choice of the method ---------------------------------------------------------------

// Most bytes of most histograms are 0, and atomic additions to one counter are serialised. So entry
// 0 is not counted; it follows from the others.
using Histogram = uint32_t[256];
static_assert(kBlockThreads == 256, "a thread for each entry");

template <int W>
struct ChooseShared {
  uint16_t positions[kTileWords<W>];
  Histogram planes[W], values, wide, bits, gaps;
  uint64_t costs[W + 4];
  BlockScratch scratch;
};

__device__ inline void count(Histogram& histogram, uint32_t byte) {
  if (byte != 0) atomicAdd(&histogram[byte], 1u);
}

template <int W>
__device__ inline void count_planes(Histogram* planes, typename Word<W>::type word) {
  for (int k = 0; k < W; ++k) count(planes[k], static_cast<uint8_t>(word >> (8 * k)));
}

// Returns the cost of n bytes, by one warp.
__device__ inline uint64_t warp_cost(const Histogram& histogram, uint64_t n, bool skew) {
  if (n == 0) return 0;
  constexpr uint32_t kEach = 256 / kWarpThreads;
  uint64_t nonzero = 0;
  for (uint32_t i = 0; i < kEach; ++i) {
    const uint32_t byte = i * kWarpThreads + lane_of_thread();
    if (byte != 0) nonzero += histogram[byte];
  }
  nonzero = warp_sum(nonzero);
  const uint32_t whole = log2_256(n);
  uint64_t entropy = 0, most = 0;
#pragma unroll 1  // L is long
  for (uint32_t i = 0; i < kEach; ++i) {
    const uint32_t byte = i * kWarpThreads + lane_of_thread();
    const uint64_t entry = byte != 0 ? histogram[byte] : n - nonzero;
    entropy += entropy_term(entry, whole);
    most = entry > most ? entry : most;
  }
  return cost_of(warp_sum(entropy), warp_max(most), n, skew);
}

struct Costs {
  bool changed;  // whether the sample has a changed word; the costs hold if it has
  uint64_t diff, sparse, bitmap;
};

template <int W>
__device__ inline Costs difference_costs(const Chunk& chunk, uint64_t sample_words,
                                         ChooseShared<W>& shared) {
  for (int k = 0; k < W; ++k) shared.planes[k][threadIdx.x] = 0;
  shared.wide[threadIdx.x] = shared.bits[threadIdx.x] = shared.gaps[threadIdx.x] = 0;
  uint64_t changed = 0, bitmap_length = 0;
  uint32_t wide_here = 0;
  for (uint64_t index = 0; index < tiles_of(chunk.words, W); index += kSampleEvery) {
    const Tile<W> tile(chunk, index);
    bitmap_length += (tile.words + 7) / 8;
    const PerUnit bits = changed_words(tile);
    if (!__syncthreads_or(bits != 0)) continue;
    bitmap_bytes<W>(bits, tile.words, [&](uint32_t, uint8_t byte) { count(shared.bits, byte); });
    const uint32_t words = list_positions<W>(bits, shared.positions, shared.scratch);
    changed += words;
    for (uint32_t k = threadIdx.x; k < words; k += kBlockThreads) {
      const uint32_t gap = gap_before(shared.positions, k), position = shared.positions[k];
      count(shared.gaps, gap % kEscape);
      if (gap >= kEscape) atomicAdd(&shared.gaps[kEscape], gap / kEscape);
      const typename Word<W>::type z = zigzag<W>(tile.current[position], tile.base[position]);
      count_planes<W>(shared.planes, z);
      if (z > 255) {
        ++wide_here;
        count(shared.wide, static_cast<uint8_t>(z));
      }
    }
  }
  if (changed == 0) return {};
  const uint64_t wide_count = block_sum(uint64_t{wide_here}, shared.scratch);
  // Up to here, `wide` holds the low bytes of wide differences. A narrow difference is equal to its
  // low byte; it has this byte alone in `values`, and nothing in `wide`.
  const uint32_t byte = threadIdx.x;
  shared.values[(byte + 255) % 256] =
      byte != 0 ? shared.planes[0][byte] - shared.wide[byte] : static_cast<uint32_t>(wide_count);
  for (int k = 1; k < W; ++k) shared.wide[byte] += shared.planes[k][byte];
  __syncthreads();
  for (uint32_t i = warp_of_thread(); i < W + 4; i += kBlockWarps) {
    const Histogram& histogram = i < W        ? shared.planes[i]
                                 : i == W     ? shared.values
                                 : i == W + 1 ? shared.wide
                                 : i == W + 2 ? shared.bits
                                              : shared.gaps;
    const uint64_t length = i < W        ? sample_words
                            : i == W     ? changed
                            : i == W + 1 ? wide_count * W
                            : i == W + 2 ? bitmap_length
                                         : changed + shared.gaps[kEscape];
    const uint64_t cost = warp_cost(histogram, length, true);
    if (lane_of_thread() == 0) shared.costs[i] = cost;
  }
  __syncthreads();
  Costs costs{true, 0, 0, 0};
  for (int k = 0; k < W; ++k) costs.diff += shared.costs[k];
  costs.bitmap = shared.costs[W] + shared.costs[W + 1] + shared.costs[W + 2];
  costs.sparse = shared.costs[W] + shared.costs[W + 1] + shared.costs[W + 3];
  return costs;
}

// Returns true if value planes cost less than `bound` on the sample. Reads no more of the sample
// than the answer needs.
template <int W>
__device__ inline bool planes_cost_less(const Chunk& chunk, uint64_t sample_words, uint64_t bound,
                                        ChooseShared<W>& shared) {
  constexpr uint32_t kFirstLook = 1024;
  for (int k = 0; k < W; ++k) shared.planes[k][threadIdx.x] = 0;
  __syncthreads();
  uint64_t counted = 0, next_look = kFirstLook;
  for (uint64_t index = 0; index < tiles_of(chunk.words, W); index += kSampleEvery) {
    const Tile<W> tile(chunk, index);
    for (uint32_t start = 0; start < tile.words; start += kFirstLook) {
      const uint32_t group = tile.words - start < kFirstLook ? tile.words - start : kFirstLook;
      for (uint32_t i = threadIdx.x; i < group; i += kBlockThreads)
        count_planes<W>(shared.planes, rotated_left<W>(tile.current[start + i]));
      counted += group;
      const bool all = counted == sample_words;
      if (counted < next_look && !all) continue;
      next_look = 2 * counted;
      __syncthreads();
      if (warp_of_thread() < W) {
        const uint64_t cost = warp_cost(shared.planes[warp_of_thread()], counted, all);
        if (lane_of_thread() == 0) shared.costs[warp_of_thread()] = cost;
      }
      __syncthreads();
      uint64_t sum = 0;
      for (int k = 0; k < W; ++k) sum += shared.costs[k];
      if (all) return sum < bound;
      if (sum >= bound + kRoundingCost * sample_words * W) return false;
    }
  }
  return false;
}

template <int W>
__device__ inline Method choose(const Chunk& chunk, ChooseShared<W>& shared) {
  uint64_t sample_words = 0;
  for (uint64_t tile = 0; tile < tiles_of(chunk.words, W); tile += kSampleEvery)
    sample_words += words_of_tile(chunk.words, tile, kTileWords<W>);
  Choice best{kRaw, kByteCost * sample_words * W};
  if (chunk.base != nullptr) {
    const Costs costs = difference_costs<W>(chunk, sample_words, shared);
    if (!costs.changed) return kSparse;
    best = least_of(costs.diff, costs.sparse, costs.bitmap, best.cost);
  }
  return planes_cost_less<W>(chunk, sample_words, best.cost, shared) ? kPlanes : best.method;
}

// --- sparse and bitmap ---------------------------------------------------------------------------

// A slot holds, from its start, the entries of the tiles, the bitmap if there is one, and then for
// each tile its values and its gaps. From its end downwards it holds the wide differences of each
// tile, so that they are aligned.
template <int W>
struct Slot {
  using U = typename Word<W>::type;

  __device__ Slot(uint8_t* slot, const Chunk& chunk, bool bitmap)
      : entries(reinterpret_cast<uint16_t*>(slot)),
        bits(slot + kTileEntryBytes * tiles_of(chunk.words, W)),
        records(bits + (bitmap ? (uint64_t{chunk.words} + 7) / 8 : 0)),
        wide_end(reinterpret_cast<U*>(slot + slot_bytes(chunk))) {}

  uint16_t* entries;
  uint8_t *bits, *records;
  U* wide_end;
};

template <int W>
struct StoreChangesShared {
  uint16_t positions[kTileWords<W>];
  typename Word<W>::type z[W > 1 ? kTileWords<W> : 1];  // of the changed words
  BlockScratch scratch;
};

template <int W>
union CompactShared {
  ChooseShared<W> choose;
  OrderShared order;
  StoreChangesShared<W> changes;
};

// The sizes of the parts that one tile owns.
struct Owned {
  uint32_t words, gap_bytes, wide;
};

// Writes the values and the gaps of one tile, whose changed positions are listed, its wide
// differences before `wide_end`, and the new base. If `values` is null, only the base is written.
// Nothing is written that would make the chunk larger than `room` bytes, and no gaps for `bitmap`.
// Each warp processes a part of the words.
template <int W>
__device__ inline Owned store_changes(const Tile<W>& tile, uint32_t words, bool bitmap,
                                      uint8_t* values, typename Word<W>::type* wide_end,
                                      uint64_t room, StoreChangesShared<W>& shared) {
  using U = typename Word<W>::type;
  const uint32_t each = (words + kBlockThreads - 1) / kBlockThreads * kWarpThreads;
  const uint32_t begin = warp_of_thread() * each < words ? warp_of_thread() * each : words;
  const uint32_t end = begin + each < words ? begin + each : words;
  uint8_t* const gaps = values != nullptr && !bitmap ? values + words : nullptr;
  uint32_t more = 0, wide = 0;  // bytes of escapes, wide differences
  for (uint32_t k = begin + lane_of_thread(); k < end; k += kWarpThreads) {
    const uint32_t position = shared.positions[k], gap = gap_before(shared.positions, k);
    const U current = tile.current[position], z = zigzag<W>(current, tile.base[position]);
    tile.base[position] = current;
    if (!bitmap) more += gap / kEscape;
    if (values != nullptr) values[k] = static_cast<uint8_t>(z > 255 ? kEscape : z - 1);
    if (gaps != nullptr) gaps[k] = static_cast<uint8_t>(gap);  // its place if no gap has an escape
    if (W > 1) {
      shared.z[k] = z;
      wide += z > 255;
    }
  }
  // Both fit into 16 bits: a tile has at most 8192 words of two bytes and more, and 64 escapes.
  uint32_t totals;
  const uint32_t before = block_exclusive_sum(wide << 16 | more, shared.scratch, &totals);
  const uint32_t all_more = totals & 0xffffu, all_wide = totals >> 16;
  const Owned owned{words, bitmap ? 0 : words + all_more, all_wide};
  if (values == nullptr || totals == 0 ||
      owned.words + owned.gap_bytes + uint64_t{all_wide} * W >= room)
    return owned;
  const uint32_t before_warp = __shfl_sync(kAllLanes, before, 0);
  uint32_t more_at = before_warp & 0xffffu, wide_at = before_warp >> 16;
  for (uint32_t start = begin; start < end; start += kWarpThreads) {
    const uint32_t k = start + lane_of_thread();
    if (all_more != 0) {
      const uint32_t gap = k < end ? gap_before(shared.positions, k) : 0;
      const uint32_t escapes = gap / kEscape, inclusive = warp_inclusive_sum(escapes);
      if (k < end) {
        uint8_t* at = gaps + k + more_at + inclusive - escapes;
        for (uint32_t i = 0; i < escapes; ++i) *at++ = kEscape;
        *at = static_cast<uint8_t>(gap % kEscape);
      }
      more_at += __shfl_sync(kAllLanes, inclusive, kWarpThreads - 1);
    }
    if (W > 1 && all_wide != 0) {
      const bool is_wide = k < end && shared.z[k] > 255;
      const uint32_t lanes = __ballot_sync(kAllLanes, is_wide),
                     below = lanes & ((1u << lane_of_thread()) - 1);
      if (is_wide)
        (wide_end - all_wide)[wide_at + static_cast<uint32_t>(__popc(below))] = shared.z[k];
      wide_at += static_cast<uint32_t>(__popc(lanes));
    }
  }
  return owned;
}

// Fills the counts of the row and copies current to the base. If the streams are not smaller than
// the chunk, the method becomes raw, and the content of the slot is undefined.
template <int W>
__device__ inline void compact_chunk(const Chunk& chunk, uint8_t* slot_start,
                                     StoreChangesShared<W>& shared, Row* row) {
  const bool bitmap = row->method == kBitmap;
  const Slot<W> slot(slot_start, chunk, bitmap);
  const uint64_t limit =
      uint64_t{chunk.words} * W;  // the streams must stay below it, hence inside the slot
  uint64_t used = static_cast<uint64_t>(slot.records - slot_start), changed = 0, gap_bytes = 0,
           wide = 0;
  bool fits = true;
  for (uint64_t index = 0; index < tiles_of(chunk.words, W); ++index) {
    const Tile<W> tile(chunk, index);
    const PerUnit bits = changed_words(tile);
    if (fits && bitmap) {
      uint8_t* const to = slot.bits + index * (kTileWords<W> / 8);
      bitmap_bytes<W>(bits, tile.words, [&](uint32_t at, uint8_t byte) { to[at] = byte; });
    }
    Owned owned{0, 0, 0};
    if (__syncthreads_or(bits != 0)) {
      const uint32_t words = list_positions<W>(bits, shared.positions, shared.scratch);
      fits = fits && used + words * (bitmap ? 1u : 2u) < limit;  // the smallest possible size
      uint8_t* const values = fits ? slot.records + changed + gap_bytes : nullptr;
      owned =
          store_changes<W>(tile, words, bitmap, values, slot.wide_end - wide, limit - used, shared);
    }
    changed += owned.words;
    gap_bytes += owned.gap_bytes;
    wide += owned.wide;
    used += owned.words + owned.gap_bytes + uint64_t{owned.wide} * W;
    fits = fits && used < limit;
    if (fits && threadIdx.x == 0) {
      slot.entries[3 * index] = static_cast<uint16_t>(owned.words);
      slot.entries[3 * index + 1] = static_cast<uint16_t>(owned.gap_bytes);
      slot.entries[3 * index + 2] = static_cast<uint16_t>(owned.wide);
    }
  }
  row->changed = static_cast<uint32_t>(changed);
  if (changed == 0)
    row->method = kUnchanged;
  else if (!fits)
    row->method = kRaw;
  else
    row->gap_bytes = static_cast<uint32_t>(gap_bytes),
    row->wide_count = static_cast<uint32_t>(wide);
}

__global__ void __launch_bounds__(kBlockThreads) prepare(Job job) {
  const Chunk& chunk = job.arguments.table[blockIdx.x];
  Entry& entry = job.entries[blockIdx.x];
  bool is_unchanged = false;
  if (is_group(chunk)) {
    is_unchanged = !predict_chunk(chunk, reinterpret_cast<uint32_t*>(piece(job, chunk, entry, 1)),
                                  reinterpret_cast<uint16_t*>(piece(job, chunk, entry, 2)));
  } else if (is_ordered(chunk)) {
    // This look takes less time than the ordering of a chunk that has not changed.
    is_unchanged = !has_changed_words<kOrderedWordBytes>(chunk);
  }
  if (threadIdx.x == 0) entry.is_unchanged = is_unchanged;
}

// Returns the row of a chunk before anything is known of it.
__device__ inline Row row_of(const Chunk& chunk) {
  return {blockIdx.x, kUnchanged, chunk.base != nullptr ? 0 : chunk.words, 0, 0};
}

__global__ void __launch_bounds__(kBlockThreads, 4) compact(Job job) {
  DELTACHECK_SHARED(ForAnyWord<CompactShared>, shared);
  const Chunk chunk = job.arguments.table[blockIdx.x];
  if (is_group(chunk) || is_ordered(chunk)) return;
  Entry& entry = job.entries[blockIdx.x];
  Row row = row_of(chunk);
  if (chunk.words > 0) {
    with_word(chunk.word_bytes, [&](auto bytes) {
      constexpr int W = decltype(bytes)::value;
      CompactShared<W>& of_word = shared;
      row.method = choose<W>(chunk, of_word.choose);
      if (row.method != kSparse && row.method != kBitmap) return;
      __syncthreads();  // `changes` lies in the place of `choose`
      compact_chunk<W>(chunk, piece(job, chunk, entry, 0), of_word.changes, &row);
    });
  }
  if (threadIdx.x == 0) entry.row = row;
}

// The same for a group: its exceptions, as sparse words, or a plain chunk if its law misses so much
// that it is none.
__device__ inline void compact_group(const Job& job, const Chunk& chunk, const Entry& entry,
                                     CompactShared<kLawWordBytes>& shared, Row* row) {
  row->method = chunk.method;
  if (chunk.method == kStepsLaw) return;
  uint8_t* const slot = piece(job, chunk, entry, 0);
  Chunk compared = chunk;
  compared.base = piece(job, chunk, entry, 1);
  row->method = kSparse;
  for (bool is_predicted = true;; is_predicted = false) {
    compact_chunk<kLawWordBytes>(compared, slot, shared.changes, row);
    if (!is_predicted) return;
    const uint64_t bytes =
        uint64_t{row->gap_bytes} + row->changed + uint64_t{row->wide_count} * kLawWordBytes;
    if (row->method != kRaw && bytes <= chunk.words) {
      row->method = chunk.method;
      return;
    }
    __syncthreads();  // `choose` lies in the place of `changes`
    *row = row_of(chunk);
    row->method = choose<kLawWordBytes>(chunk, shared.choose);
    if (row->method != kSparse && row->method != kBitmap) return;
    __syncthreads();
    compared = chunk;
  }
}

// The same for a chunk whose words are ordered by their class.
__device__ inline void compact_ordered(const Job& job, const Chunk& chunk, const Entry& entry,
                                       CompactShared<kOrderedWordBytes>& shared, Row* row) {
  row->method = choose<kOrderedWordBytes>(chunk, shared.choose);
  if (row->method != kSparse && row->method != kBitmap) return;
  __syncthreads();  // `order` lies in the place of `choose`
  uint8_t *const differences = piece(job, chunk, entry, 1), *const zeros =
                                                                piece(job, chunk, entry, 2);
  take_differences(reinterpret_cast<const uint16_t*>(chunk.current),
                   reinterpret_cast<uint16_t*>(chunk.base), chunk.words,
                   reinterpret_cast<uint16_t*>(differences), shared.order);
  for (uint32_t i = threadIdx.x; i < slot_bytes(chunk) / sizeof(uint4); i += kBlockThreads)
    reinterpret_cast<uint4*>(zeros)[i] = uint4{};
  __syncthreads();
  Chunk ordered = chunk;
  ordered.current = differences;
  ordered.base = zeros;
  compact_chunk<kOrderedWordBytes>(ordered, piece(job, chunk, entry, 0), shared.changes, row);
  if (row->method == kSparse) row->method = kOrderedSparse;
  if (row->method == kBitmap) row->method = kOrderedBitmap;
}

__global__ void __launch_bounds__(kBlockThreads, 4) compact_prepared(Job job) {
  DELTACHECK_SHARED(ForAnyWord<CompactShared>, shared);
  const Chunk chunk = job.arguments.table[blockIdx.x];
  if (!is_group(chunk) && !is_ordered(chunk)) return;
  Entry& entry = job.entries[blockIdx.x];
  Row row = row_of(chunk);
  if (!entry.is_unchanged) {
    if (is_group(chunk)) {
      compact_group(job, chunk, entry, shared.four, &row);
    } else {
      compact_ordered(job, chunk, entry, shared.two, &row);
    }
  }
  if (threadIdx.x == 0) entry.row = row;
}

// --- the payload ---------------------------------------------------------------------------------

__device__ inline uint64_t payload_needed(const EncodeArguments& arguments,
                                          int streams = kStreams) {
  uint64_t bytes = 0;
  for (int stream = 0; stream < streams; ++stream) bytes += arguments.head[kHeadStreams + stream];
  return bytes;
}

// Returns the place of the chunk's part of a stream.
__device__ inline uint8_t* place_of(const Job& job, int stream) {
  return job.arguments.payload + payload_needed(job.arguments, stream) +
         job.offsets[uint64_t{static_cast<uint32_t>(stream)} * job.arguments.chunks + blockIdx.x];
}

// Copies the share of thread `thread` of `threads`. Most bytes are stored in aligned words of 16
// bytes if both sides are aligned, else of 4 bytes, each combined from two aligned words that lie
// within the source.
__device__ inline void copy_bytes(uint8_t* __restrict__ to, const uint8_t* __restrict__ from,
                                  uint64_t bytes, uint32_t thread, uint32_t threads) {
  const uintptr_t target = reinterpret_cast<uintptr_t>(to),
                  source = reinterpret_cast<uintptr_t>(from);
  uint64_t head = 0, end = 0;  // of what is copied in words
  if ((target | source) % sizeof(uint4) == 0) {
    end = bytes / sizeof(uint4) * sizeof(uint4);
#pragma unroll 4
    for (uint64_t i = thread; i < end / sizeof(uint4); i += threads)
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  } else {
    head = -target % 4;
    if (head < -source % 4) head += 4;
    const uint32_t shift = (source + head) % 4 * 8;
    const uint64_t needed = shift == 0 ? head : head + 4;  // with the second word of the first
    const uint64_t words = bytes < needed ? 0 : (bytes - needed + shift / 8) / 4;
    const uint32_t* const pairs = reinterpret_cast<const uint32_t*>(from + head - shift / 8);
    uint32_t* const aligned = reinterpret_cast<uint32_t*>(to + head);
#pragma unroll 4
    for (uint64_t i = thread; i < words; i += threads) {
      const uint64_t high = shift == 0 ? 0 : pairs[i + 1];
      aligned[i] = static_cast<uint32_t>((high << 32 | pairs[i]) >> shift);
    }
    head = words == 0 ? 0 : head;
    end = head + 4 * words;
  }
  const uint64_t rest = head + bytes - end;
  for (uint64_t i = thread; i < rest; i += threads) {
    const uint64_t at = i < head ? i : end - head + i;
    to[at] = from[at];
  }
}

// Copies a chunk from its slot to the payload. Few threads copy the parts of one tile, which are
// mostly short, so that a block waits for many of them at once.
template <int W>
__device__ inline void store_slot(const Job& job, const Chunk& chunk, const Entry& entry,
                                  BlockScratch& scratch, uint64_t* before_tile) {
  // Three sums of 21 bits each fit into a word for up to this number of tiles.
  constexpr uint32_t kTogether = 64, kSumBits = 21, kCopyThreads = 8;
  static_assert(kTogether * kTileBytes < 1 << kSumBits && kTogether <= kBlockThreads);
  const bool bitmap = unordered(entry.row.method) == kBitmap;
  const Slot<W> slot(job.slots + entry.slot, chunk, bitmap);
  const uint64_t tiles = tiles_of(chunk.words, W);
  copy_bytes(place_of(job, kTiles), job.slots + entry.slot, kTileEntryBytes * tiles, threadIdx.x,
             kBlockThreads);
  if (bitmap)
    copy_bytes(place_of(job, kBits), slot.bits, (uint64_t{chunk.words} + 7) / 8, threadIdx.x,
               kBlockThreads);
  uint8_t *const gaps = place_of(job, kGaps), *const values = place_of(job, kValues),
                 *const wide = place_of(job, kWide);
  uint64_t words_before = 0, gaps_before = 0, wide_before = 0;
  for (uint64_t start = 0; start < tiles; start += kTogether) {
    const uint32_t group =
        static_cast<uint32_t>(tiles - start < kTogether ? tiles - start : kTogether);
    uint64_t owned = 0, totals;
    for (int column = 0; column < 3 && threadIdx.x < group; ++column)
      owned |= uint64_t{slot.entries[3 * (start + threadIdx.x) + column]} << (kSumBits * column);
    const uint64_t before = block_exclusive_sum(owned, scratch, &totals);
    if (threadIdx.x < kTogether) before_tile[threadIdx.x] = before;
    __syncthreads();
    const auto column_of = [](uint64_t sums, int column) {
      return sums >> (kSumBits * column) & ((1u << kSumBits) - 1);
    };
    for (uint32_t tile = threadIdx.x / kCopyThreads; tile < group;
         tile += kBlockThreads / kCopyThreads) {
      const uint16_t* const entry_of_tile = slot.entries + 3 * (start + tile);
      const uint64_t words_at = words_before + column_of(before_tile[tile], 0);
      const uint64_t gaps_at = gaps_before + column_of(before_tile[tile], 1);
      const uint64_t wide_at = wide_before + column_of(before_tile[tile], 2);
      const uint8_t* const record = slot.records + words_at + gaps_at;
      const auto copy = [&](uint8_t* to, const void* from, uint64_t bytes) {
        copy_bytes(to, static_cast<const uint8_t*>(from), bytes, threadIdx.x % kCopyThreads,
                   kCopyThreads);
      };
      copy(values + words_at, record, entry_of_tile[0]);
      copy(gaps + gaps_at, record + entry_of_tile[0], entry_of_tile[1]);
      copy(wide + wide_at * W, slot.wide_end - wide_at - entry_of_tile[2],
           uint64_t{entry_of_tile[2]} * W);
    }
    words_before += column_of(totals, 0);
    gaps_before += column_of(totals, 1);
    wide_before += column_of(totals, 2);
  }
}

// One tile, as it will lie in the payload: the planes of its words, or its words.
struct PlanesShared {
  uint4 bytes[kTileBytes / sizeof(uint4)];
  uint8_t* to[8];  // the place of each plane
};

// Puts the planes of a unit into their places in shared memory.
template <int W>
__device__ inline void put_planes(const typename Word<W>::type (&words)[kUnitWords<W>],
                                  uint32_t place, uint8_t* planes) {
  // Of one plane of a unit, so many bytes are stored at once.
  using Part = std::conditional_t<W == 8, uint16_t, uint32_t>;
#pragma unroll
  for (uint32_t k = 0; k < W; ++k) {
    Part* const to = reinterpret_cast<Part*>(planes + k * kTileWords<W> + place * kUnitWords<W>);
#pragma unroll
    for (uint32_t first = 0; first < kUnitWords<W>; first += sizeof(Part)) {
      uint32_t part = 0;
#pragma unroll
      for (uint32_t i = 0; i < sizeof(Part); ++i)
        part |= static_cast<uint32_t>(static_cast<uint8_t>(words[first + i] >> (8 * k))) << (8 * i);
      to[first / sizeof(Part)] = static_cast<Part>(part);
    }
  }
}

// Returns word i of a unit.
template <int W>
__device__ inline typename Word<W>::type word_of(const uint4& unit, uint32_t i) {
  const bool upper = i * W & 8, odd = i * W & 4;
  if (W == 8) {
    const uint64_t high = upper ? unit.w : unit.y;
    return static_cast<typename Word<W>::type>(high << 32 | (upper ? unit.z : unit.x));
  }
  const uint32_t quarter = upper ? (odd ? unit.w : unit.z) : (odd ? unit.y : unit.x);
  return static_cast<typename Word<W>::type>(quarter >> (i * W % 4 * 8));
}

// Writes the changed words of a unit to the base.
template <int W>
__device__ inline void store_unit(const Tile<W>& tile, uint32_t place, const uint4& current,
                                  uint32_t bits) {
  if (bits == 0) return;
  if (in_whole_units(tile)) {
    reinterpret_cast<uint4*>(tile.base)[place] = current;
    return;
  }
  for (; bits != 0; bits &= bits - 1) {
    const uint32_t i = static_cast<uint32_t>(__ffs(bits)) - 1;
    tile.base[place * kUnitWords<W> + i] = word_of<W>(current, i);
  }
}

// Writes a diff, planes or raw chunk from memory, and copies current to the base. Returns the
// number of changed words of this thread. With `overflow`, it only writes the base.
template <int W>
__device__ inline uint32_t store_words(const Job& job, const Chunk& chunk, uint32_t method,
                                       bool overflow, PlanesShared& shared) {
  using U = typename Word<W>::type;
  const int first_stream = method == kRaw ? kWords : method == kDiff ? kDiff0 : kPlane0;
  const uint32_t planes = method == kRaw ? 1 : W;
  const uint32_t plane_bytes = kTileBytes / planes;
  if (!overflow && threadIdx.x < planes)
    shared.to[threadIdx.x] = place_of(job, first_stream + static_cast<int>(threadIdx.x));
  uint8_t* const packed = reinterpret_cast<uint8_t*>(shared.bytes);
  const uint64_t tiles = tiles_of(chunk.words, W);
  uint32_t changed = 0;
  for (uint64_t index = 0; index < tiles; ++index) {
    const Tile<W> tile(chunk, index);
    Units units;
    load_units(tile, units);
    __syncthreads();  // all have copied the tile before
#pragma unroll
    for (uint32_t unit = 0; unit < kUnits; ++unit) {
      const uint32_t at = place_of_unit(unit);
      const uint32_t bits = differing_words<W>(units.current[unit], units.base[unit]);
      changed += static_cast<uint32_t>(__popc(bits));
      store_unit(tile, at, units.current[unit], bits);
      if (overflow) continue;
      if (method == kRaw) {
        shared.bytes[at] = units.current[unit];
        continue;
      }
      U now[kUnitWords<W>], then[kUnitWords<W>];
      memcpy(now, &units.current[unit], kUnitBytes);
      memcpy(then, &units.base[unit], kUnitBytes);
#pragma unroll
      for (uint32_t i = 0; i < kUnitWords<W>; ++i)
        now[i] = method == kDiff ? zigzag<W>(now[i], then[i]) : rotated_left<W>(now[i]);
      put_planes<W>(now, at, packed);
    }
    __syncthreads();
    if (overflow) continue;
    const uint32_t bytes = tile.words * W / planes;  // of each plane
#pragma unroll 1
    for (uint32_t k = 0; k < planes; ++k)
      copy_bytes(shared.to[k] + index * plane_bytes, packed + k * plane_bytes, bytes, threadIdx.x,
                 kBlockThreads);
  }
  return changed;
}

struct StoreShared {
  union {
    uint64_t before_tile[kBlockThreads];
    PlanesShared planes;
  };
  BlockScratch scratch;
};

// Writes what a predicted chunk has beside its exceptions: the law, and the gradients, or the
// differences of m, or under the steps law those of all words. Copies current to the base. Returns
// the number of changed words of this thread under the steps law, else 0.
__device__ inline uint32_t store_prediction(const Job& job, const Chunk& chunk, const Entry& entry,
                                            bool overflow, PlanesShared& shared) {
  const uint32_t count = chunk.words / kLawParts;
  Chunk dense = chunk;
  uint32_t changed = 0;
  if (chunk.method == kGradientLaw) {
    dense.current = piece(job, chunk, entry, 2);
    dense.base = nullptr;
    dense.words = count;
    if (!overflow) (void)store_words<2>(job, dense, kPlanes, false, shared);
  } else if (chunk.method == kMeanLaw) {
    dense.current += uint64_t{count} * kLawWordBytes;
    dense.base += uint64_t{count} * kLawWordBytes;
    dense.words = count;
    if (!overflow) (void)store_words<kLawWordBytes>(job, dense, kDiff, false, shared);
  } else {
    dense.base = piece(job, chunk, entry, 1);
    changed = store_words<kLawWordBytes>(job, dense, kDiff, overflow, shared);
  }
  if (!overflow) {
    copy_bytes(place_of(job, kLaw),
               reinterpret_cast<const uint8_t*>(&job.arguments.table[blockIdx.x].law), kLawBytes,
               threadIdx.x, kBlockThreads);
  }
  // After its last loads, `store_words` has a barrier: all have read the base.
  copy_bytes(chunk.base, chunk.current, uint64_t{chunk.words} * kLawWordBytes, threadIdx.x,
             kBlockThreads);
  return changed;
}

__global__ void __launch_bounds__(kBlockThreads, 4) store(Job job) {
  DELTACHECK_SHARED(StoreShared, shared);
  const Chunk chunk = job.arguments.table[blockIdx.x];
  const Entry entry = job.entries[blockIdx.x];
  const bool overflow = payload_needed(job.arguments) > job.arguments.payload_bytes;
  if (overflow && blockIdx.x == 0 && threadIdx.x == 0) job.arguments.head[kHeadOverflow] = 1;
  const uint32_t method = entry.row.method, plain = unordered(method);
  if (method == kUnchanged || method == kStepsLaw) return;
  if (plain == kSparse || plain == kBitmap || has_exceptions(method)) {
    if (overflow) return;
    with_word(chunk.word_bytes, [&](auto bytes) {
      store_slot<decltype(bytes)::value>(job, chunk, entry, shared.scratch, shared.before_tile);
    });
    return;
  }
  uint32_t changed = 0;
  with_word(chunk.word_bytes, [&](auto bytes) {
    changed = store_words<decltype(bytes)::value>(job, chunk, method, overflow, shared.planes);
  });
  changed = block_sum(changed, shared.scratch);
  // Without a base, and after `compact`, the count is already known and this kernel counted
  // nothing.
  if (threadIdx.x == 0) job.arguments.rows[entry.place].changed += changed;
}

__global__ void __launch_bounds__(kBlockThreads, 4) store_predicted(Job job) {
  DELTACHECK_SHARED(StoreShared, shared);
  const Chunk& chunk = job.arguments.table[blockIdx.x];
  const Entry& entry = job.entries[blockIdx.x];
  if (!is_law(entry.row.method)) return;
  const bool overflow = payload_needed(job.arguments) > job.arguments.payload_bytes;
  const uint32_t changed =
      block_sum(store_prediction(job, chunk, entry, overflow, shared.planes), shared.scratch);
  if (threadIdx.x == 0) job.arguments.rows[entry.place].changed += changed;
}

size_t bytes_before_slots(uint32_t chunks) {
  return rounded_up(uint64_t{chunks} * sizeof(Entry)) +
         rounded_up(uint64_t{chunks} * kStreams * sizeof(uint64_t));
}

}  // namespace

size_t scratch_bytes(uint32_t chunks, uint64_t bytes) {
  return bytes_before_slots(chunks) + bytes + kMorePieces * chunks * (kSlotAlignment - 1);
}

cudaError_t encode(const EncodeArguments& arguments, cudaStream_t stream) {
  const uint32_t chunks = arguments.chunks;
  uint8_t* const scratch = arguments.scratch;
  const Job job{arguments, reinterpret_cast<Entry*>(scratch),
                reinterpret_cast<uint64_t*>(scratch + rounded_up(uint64_t{chunks} * sizeof(Entry))),
                scratch + bytes_before_slots(chunks)};
  if (chunks > 0) {
    DELTACHECK_LAUNCH(lay_out, 1, kBlockThreads, stream, job);
    DELTACHECK_LAUNCH(prepare, chunks, kBlockThreads, stream, job);
    DELTACHECK_LAUNCH(compact, chunks, kBlockThreads, stream, job);
    DELTACHECK_LAUNCH(compact_prepared, chunks, kBlockThreads, stream, job);
  }
  DELTACHECK_LAUNCH(place, kStreams + 1, kBlockThreads, stream, job);
  if (chunks > 0) {
    DELTACHECK_LAUNCH(store, chunks, kBlockThreads, stream, job);
    DELTACHECK_LAUNCH(store_predicted, chunks, kBlockThreads, stream, job);
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess || arguments.digests == nullptr || chunks == 0) return error;
  return enqueue_digests(arguments.table, arguments.rows, arguments.head + kHeadRows, chunks,
                         arguments.digests, stream);
}

}  // namespace device
}  // namespace deltacheck
