// The order of ordered chunks (docs/reference/format.md, 4.1): words of 2 bytes by the class of
// their base, as encoder/order.h has it on the host. One block orders a chunk by a counting sort of
// one digit, as in the radix sort of Merrill & Grimshaw, "High performance and scalable radix
// sorting" (2011): each warp counts the words of its part of the chunk, and then writes each to the
// next place of its class and warp.

#pragma once

#include <cstdint>

#include "cuda/block.cuh"
#include "cuda/device.h"

namespace deltacheck {
namespace device {

struct OrderShared {
  // Of each warp and class: the number of its words, and then the place of the next one.
  uint32_t places[kBlockWarps][kClasses];
  BlockScratch scratch;
};
static_assert(kClasses == kBlockThreads, "a thread for each class");

// The words that a warp loads before it uses the first, so that it waits for memory less often.
constexpr uint32_t kOrderLoads = 8;

// Calls use(lanes of the words, of each lane: its word, and what load(word) returned) for the words
// from `begin` to `end` in ascending order. Called by all lanes of a warp.
template <typename Load, typename Use>
__device__ inline void for_each_word(uint32_t begin, uint32_t end, Load load, Use use) {
  for (uint32_t start = begin; start < end; start += kOrderLoads * kWarpThreads) {
    uint32_t loaded[kOrderLoads];
#pragma unroll
    for (uint32_t k = 0; k < kOrderLoads; ++k) {
      const uint32_t word = start + k * kWarpThreads + lane_of_thread();
      loaded[k] = word < end ? load(word) : 0;
    }
#pragma unroll
    for (uint32_t k = 0; k < kOrderLoads; ++k) {
      const uint32_t word = start + k * kWarpThreads + lane_of_thread();
      const uint32_t lanes = __ballot_sync(kAllLanes, word < end);
      if (word < end) use(lanes, word, loaded[k]);
      __syncwarp();
    }
  }
}

// Returns the place of this lane's word among those of its class and warp, and counts the words of
// all `lanes`.
__device__ inline uint32_t next_place(uint32_t lanes, uint32_t of_class, uint32_t* places) {
  const uint32_t equal = __match_any_sync(lanes, of_class),
                 below = static_cast<uint32_t>(__popc(equal & ((1u << lane_of_thread()) - 1))),
                 first = places[of_class];
  __syncwarp(lanes);
  if (below == 0) places[of_class] = first + static_cast<uint32_t>(__popc(equal));
  __syncwarp(lanes);
  return first + below;
}

// Writes the differences of a chunk in the order of its words, and makes the base equal to it. A
// call, so that it takes no registers of its caller.
__device__ __noinline__ inline void take_differences(const uint16_t* current, uint16_t* base,
                                                     uint32_t count, uint16_t* differences,
                                                     OrderShared& shared) {
  uint32_t* const places = shared.places[warp_of_thread()];
  const uint32_t each =
      (count / kBlockThreads + 1) * kWarpThreads;  // words of a warp, at least an eighth
  const uint32_t begin = warp_of_thread() * each < count ? warp_of_thread() * each : count,
                 end = begin + each < count ? begin + each : count;
  for (uint32_t warp = 0; warp < kBlockWarps; ++warp) shared.places[warp][threadIdx.x] = 0;
  __syncthreads();
  for_each_word(
      begin, end, [&](uint32_t word) { return uint32_t{base[word]}; },
      [&](uint32_t lanes, uint32_t, uint32_t before) {
        (void)next_place(lanes, class_of_word(static_cast<uint16_t>(before)), places);
      });
  __syncthreads();
  uint32_t words = 0, all;
  for (uint32_t warp = 0; warp < kBlockWarps; ++warp) words += shared.places[warp][threadIdx.x];
  uint32_t place = block_exclusive_sum(words, shared.scratch, &all);
  for (uint32_t warp = 0; warp < kBlockWarps; ++warp) {
    const uint32_t of_warp = shared.places[warp][threadIdx.x];
    shared.places[warp][threadIdx.x] = place;
    place += of_warp;
  }
  __syncthreads();
  for_each_word(
      begin, end,
      [&](uint32_t word) { return uint32_t{base[word]} << 16 | uint32_t{current[word]}; },
      [&](uint32_t lanes, uint32_t word, uint32_t both) {
        const uint16_t before = static_cast<uint16_t>(both >> 16),
                       now = static_cast<uint16_t>(both);
        const uint32_t at = next_place(lanes, class_of_word(before), places);
        differences[at] = static_cast<uint16_t>(now - before);
        if (now != before) base[word] = now;
      });
}

}  // namespace device
}  // namespace deltacheck
