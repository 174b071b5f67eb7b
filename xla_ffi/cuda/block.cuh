// What the threads of a block work out together. Every thread of the block must call; all of them
// get the result.
//
// A call begins with a barrier, so `scratch` may be shared by any number of calls, and what the
// caller wrote to shared memory before one is seen by all after it.

#pragma once

#include <cstdint>

#include "cuda/runtime.h"

namespace deltacheck {
namespace device {

constexpr uint32_t kWarpThreads = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr uint32_t kBlockThreads = 256;  // of every kernel
constexpr uint32_t kBlockWarps = kBlockThreads / kWarpThreads;

struct BlockScratch {
  uint64_t warps[kBlockWarps];
};

__device__ inline uint32_t lane_of_thread() { return threadIdx.x % kWarpThreads; }
__device__ inline uint32_t warp_of_thread() { return threadIdx.x / kWarpThreads; }

// The sum up to this lane, its own value included.
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
    const T other = __shfl_xor_sync(kAllLanes, value, with);
    value = other > value ? other : value;
  }
  return value;
}

// The sum of the values of all threads below this one. T: uint32_t or uint64_t.
template <typename T>
__device__ inline T block_exclusive_sum(T value, BlockScratch& scratch, T* total) {
  const T inclusive = warp_inclusive_sum(value);
  __syncthreads();
  if (lane_of_thread() == kWarpThreads - 1) scratch.warps[warp_of_thread()] = inclusive;
  __syncthreads();
  T below = 0, all = 0;
  for (uint32_t warp = 0; warp < kBlockWarps; ++warp) {
    if (warp == warp_of_thread()) below = all;
    all += static_cast<T>(scratch.warps[warp]);
  }
  *total = all;
  return below + inclusive - value;
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

template <typename T>
__device__ inline T block_max(T value, BlockScratch& scratch) {
  value = warp_max(value);
  __syncthreads();
  if (lane_of_thread() == 0) scratch.warps[warp_of_thread()] = value;
  __syncthreads();
  T most = 0;
  for (uint32_t warp = 0; warp < kBlockWarps; ++warp) {
    const T other = static_cast<T>(scratch.warps[warp]);
    most = other > most ? other : most;
  }
  return most;
}

}  // namespace device
}  // namespace deltacheck
