// Tests that the emulator executes correct kernels correctly and detects planted errors; also tests
// the block-wide functions.

#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/block.cuh"

using namespace deltacheck::device;

namespace {

struct Shared {
  BlockScratch scratch;
  uint32_t values[kBlockThreads];
};

void block_functions(const uint64_t* in, uint64_t* sums, uint64_t* scans) {
  DELTACHECK_SHARED(Shared, shared);
  const uint64_t value = in[blockIdx.x * kBlockThreads + threadIdx.x];
  uint64_t total;
  uint32_t low_total;
  scans[blockIdx.x * kBlockThreads + threadIdx.x] =
      block_exclusive_sum(value, shared.scratch, &total);
  const uint32_t low =
      block_exclusive_sum(static_cast<uint32_t>(value), shared.scratch, &low_total);
  CHECK(low == static_cast<uint32_t>(scans[blockIdx.x * kBlockThreads + threadIdx.x]));
  CHECK(low_total == static_cast<uint32_t>(total));
  CHECK(block_sum(value, shared.scratch) == total);
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

void test_block_functions() {
  constexpr uint32_t kBlocks = 60;
  std::vector<uint64_t> in(kBlocks * kBlockThreads), scans(in.size()), sums(kBlocks);
  uint64_t x = 1;
  for (uint64_t& value : in) value = x = x * 6364136223846793005u + 1442695040888963407u;
  const uint64_t* from = in.data();
  uint64_t *to = scans.data(), *totals = sums.data();
  DELTACHECK_LAUNCH(block_functions, kBlocks, kBlockThreads, nullptr, from, totals, to);
  for (uint32_t block = 0; block < kBlocks; ++block) {
    uint64_t sum = 0;
    for (uint32_t thread = 0; thread < kBlockThreads; ++thread) {
      const uint64_t value = in[block * kBlockThreads + thread];
      CHECK(scans[block * kBlockThreads + thread] == sum);
      sum += value;
    }
    CHECK(sums[block] == sum);
  }
}

// Two groups of lanes of a warp, each with its own shuffles and votes.
void half_warps(uint32_t* out) {
  const uint32_t lane = threadIdx.x % 32, mask = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  uint32_t value = threadIdx.x;
  for (uint32_t with = 1; with < 16; with *= 2) value += __shfl_xor_sync(mask, value, with);
  __syncwarp(mask);
  const uint32_t odd = __ballot_sync(mask, lane % 2);
  CHECK(odd == (mask & 0xaaaaaaaau));
  CHECK(__match_any_sync(kAllLanes, lane % 3) == 0x49249249u << lane % 3);
  CHECK(__match_any_sync(mask, lane / 16 + lane % 2) == (lane % 2 ? odd : mask & ~odd));
  CHECK(__shfl_up_sync(kAllLanes, lane, 1) == (lane == 0 ? 0 : lane - 1));
  CHECK(__shfl_down_sync(kAllLanes, lane, 2) == (lane >= 30 ? lane : lane + 2));
  CHECK(__any_sync(kAllLanes, lane == 7) && !__all_sync(kAllLanes, lane == 7));
  CHECK(__syncthreads_count(lane < 3) == static_cast<int>(blockDim.x / 32 * 3));
  CHECK(__syncthreads_or(threadIdx.x == 5) == 1 && __syncthreads_and(threadIdx.x != 5) == 0);
  out[threadIdx.x] = value;
}

void test_half_warps() {
  std::vector<uint32_t> out(64);
  uint32_t* to = out.data();
  DELTACHECK_LAUNCH(half_warps, 1, 64, nullptr, to);
  for (uint32_t thread = 0; thread < 64; ++thread)
    CHECK(out[thread] == 16 * (thread / 16 * 16) + 120);
}

void histogram(uint32_t* counts) {
  for (uint32_t i = 0; i < 100; ++i) atomicAdd(&counts[i % 7], 1u);
  atomicMax(&counts[7], blockIdx.x * 1000 + threadIdx.x);
}

void test_atomics() {
  std::vector<uint32_t> counts(8);
  uint32_t* to = counts.data();
  DELTACHECK_LAUNCH(histogram, 70, 64, nullptr, to);
  CHECK(counts[0] == 70 * 64 * 15 && counts[6] == 70 * 64 * 14 && counts[7] == 69063);
}

// --- planted errors ------------------------------------------------------------------------------

void some_threads_skip_the_barrier() {
  if (threadIdx.x < 100) __syncthreads();
}

void barriers_of_two_lines() {
  if (threadIdx.x < 128)
    __syncthreads();
  else
    __syncthreads();
}

void lanes_at_different_functions() {
  if (threadIdx.x % 2)
    (void)__ballot_sync(kAllLanes, 1);
  else
    (void)__shfl_sync(kAllLanes, 1u, 0);
}

void a_lane_is_missing() {
  if (threadIdx.x != 9) __syncwarp();
}

void a_lane_waits_at_the_barrier() {
  if (threadIdx.x != 9) __syncwarp();
  __syncthreads();
}

void shuffle_from_outside_the_mask() {
  if (threadIdx.x < 16) (void)__shfl_sync(0xffffu, threadIdx.x, 20);
}

void mask_leaves_the_caller_out() { (void)__ballot_sync(0xffff0000u, 1); }

// A ring: each block waits for the next one, and the last one for the first. However few they are,
// some are not resident.
void blocks_wait_for_one_another(uint32_t* flags) {
  if (threadIdx.x == 0) {
    while (atomicAdd(&flags[(blockIdx.x + 1) % gridDim.x], 0u) == 0) continue;
    atomicAdd(&flags[blockIdx.x], 1u);
  }
}

struct Large {
  uint8_t bytes[50 << 10];
};
void too_much_shared_memory() {
  DELTACHECK_SHARED(Large, large);
  large.bytes[threadIdx.x] = 0;
}

std::string error_of(const std::function<void()>& launch) {
  try {
    launch();
  } catch (const emulator::Error& error) {
    return error.what();
  }
  return "";
}

#define CHECK_FOUND(kernel, blocks, threads, why, ...)                                         \
  {                                                                                            \
    const std::string error =                                                                  \
        error_of([&] { DELTACHECK_LAUNCH(kernel, blocks, threads, nullptr, ##__VA_ARGS__); }); \
    if (error.find("kernel " #kernel) != 0 || error.find(why) == std::string::npos)            \
      check::fail(__FILE__, __LINE__, #kernel,                                                 \
                  "gave the error '" + error + "', expected '" why "'");                       \
  }

void test_misuse_is_found() {
  std::vector<uint32_t> memory(100);
  uint32_t* flags = memory.data();
  CHECK_FOUND(some_threads_skip_the_barrier, 3, 256, "exited");
  CHECK_FOUND(barriers_of_two_lines, 3, 256, "other threads of its block at that of line");
  CHECK_FOUND(lanes_at_different_functions, 3, 64, "of its warp at");
  CHECK_FOUND(a_lane_is_missing, 3, 64, "lane 9");
  CHECK_FOUND(a_lane_waits_at_the_barrier, 3, 64, "dead-lock");
  CHECK_FOUND(shuffle_from_outside_the_mask, 1, 64,
              "shuffles from lane 20, which its mask leaves out");
  CHECK_FOUND(mask_leaves_the_caller_out, 1, 64, "mask that leaves it out");
  CHECK_FOUND(too_much_shared_memory, 1, 64, "51200 bytes of shared memory");
  emulator::settings().patience = 10000;
  CHECK_FOUND(blocks_wait_for_one_another, 100, 32, "spins", flags);
  emulator::settings().patience = emulator::Settings().patience;
  DELTACHECK_LAUNCH(a_lane_is_missing, 0, 64, nullptr);
  CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration && cudaGetLastError() == cudaSuccess);
}

// Wrong because of a missing barrier; correct if threads ran in their order.
void reads_a_neighbour_too_early(uint32_t* out) {
  DELTACHECK_SHARED(Shared, shared);
  shared.values[threadIdx.x] = threadIdx.x;
  out[blockIdx.x * blockDim.x + threadIdx.x] =
      threadIdx.x == 0 ? 0 : shared.values[threadIdx.x - 1];
}

void forgets_that_memory_is_garbage(uint32_t* out) {
  DELTACHECK_SHARED(Shared, shared);
  shared.values[threadIdx.x] += threadIdx.x;
  out[blockIdx.x * blockDim.x + threadIdx.x] = shared.values[threadIdx.x];
}

// Correct only if blocks ran in their order.
void takes_the_block_before_for_done(uint32_t* out) {
  out[blockIdx.x] = blockIdx.x == 0 ? 1 : out[blockIdx.x - 1] + 1;
}

template <typename Kernel>
bool right(Kernel kernel, uint32_t blocks, uint32_t threads,
           const std::function<uint32_t(uint32_t)>& expected) {
  std::vector<uint32_t> out(blocks * threads);
  uint32_t* to = out.data();
  DELTACHECK_LAUNCH(kernel, blocks, threads, nullptr, to);
  for (uint32_t i = 0; i < out.size(); ++i) {
    if (out[i] != expected(i)) return false;
  }
  return true;
}

void test_races_give_wrong_results() {
  CHECK(!right(reads_a_neighbour_too_early, 4, 256,
               [](uint32_t i) { return i % 256 == 0 ? 0 : i % 256 - 1; }));
  CHECK(!right(forgets_that_memory_is_garbage, 1, 32, [](uint32_t i) { return i; }));
  CHECK(!right(takes_the_block_before_for_done, 100, 1, [](uint32_t i) { return i + 1; }));
}

}  // namespace

int main() {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    emulator::settings().seed = seed;
    test_block_functions();
    test_half_warps();
    test_atomics();
    test_misuse_is_found();
    test_races_give_wrong_results();
  }
  return check::result();
}
