// Comparison of words to bit masks, with processor intrinsics. Only this file, compact.h and
// order.h use intrinsics: no compiler was found to produce bit masks from comparisons. Included by
// segment.h and compact.h. All functions have internal linkage, see format.h.

#pragma once

#include <cstdint>

#include "format.h"

#ifdef __SSE4_1__
#  include <immintrin.h>
#endif

namespace deltacheck {
namespace {

// Returns a mask of 64 words: bit i is 1 if word i differs.
template <int W>
inline uint64_t differing64(const uint8_t* a, const uint8_t* b) {
#if defined(__AVX512BW__)
  uint64_t bits = 0;
  for (int part = 0; part < W; ++part) {
    const __m512i x = _mm512_loadu_si512(a + 64 * part), y = _mm512_loadu_si512(b + 64 * part);
    uint64_t mask;
    if constexpr (W == 1) mask = _mm512_cmpneq_epi8_mask(x, y);
    if constexpr (W == 2) mask = _mm512_cmpneq_epi16_mask(x, y);
    if constexpr (W == 4) mask = _mm512_cmpneq_epi32_mask(x, y);
    if constexpr (W == 8) mask = _mm512_cmpneq_epi64_mask(x, y);
    bits |= mask << (64 / W * part);
  }
  return bits;
#elif defined(__AVX2__)
  // Comparisons of 32 bytes are packed to one byte per word, for 32 words at a time. The
  // permutations undo the interleaving of 128-bit lanes by the pack instructions.
  const auto equal = [&](int part) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + 32 * part));
    const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + 32 * part));
    if constexpr (W == 1) return _mm256_cmpeq_epi8(x, y);
    if constexpr (W == 2) return _mm256_cmpeq_epi16(x, y);
    if constexpr (W == 4) return _mm256_cmpeq_epi32(x, y);
    return _mm256_cmpeq_epi64(x, y);
  };
  uint64_t same = 0;
  if constexpr (W == 8) {
    for (int part = 0; part < 16; ++part) {
      same |= uint64_t(uint32_t(_mm256_movemask_pd(_mm256_castsi256_pd(equal(part)))))
              << (4 * part);
    }
    return ~same;
  }
  for (int half = 0; half < 2; ++half) {
    __m256i bytes;
    if constexpr (W == 1) bytes = equal(half);
    if constexpr (W == 2)
      bytes =
          _mm256_permute4x64_epi64(_mm256_packs_epi16(equal(2 * half), equal(2 * half + 1)), 0xd8);
    if constexpr (W == 4) {
      const __m256i low = _mm256_packs_epi32(equal(4 * half), equal(4 * half + 1));
      const __m256i high = _mm256_packs_epi32(equal(4 * half + 2), equal(4 * half + 3));
      bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high),
                                          _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    }
    same |= uint64_t(uint32_t(_mm256_movemask_epi8(bytes))) << (32 * half);
  }
  return ~same;
#elif defined(__SSE4_1__)
  const auto equal = [&](int part) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a + 16 * part));
    const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b + 16 * part));
    if constexpr (W == 1) return _mm_cmpeq_epi8(x, y);
    if constexpr (W == 2) return _mm_cmpeq_epi16(x, y);
    if constexpr (W == 4) return _mm_cmpeq_epi32(x, y);
    return _mm_cmpeq_epi64(x, y);
  };
  uint64_t same = 0;
  if constexpr (W == 8) {
    for (int part = 0; part < 32; ++part) {
      same |= uint64_t(uint32_t(_mm_movemask_pd(_mm_castsi128_pd(equal(part))))) << (2 * part);
    }
    return ~same;
  }
  for (int quarter = 0; quarter < 4; ++quarter) {
    __m128i bytes;
    if constexpr (W == 1) bytes = equal(quarter);
    if constexpr (W == 2) bytes = _mm_packs_epi16(equal(2 * quarter), equal(2 * quarter + 1));
    if constexpr (W == 4) {
      bytes = _mm_packs_epi16(_mm_packs_epi32(equal(4 * quarter), equal(4 * quarter + 1)),
                              _mm_packs_epi32(equal(4 * quarter + 2), equal(4 * quarter + 3)));
    }
    same |= uint64_t(uint32_t(_mm_movemask_epi8(bytes))) << (16 * quarter);
  }
  return ~same;
#else
  using Memory = typename Word<W>::Memory;
  const Memory* x = reinterpret_cast<const Memory*>(a);
  const Memory* y = reinterpret_cast<const Memory*>(b);
  uint64_t bits = 0;
  for (int byte = 0; byte < 8; ++byte) {
    uint64_t eight = 0;
    for (int i = 0; i < 8; ++i) eight |= uint64_t(x[8 * byte + i] != y[8 * byte + i]) << i;
    bits |= eight << (8 * byte);
  }
  return bits;
#endif
}

// The prefetch distance in bytes of each array. Words this far ahead are on their way while the
// present ones are processed. A prefetch never faults, so it may point behind the array.
constexpr uint32_t kAheadBytes = 2048;

// Writes one bit per word, least significant first; unused bits of the last block are 0. Returns
// the number of 1 bits. `masks`: ceil(words / 64) entries.
template <int W>
inline uint32_t differing(const uint8_t* a, const uint8_t* b, uint32_t words, uint64_t* masks) {
  uint32_t count = 0, block = 0;
  for (; (block + 1) * 64 <= words; ++block) {
    const uint32_t at = 64 * W * block;
    masks[block] = differing64<W>(a + at, b + at);
    count += static_cast<uint32_t>(__builtin_popcountll(masks[block]));
    for (int line = 0; line < W; ++line) {
      __builtin_prefetch(a + at + kAheadBytes + 64 * line, 0, 3);
      __builtin_prefetch(b + at + kAheadBytes + 64 * line, 0, 3);
    }
  }
  if (const uint32_t rest = words - 64 * block) {
    using Memory = typename Word<W>::Memory;
    const Memory* x = reinterpret_cast<const Memory*>(a) + 64 * block;
    const Memory* y = reinterpret_cast<const Memory*>(b) + 64 * block;
    uint64_t bits = 0;
    for (uint32_t i = 0; i < rest; ++i) bits |= uint64_t(x[i] != y[i]) << i;
    masks[block] = bits;
    count += static_cast<uint32_t>(__builtin_popcountll(bits));
  }
  return count;
}

// Returns true if two byte strings are equal, at the speed of memory: one branch for every 512
// bytes instead of a mask for every word.
inline bool equal_bytes(const uint8_t* a, const uint8_t* b, uint32_t bytes) {
  using Memory = Word<8>::Memory;
  constexpr uint32_t kStep = 512;
  uint32_t at = 0;
  for (; at + kStep <= bytes; at += kStep) {
    const Memory* x = reinterpret_cast<const Memory*>(a + at);
    const Memory* y = reinterpret_cast<const Memory*>(b + at);
    for (uint32_t line = 0; line < kStep; line += 64) {
      __builtin_prefetch(a + at + kAheadBytes + line, 0, 3);
      __builtin_prefetch(b + at + kAheadBytes + line, 0, 3);
    }
    uint64_t any = 0;
#pragma omp simd reduction(| : any)
    for (uint32_t i = 0; i < kStep / 8; ++i) any |= x[i] ^ y[i];
    if (any) return false;
  }
  uint8_t any = 0;
  for (; at < bytes; ++at) any |= a[at] ^ b[at];
  return any == 0;
}

}  // namespace
}  // namespace deltacheck
