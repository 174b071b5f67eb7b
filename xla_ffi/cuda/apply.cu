// Decodes rows (docs/reference/format.md, section 4) on the device: one thread block per row, one
// warp per tile if there are positions. Implements `apply` of device.h.
//
// Streams may have any address, so they are read byte by byte; neighbouring threads read
// neighbouring bytes, which the hardware combines into few transactions. Chunks are aligned to
// their words.

#include <cstdint>

#include "cuda/block.cuh"
#include "cuda/device.h"

namespace deltacheck {
namespace device {
namespace {

constexpr uint32_t kResident = 4;     // blocks per multiprocessor; leaves 64 registers per thread
constexpr uint32_t kBytesOfLane = 4;  // bytes of gaps or bitmap that a lane processes at once
constexpr uint32_t kBytesOfWarp = kBytesOfLane * kWarpThreads;
constexpr uint32_t kUnroll = 4;  // loads in flight per thread

struct Shared {
  BlockScratch scratch;
  uint32_t values[kBlockThreads], gaps[kBlockThreads],
      wide[kBlockThreads];  // offset of each tile's part
};

// One row's parts of the streams.
struct Parts {
  const uint8_t* const* streams;
  const uint64_t* offsets;

  __device__ inline const uint8_t* at(int stream) const {
    const uint8_t* whole = streams[stream];
    return whole != nullptr ? whole + offsets[stream] : nullptr;
  }
};

template <int W>
__device__ inline typename Word<W>::type little_endian(const uint8_t* from) {
  typename Word<W>::type word = 0;
  for (int byte = 0; byte < W; ++byte) {
    word = static_cast<typename Word<W>::type>(
        word | static_cast<typename Word<W>::type>(from[byte]) << (8 * byte));
  }
  return word;
}

__device__ inline uint32_t entry_of(const uint8_t* tiles, uint64_t tile, uint32_t column) {
  return little_endian<2>(tiles + kTileEntryBytes * tile + 2 * column);
}

template <int W>
__device__ inline void add_to(typename Word<W>::type* word, typename Word<W>::type z) {
  *word = static_cast<typename Word<W>::type>(*word + unzigzag<W>(z));
}

// Decodes one tile, by a warp. `values`, `wide`: the parts that the tile owns.
template <int W>
__device__ inline void apply_gaps(typename Word<W>::type* words, const uint8_t* gaps,
                                  uint32_t gap_bytes, const uint8_t* values, const uint8_t* wide) {
  using U = typename Word<W>::type;
  uint32_t words_before = 0, changed_before = 0, wide_before = 0;
  for (uint32_t start = 0; start < gap_bytes; start += kBytesOfWarp) {
    const uint32_t first = start + kBytesOfLane * lane_of_thread();
    // Both sums share one register and one scan: a tile has at most 16384 words, so neither
    // overflows 16 bits.
    uint32_t bytes[kBytesOfLane], sums = 0;  // unchanged words << 16 | changed ones
    for (uint32_t k = 0; k < kBytesOfLane; ++k) {
      const bool inside = first + k < gap_bytes;
      bytes[k] = inside ? gaps[first + k] : kEscape;
      sums += (inside ? bytes[k] << 16 : 0) + (bytes[k] != kEscape);
    }
    const uint32_t up_to = warp_inclusive_sum(sums),
                   all = __shfl_sync(kAllLanes, up_to, kWarpThreads - 1);
    const uint32_t below = up_to - sums;
    const uint32_t rank = changed_before + (below & 0xffff);
    uint32_t position = words_before + (below >> 16) + (below & 0xffff);
    uint32_t escapes = 0, changed = 0;
    uint32_t of_lane[kBytesOfLane];  // values
    for (uint32_t k = 0; k < kBytesOfLane; ++k) {
      of_lane[k] = bytes[k] != kEscape ? values[rank + changed++] : 0;
      escapes += W > 1 && of_lane[k] == kEscape;
    }
    uint32_t wide_rank = wide_before;
    if (W > 1 && __any_sync(kAllLanes, escapes != 0)) {
      const uint32_t escapes_up_to = warp_inclusive_sum(escapes);
      wide_rank += escapes_up_to - escapes;
      wide_before += __shfl_sync(kAllLanes, escapes_up_to, kWarpThreads - 1);
    }
    for (uint32_t k = 0; k < kBytesOfLane; ++k) {
      position += bytes[k];
      if (bytes[k] == kEscape) continue;
      U z = static_cast<U>(of_lane[k] + 1);
      if (W > 1 && of_lane[k] == kEscape) z = little_endian<W>(wide + W * wide_rank++);
      add_to<W>(words + position, z);
      ++position;
    }
    words_before += (all >> 16) + (all & 0xffff);
    changed_before += all & 0xffff;
  }
}

template <int W>
__device__ inline void apply_bitmap(typename Word<W>::type* words, const uint8_t* bits,
                                    uint32_t bytes_of_bits, const uint8_t* values,
                                    const uint8_t* wide) {
  using U = typename Word<W>::type;
  const uint32_t below = (1u << lane_of_thread()) - 1;
  uint32_t changed_before = 0, wide_before = 0;
  for (uint32_t start = 0; start < bytes_of_bits; start += kBytesOfWarp) {
    const uint32_t first = start + kBytesOfLane * lane_of_thread();
    uint32_t mask = 0;
    for (uint32_t k = 0; k < kBytesOfLane; ++k) {
      if (first + k < bytes_of_bits) mask |= static_cast<uint32_t>(bits[first + k]) << (8 * k);
    }
    const uint32_t count = __popc(mask), up_to = warp_inclusive_sum(count),
                   rank = changed_before + up_to - count;
    changed_before += __shfl_sync(kAllLanes, up_to, kWarpThreads - 1);
    // One turn per lane decodes the bits of that lane with all threads, so that the warp accesses
    // neighbouring words.
    for (uint32_t turn = 0; turn < kWarpThreads; ++turn) {
      const uint32_t bits_of_lane = __shfl_sync(kAllLanes, mask, turn);
      if (bits_of_lane == 0) continue;
      const uint32_t first_rank = __shfl_sync(kAllLanes, rank, turn);
      const bool mine = bits_of_lane >> lane_of_thread() & 1;
      const uint32_t value = mine ? values[first_rank + __popc(bits_of_lane & below)] : 0;
      const bool escaped = W > 1 && value == kEscape;
      U z = static_cast<U>(value + 1);
      if (W > 1) {
        const uint32_t escapes = __ballot_sync(kAllLanes, escaped);
        if (escaped) z = little_endian<W>(wide + W * (wide_before + __popc(escapes & below)));
        wide_before += __popc(escapes);
      }
      if (mine) add_to<W>(words + 8 * start + kWarpThreads * turn + lane_of_thread(), z);
    }
  }
}

// Decodes a sparse or bitmap chunk.
template <int W>
__device__ inline void apply_positions(const Row& row, const Parts& parts,
                                       typename Word<W>::type* base, uint64_t words,
                                       Shared& shared) {
  const uint8_t* tiles = parts.at(kTiles);
  const uint8_t* gaps = parts.at(kGaps);
  const uint8_t* bits = parts.at(kBits);
  const uint8_t* values = parts.at(kValues);
  const uint8_t* wide = parts.at(kWide);
  const uint64_t tile_count = tiles_of(words, W);
  for (uint64_t first = 0; first < tile_count; first += kBlockThreads) {
    const uint32_t batch = static_cast<uint32_t>(
        tile_count - first < kBlockThreads ? tile_count - first : kBlockThreads);
    const uint64_t tile = first + threadIdx.x;
    const bool inside = threadIdx.x < batch;
    const uint32_t changed = inside ? entry_of(tiles, tile, 0) : 0,
                   gap_bytes = inside ? entry_of(tiles, tile, 1) : 0,
                   wide_count = inside ? entry_of(tiles, tile, 2) : 0;
    uint32_t all_changed, all_gaps, all_wide;
    // Begins with a barrier, so all warps have finished the previous tiles.
    const uint32_t values_at = block_exclusive_sum(changed, shared.scratch, &all_changed);
    shared.values[threadIdx.x] = values_at;
    shared.gaps[threadIdx.x] = block_exclusive_sum(gap_bytes, shared.scratch, &all_gaps);
    shared.wide[threadIdx.x] = block_exclusive_sum(wide_count, shared.scratch, &all_wide);
    __syncthreads();
    for (uint32_t i = warp_of_thread(); i < batch; i += kBlockWarps) {
      typename Word<W>::type* const start = base + (first + i) * kTileWords<W>;
      const uint8_t* const mine = values + shared.values[i];
      const uint8_t* const mine_wide = wide + uint64_t{shared.wide[i]} * W;
      if (row.method == kSparse) {
        const uint32_t end = i + 1 < batch ? shared.gaps[i + 1] : all_gaps;
        apply_gaps<W>(start, gaps + shared.gaps[i], end - shared.gaps[i], mine, mine_wide);
      } else {
        const uint64_t rest = words - (first + i) * kTileWords<W>;
        const uint32_t size = static_cast<uint32_t>(rest < kTileWords<W> ? rest : kTileWords<W>);
        apply_bitmap<W>(start, bits + (first + i) * (kTileWords<W> / 8), (size + 7) / 8, mine,
                        mine_wide);
      }
    }
    values += all_changed;
    if (gaps != nullptr) gaps += all_gaps;
    if (wide != nullptr) wide += uint64_t{all_wide} * W;
  }
}

// Decodes a diff or planes chunk.
template <int W, bool kDifference>
__device__ inline void apply_planes(const Parts& parts, typename Word<W>::type* base,
                                    uint64_t words) {
  using U = typename Word<W>::type;
  const uint8_t* planes[W];
#pragma unroll
  for (int k = 0; k < W; ++k) planes[k] = parts.at((kDifference ? kDiff0 : kPlane0) + k);
  for (uint64_t first = threadIdx.x; first < words; first += kUnroll * kBlockThreads) {
    U word[kUnroll];
#pragma unroll
    for (uint32_t j = 0; j < kUnroll; ++j) {
      const uint64_t i = first + j * kBlockThreads;
      word[j] = 0;
      if (i >= words) continue;
#pragma unroll
      for (int k = 0; k < W; ++k)
        word[j] = static_cast<U>(word[j] | static_cast<U>(planes[k][i]) << (8 * k));
    }
#pragma unroll
    for (uint32_t j = 0; j < kUnroll; ++j) {
      const uint64_t i = first + j * kBlockThreads;
      if (i >= words) continue;
      base[i] =
          kDifference ? static_cast<U>(base[i] + unzigzag<W>(word[j])) : rotated_right<W>(word[j]);
    }
  }
}

// Copies bytes in aligned words of 4 bytes of `to`. If `from` has another alignment, each word is
// combined from two aligned words.
__device__ inline void copy(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  uint64_t head = (4 - reinterpret_cast<uintptr_t>(to) % 4) % 4;
  head = head < bytes ? head : bytes;
  const uint32_t misplaced = reinterpret_cast<uintptr_t>(from + head) % 4;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(from + head - misplaced);
  uint64_t count = (bytes - head) / 4;
  if (misplaced != 0 && count > 0) --count;  // never reads behind the stream's part
  uint32_t* const aligned = reinterpret_cast<uint32_t*>(to + head);
  for (uint64_t first = threadIdx.x; first < count; first += kUnroll * kBlockThreads) {
    uint32_t loaded[kUnroll];
#pragma unroll
    for (uint32_t j = 0; j < kUnroll; ++j) {
      const uint64_t i = first + j * kBlockThreads;
      if (i >= count) continue;
      loaded[j] =
          misplaced == 0 ? words[i] : __funnelshift_r(words[i], words[i + 1], 8 * misplaced);
    }
#pragma unroll
    for (uint32_t j = 0; j < kUnroll; ++j) {
      const uint64_t i = first + j * kBlockThreads;
      if (i < count) aligned[i] = loaded[j];
    }
  }
  for (uint64_t i = threadIdx.x; i < head; i += kBlockThreads) to[i] = from[i];
  for (uint64_t i = head + 4 * count + threadIdx.x; i < bytes; i += kBlockThreads) to[i] = from[i];
}

template <int W>
__device__ inline void apply_row(const Row& row, const Parts& parts, uint8_t* base, uint64_t words,
                                 Shared& shared) {
  typename Word<W>::type* const aligned = reinterpret_cast<typename Word<W>::type*>(base);
  if (row.method == kDiff)
    apply_planes<W, true>(parts, aligned, words);
  else if (row.method == kPlanes)
    apply_planes<W, false>(parts, aligned, words);
  else
    apply_positions<W>(row, parts, aligned, words, shared);
}

__global__ void __launch_bounds__(kBlockThreads, kResident) apply_rows(ApplyArguments arguments) {
  DELTACHECK_SHARED(Shared, shared);
  const Row row = arguments.rows[blockIdx.x];
  if (row.method == kUnchanged) return;
  const Chunk chunk = arguments.table[row.chunk];
  const Parts parts{arguments.streams, arguments.offsets + uint64_t{blockIdx.x} * kStreams};
  if (row.method == kRaw) {
    copy(chunk.base, parts.at(kWords), uint64_t{chunk.words} * chunk.word_bytes);
    return;
  }
  switch (chunk.word_bytes) {
    case 1:
      return apply_row<1>(row, parts, chunk.base, chunk.words, shared);
    case 2:
      return apply_row<2>(row, parts, chunk.base, chunk.words, shared);
    case 4:
      return apply_row<4>(row, parts, chunk.base, chunk.words, shared);
    default:
      return apply_row<8>(row, parts, chunk.base, chunk.words, shared);
  }
}

}  // namespace

cudaError_t apply(const ApplyArguments& arguments, cudaStream_t stream) {
  if (arguments.row_count == 0) return cudaSuccess;
  DELTACHECK_LAUNCH(apply_rows, arguments.row_count, kBlockThreads, stream, arguments);
  return cudaGetLastError();
}

}  // namespace device
}  // namespace deltacheck
