// Sums and maxima over the threads of a block, used by all kernels. Every thread of the block must
// call them, and all threads get the result. The warp scans follow Hillis & Steele, "Data parallel
// algorithms" (1986).
//
// Each function begins with a barrier. So any number of calls may share `scratch`, and everything
// that a thread wrote to shared memory before a call is visible to all threads after it.

#pragma once

#include <cstdint>

#include "cuda/runtime.h"

namespace deltacheck {
namespace device {

constexpr uint32_t kWarpThreads = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr uint32_t kBlockThreads = 256;  // threads per block, in every kernel
constexpr uint32_t kBlockWarps = kBlockThreads / kWarpThreads;

struct BlockScratch {
  uint64_t warps[kBlockWarps];
};

__device__ inline uint32_t lane_of_thread() { return threadIdx.x % kWarpThreads; }
__device__ inline uint32_t warp_of_thread() { return threadIdx.x / kWarpThreads; }

// Returns the sum of the values up to this lane, inclusive.
template <typename T>
__device__ inline T warp_inclusive_sum(T value) {
  for (uint32_t by = 1; by < kWarpThreads; by *= 2) {
    const T below = __shfl_up_sync(kAllLanes, value, by);
    if (lane_of_thread() >= by) value += below;
  }
  return value;
}

template <typename T>
__device__ inline T warp_sum(T value) {
  for (uint32_t with = kWarpThreads / 2; with > 0; with /= 2)
    value += __shfl_xor_sync(kAllLanes, value, with);
  return value;
}

template <typename T>
__device__ inline T warp_max(T value) {
  for (uint32_t with = kWarpThreads / 2; with > 0; with /= 2) {
    const T candidate = __shfl_xor_sync(kAllLanes, value, with);
    value = candidate > value ? candidate : value;
  }
  return value;
}

// Returns the sum of the values of all warps below this one. The value of a warp is that of its
// last lane. T: uint32_t or uint64_t.
template <typename T>
__device__ inline T sum_below_warp(T value, BlockScratch& scratch, T* total) {
  __syncthreads();
  if (lane_of_thread() == kWarpThreads - 1) scratch.warps[warp_of_thread()] = value;
  __syncthreads();
  T below = 0, all = 0;
  for (uint32_t warp = 0; warp < kBlockWarps; ++warp) {
    if (warp == warp_of_thread()) below = all;
    all += static_cast<T>(scratch.warps[warp]);
  }
  *total = all;
  return below;
}

// Returns the sum of the values of all threads below this one. T: uint32_t or uint64_t.
template <typename T>
__device__ inline T block_exclusive_sum(T value, BlockScratch& scratch, T* total) {
  const T inclusive = warp_inclusive_sum(value);
  return sum_below_warp(inclusive, scratch, total) + inclusive - value;
}

template <typename T>
__device__ inline T block_sum(T value, BlockScratch& scratch) {
  value = warp_sum(value);
  __syncthreads();
  if (lane_of_thread() == 0) scratch.warps[warp_of_thread()] = value;
  __syncthreads();
  T all = 0;
  for (uint32_t warp = 0; warp < kBlockWarps; ++warp) all += static_cast<T>(scratch.warps[warp]);
  return all;
}

}  // namespace device
}  // namespace deltacheck
