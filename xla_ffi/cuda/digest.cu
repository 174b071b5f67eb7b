// XXH3 with 128 bits, seed 0 and the default secret (Y. Collet, xxHash 0.8, doc/xxhash_spec.md):
// one thread block per chunk. Implements the digests of device.h.
//
// A block of 1 KiB, here called a page, has 16 stripes of 8 words. Their contributions to the 8
// accumulators may be summed in any order; only then are the accumulators scrambled. So the warps
// sum different pages, and one warp scrambles: it adds the sums of all pages in their order. Lane i
// of a warp takes word i % 8 of the stripes i / 8, i / 8 + 4, .., so that a page is 4 consecutive
// loads of every lane. All loads are aligned. If the chunk is not, each word is combined from two
// aligned ones. Bytes of an aligned word of 8 that lie before the chunk may be read, but none
// behind it.

#include <cstdint>

#include "cuda/block.cuh"
#include "cuda/device.h"

namespace deltacheck {
namespace device {
namespace {

constexpr uint32_t kStripeBytes = 64, kPageBytes = 1024, kRows = 4, kAccumulators = 8;
// So many pages are summed before they are scrambled.
constexpr uint32_t kPagesAtOnce = 2 * kBlockWarps;
constexpr uint32_t kSecretBytes = 192;

constexpr uint32_t kShort1 = 0x9e3779b1, kShort2 = 0x85ebca77, kShort3 = 0xc2b2ae3d;
constexpr uint64_t kPrime1 = 0x9e3779b185ebca87, kPrime2 = 0xc2b2ae3d27d4eb4f,
                   kPrime3 = 0x165667b19e3779f9, kPrime4 = 0x85ebca77c2b2ae63,
                   kPrime5 = 0x27d4eb2f165667c5, kMix1 = 0x165667919e3779f9,
                   kMix2 = 0x9fb21c651e98df25;

__device__ const uint64_t kSecret[kSecretBytes / 8] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};

struct Hash {
  uint64_t low, high;
};

// Returns eight bytes of the secret from any byte on.
__device__ inline uint64_t secret(uint32_t byte) {
  const uint32_t shift = byte % 8 * 8;
  const uint64_t low = kSecret[byte / 8];
  return shift == 0 ? low : low >> shift | kSecret[byte / 8 + 1] << (64 - shift);
}

// Returns eight or four bytes at any address.
__device__ inline uint64_t read64(const uint8_t* from) {
  if (reinterpret_cast<uintptr_t>(from) % 8 == 0) return *reinterpret_cast<const uint64_t*>(from);
  uint64_t word = 0;
  for (uint32_t byte = 0; byte < 8; ++byte) word |= static_cast<uint64_t>(from[byte]) << (8 * byte);
  return word;
}

__device__ inline uint32_t read32(const uint8_t* from) {
  uint32_t word = 0;
  for (uint32_t byte = 0; byte < 4; ++byte) word |= static_cast<uint32_t>(from[byte]) << (8 * byte);
  return word;
}

__device__ inline uint32_t swapped(uint32_t x) {
  return x << 24 | (x & 0xff00u) << 8 | (x >> 8 & 0xff00u) | x >> 24;
}

__device__ inline uint64_t swapped(uint64_t x) {
  return static_cast<uint64_t>(swapped(static_cast<uint32_t>(x))) << 32 |
         swapped(static_cast<uint32_t>(x >> 32));
}

__device__ inline Hash multiplied(uint64_t a, uint64_t b) { return {a * b, __umul64hi(a, b)}; }

__device__ inline uint64_t folded(uint64_t a, uint64_t b) { return (a * b) ^ __umul64hi(a, b); }

__device__ inline uint64_t avalanche(uint64_t hash) {
  hash = (hash ^ hash >> 37) * kMix1;
  return hash ^ hash >> 32;
}

__device__ inline uint64_t avalanche_of_xxh64(uint64_t hash) {
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

// --- up to 240 bytes: by one thread --------------------------------------------------------------

__device__ inline Hash hash_to_16(const uint8_t* input, uint32_t length) {
  if (length == 0) {
    return {avalanche_of_xxh64(secret(64) ^ secret(72)),
            avalanche_of_xxh64(secret(80) ^ secret(88))};
  }
  if (length < 4) {
    const uint32_t low = static_cast<uint32_t>(input[0]) << 16 |
                         static_cast<uint32_t>(input[length / 2]) << 24 | input[length - 1] |
                         length << 8;
    const uint32_t turned = swapped(low), high = turned << 13 | turned >> 19;
    const uint64_t keys = kSecret[0], more_keys = kSecret[1];
    return {avalanche_of_xxh64(low ^ static_cast<uint32_t>(keys) ^ keys >> 32),
            avalanche_of_xxh64(high ^ static_cast<uint32_t>(more_keys) ^ more_keys >> 32)};
  }
  if (length <= 8) {
    const uint64_t word = read32(input) + (static_cast<uint64_t>(read32(input + length - 4)) << 32);
    Hash hash =
        multiplied(word ^ secret(16) ^ secret(24), kPrime1 + (static_cast<uint64_t>(length) << 2));
    hash.high += hash.low << 1;
    hash.low ^= hash.high >> 3;
    hash.low = (hash.low ^ hash.low >> 35) * kMix2;
    hash.low ^= hash.low >> 28;
    hash.high = avalanche(hash.high);
    return hash;
  }
  const uint64_t low = read64(input);
  uint64_t high = read64(input + length - 8);
  Hash middle = multiplied(low ^ high ^ secret(32) ^ secret(40), kPrime1);
  middle.low += static_cast<uint64_t>(length - 1) << 54;
  high ^= secret(48) ^ secret(56);
  middle.high += high + static_cast<uint64_t>(static_cast<uint32_t>(high)) * (kShort2 - 1);
  middle.low ^= swapped(middle.high);
  Hash hash = multiplied(middle.low, kPrime2);
  hash.high += middle.high * kPrime2;
  return {avalanche(hash.low), avalanche(hash.high)};
}

__device__ inline uint64_t mixed(const uint8_t* input, uint32_t key) {
  return folded(read64(input) ^ secret(key), read64(input + 8) ^ secret(key + 8));
}

__device__ inline void mix(const uint8_t* first, const uint8_t* second, uint32_t key, Hash* hash) {
  hash->low = (hash->low + mixed(first, key)) ^ (read64(second) + read64(second + 8));
  hash->high = (hash->high + mixed(second, key + 16)) ^ (read64(first) + read64(first + 8));
}

__device__ inline Hash hash_to_240(const uint8_t* input, uint32_t length) {
  constexpr uint32_t kLeastSecretBytes = 136;
  Hash hash = {length * kPrime1, 0};
  if (length <= 128) {
    for (uint32_t i = (length - 1) / 32 + 1; i-- > 0;) {
      mix(input + 16 * i, input + length - 16 * (i + 1), 32 * i, &hash);
    }
  } else {
    for (uint32_t at = 0; at < 128; at += 32) mix(input + at, input + at + 16, at, &hash);
    hash = {avalanche(hash.low), avalanche(hash.high)};
    for (uint32_t at = 128; at + 32 <= length; at += 32)
      mix(input + at, input + at + 16, at - 128 + 3, &hash);
    mix(input + length - 16, input + length - 32, kLeastSecretBytes - 17 - 16, &hash);
  }
  return {avalanche(hash.low + hash.high),
          0 - avalanche(hash.low * kPrime1 + hash.high * kPrime4 + length * kPrime2)};
}

// --- more: by a block ----------------------------------------------------------------------------

// The words of a page that a lane holds: kRows rows of 32 words. If the chunk is not aligned,
// these are the aligned words that contain them, and the first lane also holds the word behind
// them.
template <bool kAligned>
struct Loaded {
  uint64_t rows[kRows], next;

  __device__ inline void load(const uint8_t* aligned) {
    const uint64_t* words = reinterpret_cast<const uint64_t*>(aligned) + lane_of_thread();
    for (uint32_t row = 0; row < kRows; ++row) rows[row] = words[kWarpThreads * row];
    if (!kAligned && lane_of_thread() == 0) next = words[kWarpThreads * kRows];
  }

  __device__ inline uint64_t word(uint32_t row, uint32_t shift) const {
    if (kAligned) return rows[row];
    // The last lane takes the first word of the next row.
    const uint64_t first = row + 1 < kRows ? rows[row + 1] : next;
    const uint64_t after = __shfl_sync(kAllLanes, lane_of_thread() == 0 ? first : rows[row],
                                       (lane_of_thread() + 1) % kWarpThreads);
    return rows[row] >> shift | after << (64 - shift);
  }
};

// The sums of one lane before they enter the accumulators: `own` for the accumulator of its words,
// `neighbour` for the adjacent one. XXH3 adds each input word to the neighbouring accumulator.
struct Sums {
  uint64_t own = 0, neighbour = 0;

  __device__ inline void add(uint64_t word, uint64_t key) {
    const uint64_t keyed = word ^ key;
    own += (keyed & 0xffffffffu) * (keyed >> 32);
    neighbour += word;
  }

  // Returns the sum over all lanes of the same accumulator.
  __device__ inline uint64_t combined() const {
    uint64_t sum = own + __shfl_xor_sync(kAllLanes, neighbour, 1u);
    sum += __shfl_xor_sync(kAllLanes, sum, 8u);
    return sum + __shfl_xor_sync(kAllLanes, sum, 16u);
  }
};

__device__ inline uint64_t scrambled(uint64_t accumulator, uint64_t key) {
  return (accumulator ^ accumulator >> 47 ^ key) * kShort1;
}

// The sums of pages, for each accumulator. Two batches: one is scrambled while the next is summed.
struct PageSums {
  uint64_t sums[2][kPagesAtOnce][kAccumulators];
};

// Returns the accumulators after `pages` whole pages, to the lanes of the first warp; lane i has
// accumulator i % 8. REQUIRES, if not aligned: the last aligned word that holds a byte of them ends
// inside the chunk.
template <bool kAligned>
__device__ inline uint64_t hash_pages(const uint8_t* input, uint64_t pages, const uint64_t* keys,
                                      uint64_t scramble, uint64_t accumulator, PageSums& shared) {
  constexpr uint32_t kEach = kPagesAtOnce / kBlockWarps;
  const uint32_t shift = kAligned ? 0 : reinterpret_cast<uintptr_t>(input) % 8 * 8;
  const uint8_t* const aligned = input - shift / 8;
  const uint32_t lane = lane_of_thread(), warp = warp_of_thread();
  const uint64_t batches = (pages + kPagesAtOnce - 1) / kPagesAtOnce;
  for (uint64_t batch = 0; batch <= batches; ++batch) {
    // Pages warp, warp + kBlockWarps, .. of the batch.
    const uint64_t first = batch * kPagesAtOnce + warp;
    Loaded<kAligned> loaded[kEach];
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint64_t page = first + i * kBlockWarps;
      if (page < pages) loaded[i].load(aligned + page * kPageBytes);
    }
    if (warp == 0 && batch > 0) {
      const uint64_t before = (batch - 1) * kPagesAtOnce;
      const uint32_t count =
          static_cast<uint32_t>(pages - before < kPagesAtOnce ? pages - before : kPagesAtOnce);
      for (uint32_t page = 0; page < count; ++page) {
        const uint64_t sum = shared.sums[(batch - 1) % 2][page][lane % kAccumulators];
        accumulator = scrambled(accumulator + sum, scramble);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      if (first + i * kBlockWarps >= pages) break;
      Sums sums;
#pragma unroll
      for (uint32_t row = 0; row < kRows; ++row) sums.add(loaded[i].word(row, shift), keys[row]);
      const uint64_t sum = sums.combined();
      if (lane < kAccumulators) shared.sums[batch % 2][warp + i * kBlockWarps][lane] = sum;
    }
    __syncthreads();
  }
  return accumulator;
}

// Returns the final mix of the accumulators, to all lanes. `key`: the secret of the accumulator.
__device__ inline uint64_t merged(uint64_t accumulator, uint64_t key, uint64_t start) {
  const uint64_t keyed = accumulator ^ key, neighbour = __shfl_xor_sync(kAllLanes, keyed, 1u);
  uint64_t sum = folded(keyed, neighbour);
  sum += __shfl_xor_sync(kAllLanes, sum, 2u);
  sum += __shfl_xor_sync(kAllLanes, sum, 4u);
  return avalanche(start + sum);
}

__device__ inline uint64_t first_accumulator(uint32_t i) {
  const uint64_t low = i == 0 ? kShort3 : i == 1 ? kPrime1 : i == 2 ? kPrime2 : kPrime3;
  const uint64_t high = i == 4 ? kPrime4 : i == 5 ? kShort2 : i == 6 ? kPrime5 : kShort1;
  return i < 4 ? low : high;
}

// Returns the hash to the first warp. The whole block must call it.
__device__ inline Hash hash_long(const uint8_t* input, uint64_t length, PageSums& shared) {
  const uint32_t lane = lane_of_thread(), mine = lane % kAccumulators,
                 stripe = lane / kAccumulators;
  uint64_t keys[kRows];
  for (uint32_t row = 0; row < kRows; ++row) keys[row] = secret(8 * (stripe + 4 * row + mine));
  const uint64_t scramble = secret(kSecretBytes - kStripeBytes + 8 * mine);
  uint64_t accumulator = first_accumulator(mine);
  const uint64_t pages = (length - 1) / kPageBytes;
  const bool aligned = reinterpret_cast<uintptr_t>(input) % 8 == 0;
  // Not aligned, the last page may lack the word behind it.
  uint64_t done = aligned || pages == 0 || length - pages * kPageBytes >= 8 ? pages : pages - 1;
  accumulator = aligned ? hash_pages<true>(input, done, keys, scramble, accumulator, shared)
                        : hash_pages<false>(input, done, keys, scramble, accumulator, shared);
  if (warp_of_thread() != 0) return {};
  // The remainder: possibly one more whole page, then stripes of the last one.
  for (;; ++done) {
    const uint8_t* page = input + done * kPageBytes;
    const uint64_t stripes = (length - 1 - done * kPageBytes) / kStripeBytes;
    Sums sums;
#pragma unroll 1
    for (uint32_t i = stripe; i < stripes && i < kPageBytes / kStripeBytes; i += kRows) {
      sums.add(read64(page + i * kStripeBytes + 8 * mine), secret(8 * (i + mine)));
    }
    if (done < pages) {
      accumulator = scrambled(accumulator + sums.combined(), scramble);
      continue;
    }
    if (stripe == 0) {  // the last 64 bytes, even if some were in a stripe already
      sums.add(read64(input + length - kStripeBytes + 8 * lane),
               secret(kSecretBytes - kStripeBytes - 7 + 8 * mine));
    }
    accumulator += sums.combined();
    break;
  }
  return {merged(accumulator, secret(11 + 8 * mine), length * kPrime1),
          merged(accumulator, secret(kSecretBytes - kStripeBytes - 11 + 8 * mine),
                 ~(length * kPrime2))};
}

// Computes and writes a digest, by a whole block.
__device__ inline void write_digest(const uint8_t* input, uint64_t length, uint64_t* digest,
                                    PageSums& shared) {
  Hash hash;
  if (length > 240)
    hash = hash_long(input, length, shared);
  else if (threadIdx.x == 0)
    hash = length > 16 ? hash_to_240(input, static_cast<uint32_t>(length))
                       : hash_to_16(input, static_cast<uint32_t>(length));
  if (threadIdx.x == 0) {
    digest[0] = hash.high;
    digest[1] = hash.low;
  }
}

__global__ void __launch_bounds__(kBlockThreads, 4)
    digest_rows(const Chunk* table, const Row* rows, const uint64_t* count, uint64_t* digests) {
  DELTACHECK_SHARED(PageSums, shared);
  if (blockIdx.x >= *count) return;
  const Chunk& chunk = table[rows[blockIdx.x].chunk];
  write_digest(chunk.current, uint64_t{chunk.words} * chunk.word_bytes,
               digests + 2 * uint64_t{blockIdx.x}, shared);
}

__global__ void __launch_bounds__(kBlockThreads, 4)
    digest_chunks(const Chunk* table, uint64_t* digests) {
  DELTACHECK_SHARED(PageSums, shared);
  const Chunk& chunk = table[blockIdx.x];
  const uint8_t* input = chunk.base != nullptr ? chunk.base : chunk.current;
  write_digest(input, uint64_t{chunk.words} * chunk.word_bytes, digests + 2 * uint64_t{blockIdx.x},
               shared);
}

}  // namespace

cudaError_t enqueue_digests(const Chunk* table, const Row* rows, const uint64_t* count,
                            uint32_t most, uint64_t* digests, cudaStream_t stream) {
  if (most == 0) return cudaSuccess;
  DELTACHECK_LAUNCH(digest_rows, most, kBlockThreads, stream, table, rows, count, digests);
  return cudaGetLastError();
}

cudaError_t digest(const Chunk* table, uint32_t chunks, uint64_t* digests, cudaStream_t stream) {
  if (chunks == 0) return cudaSuccess;
  DELTACHECK_LAUNCH(digest_chunks, chunks, kBlockThreads, stream, table, digests);
  return cudaGetLastError();
}

}  // namespace device
}  // namespace deltacheck
