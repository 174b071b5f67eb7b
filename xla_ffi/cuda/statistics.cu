// The statistics of changes (encoder/elements.h): one thread block per chunk, one warp per tile,
// one thread per lane of the definition. Implements `statistics` of device.h. The bits equal those
// of the host.

#include <cmath>
#include <cstdint>

#include "cuda/block.cuh"
#include "cuda/device.h"
#include "encoder/elements.h"

namespace deltacheck {
namespace device {
namespace {

// A lane of the sums is a lane of the warp. So the order of the additions is that of the
// definition.
static_assert(kLanes == kWarpThreads);
constexpr uint32_t kResident = 4;  // blocks per multiprocessor; leaves 64 registers per thread

enum Sum { kOfDifferences, kOfBases, kSums };

struct Shared {
  BlockScratch scratch;
  double tiles[kSums][kSpanTiles];
};

// The counts and the maximum of one thread.
struct Counts {
  uint64_t changed = 0, nonfinite = 0;
  double largest = 0;
};

template <Elements kElements>
__device__ inline void add_tile(const void* current, const void* base, uint64_t start,
                                uint32_t words, Counts* counts_of_thread, double* sums) {
  using U = typename Word<Element<kElements>::kWordBytes>::type;
  const U* const c = static_cast<const U*>(current) + start;
  const U* const b = static_cast<const U*>(base) + start;
  sums[kOfDifferences] = sums[kOfBases] = 0;
#pragma unroll 4
  for (uint32_t i = lane_of_thread(); i < words; i += kLanes) {
    const U now = c[i], before = b[i];
    counts_of_thread->changed += now != before;
    if constexpr (Element<kElements>::kNumbers) {
      const bool finite = is_finite<kElements>(now);
      counts_of_thread->nonfinite += !finite;
      // The definition omits pairs of which either value is not finite.
      if (!finite || !is_finite<kElements>(before)) continue;
      const Number<kElements> value = value_of<kElements>(before),
                              d = value_of<kElements>(now) - value;
      sums[kOfDifferences] += square(d);
      sums[kOfBases] += square(value);
      const double size = fabs(static_cast<double>(d));
      counts_of_thread->largest =
          size > counts_of_thread->largest ? size : counts_of_thread->largest;
    }
  }
}

// Returns the sum over the lanes, added in halves; valid in lane 0.
__device__ inline double added_in_halves(double sum) {
  for (uint32_t half = kLanes / 2; half > 0; half /= 2)
    sum += __shfl_down_sync(kAllLanes, sum, half);
  return sum;
}

template <Elements kElements>
__device__ inline void measure(const Chunk& chunk, Statistics* statistics, Shared& shared) {
  constexpr uint32_t kTile = kTileWords<Element<kElements>::kWordBytes>;
  Counts counts_of_thread;
  double total = 0;  // used by the first kSums threads only
  const uint64_t tile_count = tiles_of(chunk.words, Element<kElements>::kWordBytes);
  for (uint64_t span = 0; span < tile_count; span += kSpanTiles) {
    const uint32_t tiles =
        static_cast<uint32_t>(tile_count - span < kSpanTiles ? tile_count - span : kSpanTiles);
    for (uint32_t tile = warp_of_thread(); tile < tiles; tile += kBlockWarps) {
      const uint64_t start = (span + tile) * kTile;
      const uint32_t words =
          static_cast<uint32_t>(chunk.words - start < kTile ? chunk.words - start : kTile);
      double sums[kSums];
      add_tile<kElements>(chunk.current, chunk.base, start, words, &counts_of_thread, sums);
      if constexpr (Element<kElements>::kNumbers) {
        for (int sum_index = 0; sum_index < kSums; ++sum_index) {
          const double sum = added_in_halves(sums[sum_index]);
          if (lane_of_thread() == 0) shared.tiles[sum_index][tile] = sum;
        }
      }
    }
    if constexpr (Element<kElements>::kNumbers) {
      __syncthreads();
      // One thread per sum adds the tiles one after the other, because the definition fixes this
      // order.
      if (threadIdx.x < kSums) {
        double sum = 0;
        for (uint32_t tile = 0; tile < tiles; ++tile) sum += shared.tiles[threadIdx.x][tile];
        total += sum;
      }
      __syncthreads();
    }
  }
  const uint64_t changed = block_sum(counts_of_thread.changed, shared.scratch);
  const uint64_t nonfinite = block_sum(counts_of_thread.nonfinite, shared.scratch);
  uint64_t bits;  // bit patterns of magnitudes have the order of their values
  memcpy(&bits, &counts_of_thread.largest, sizeof bits);
  bits = block_max(bits, shared.scratch);
  if (threadIdx.x == kOfDifferences) {
    statistics->changed = changed;
    statistics->nonfinite = nonfinite;
    statistics->squared_difference = total;
    memcpy(&statistics->largest_difference, &bits, sizeof bits);
  }
  if (threadIdx.x == kOfBases) statistics->squared_base = total;
}

__global__ void __launch_bounds__(kBlockThreads, kResident)
    measure_chunks(const Chunk* table, const Elements* elements, Statistics* statistics) {
  DELTACHECK_SHARED(Shared, shared);
  const Chunk chunk = table[blockIdx.x];
  Statistics* const out = statistics + blockIdx.x;
  switch (elements[blockIdx.x]) {
    case Elements::kBits8:
      return measure<Elements::kBits8>(chunk, out, shared);
    case Elements::kBits16:
      return measure<Elements::kBits16>(chunk, out, shared);
    case Elements::kBits32:
      return measure<Elements::kBits32>(chunk, out, shared);
    case Elements::kBits64:
      return measure<Elements::kBits64>(chunk, out, shared);
    case Elements::kFloat16:
      return measure<Elements::kFloat16>(chunk, out, shared);
    case Elements::kBfloat16:
      return measure<Elements::kBfloat16>(chunk, out, shared);
    case Elements::kFloat32:
      return measure<Elements::kFloat32>(chunk, out, shared);
    default:
      return measure<Elements::kFloat64>(chunk, out, shared);
  }
}

__global__ void separate_chunks(const Statistics* statistics, uint32_t chunks, uint32_t* counts,
                                void* values, bool wide) {
  const uint32_t chunk = blockIdx.x * blockDim.x + threadIdx.x;
  if (chunk >= chunks) return;
  const Statistics& measured = statistics[chunk];
  counts[2 * chunk] = static_cast<uint32_t>(measured.changed);
  counts[2 * chunk + 1] = static_cast<uint32_t>(measured.nonfinite);
  const double numbers[3] = {measured.squared_difference, measured.squared_base,
                             measured.largest_difference};
  for (uint32_t i = 0; i < 3; ++i) {
    if (wide)
      static_cast<double*>(values)[3 * chunk + i] = numbers[i];
    else
      static_cast<float*>(values)[3 * chunk + i] = static_cast<float>(numbers[i]);
  }
}

}  // namespace

cudaError_t separate(const Statistics* statistics, uint32_t chunks, uint32_t* counts, void* values,
                     bool wide, cudaStream_t stream) {
  if (chunks == 0) return cudaSuccess;
  const uint32_t blocks = (chunks + kBlockThreads - 1) / kBlockThreads;
  DELTACHECK_LAUNCH(separate_chunks, blocks, kBlockThreads, stream, statistics, chunks, counts,
                    values, wide);
  return cudaGetLastError();
}

cudaError_t statistics(const Chunk* table, const Elements* elements, uint32_t chunks,
                       Statistics* results, cudaStream_t stream) {
  if (chunks == 0) return cudaSuccess;
  DELTACHECK_LAUNCH(measure_chunks, chunks, kBlockThreads, stream, table, elements, results);
  return cudaGetLastError();
}

}  // namespace device
}  // namespace deltacheck
