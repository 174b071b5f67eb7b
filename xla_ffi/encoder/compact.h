// Compaction of one tile in one pass: finds the words that differ, lists their positions and
// differences, and updates the base. Called by segment.h. docs/reference/format.md, section 4,
// defines tiles and differences.
//
// This code waits for memory, so it has no branch on a single comparison. If about 1 % of the words
// differ, such a branch cannot be predicted, and a misprediction costs more than packing words that
// are all equal. All functions have internal linkage, see format.h.

#pragma once

#include <cstdint>
#include <cstring>

#include "format.h"
#include "intrinsics.h"
#include "kernels.h"

namespace deltacheck {
namespace {

// Each version of `compact` below finds the changed words of one tile and returns their number. It
// leaves one bit per word at `Scratch::masks` (unused bits of the last 64 are 0), and the positions
// and zigzag differences of the changed words at `positions` and `z`. With `kUpdate`, it also
// copies the changed words to the base. REQUIRES: words > 0.

#if defined(__AVX512BW__)

template <int W>
// Returns zigzag(c - b) of each word: (d << 1) ^ (d >> (bits - 1)), as in format.h. AVX-512 has no
// arithmetic shift for bytes, so W == 1 makes the sign from a mask.
inline __m512i zigzag_line(__m512i c, __m512i b) {
  if constexpr (W == 1) {
    const __m512i d = _mm512_sub_epi8(c, b);
    return _mm512_xor_si512(_mm512_add_epi8(d, d), _mm512_movm_epi8(_mm512_movepi8_mask(d)));
  } else if constexpr (W == 2) {
    const __m512i d = _mm512_sub_epi16(c, b);
    return _mm512_xor_si512(_mm512_add_epi16(d, d), _mm512_srai_epi16(d, 15));
  } else if constexpr (W == 4) {
    const __m512i d = _mm512_sub_epi32(c, b);
    return _mm512_xor_si512(_mm512_add_epi32(d, d), _mm512_srai_epi32(d, 31));
  } else {
    const __m512i d = _mm512_sub_epi64(c, b);
    return _mm512_xor_si512(_mm512_add_epi64(d, d), _mm512_srai_epi64(d, 63));
  }
}

template <int W>
inline uint64_t nonzero_words(__m512i z) {
  if constexpr (W == 1) return _mm512_test_epi8_mask(z, z);
  if constexpr (W == 2) return _mm512_test_epi16_mask(z, z);
  if constexpr (W == 4) return _mm512_test_epi32_mask(z, z);
  return _mm512_test_epi64_mask(z, z);
}

template <int W>
// Stores the selected words only, so that unchanged words of the base cause no memory traffic.
inline void store_words(uint8_t* to, uint64_t chosen, __m512i words) {
  if constexpr (W == 1) _mm512_mask_storeu_epi8(to, static_cast<__mmask64>(chosen), words);
  if constexpr (W == 2) _mm512_mask_storeu_epi16(to, static_cast<__mmask32>(chosen), words);
  if constexpr (W == 4) _mm512_mask_storeu_epi32(to, static_cast<__mmask16>(chosen), words);
  if constexpr (W == 8) _mm512_mask_storeu_epi64(to, static_cast<__mmask8>(chosen), words);
}

// Packs the selected words of 64 bytes and their positions, and advances the output pointers. Words
// of 1 and 2 bytes are combined with their positions in 32 bits, the position in the upper half,
// because not every processor of this level can compress narrower words.
template <int W>
inline void pack_line(__m512i z, uint64_t chosen, uint32_t first, uint32_t** pairs,
                      uint8_t** packed, uint16_t** places) {
  const __m512i ascending = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i positions_of_line =
      _mm512_add_epi32(ascending, _mm512_set1_epi32(static_cast<int>(first)));
  const auto pack_pairs = [&](int part, __m512i word) {
    const __m512i place =
        _mm512_slli_epi32(_mm512_add_epi32(positions_of_line, _mm512_set1_epi32(16 * part)), 16);
    const __mmask16 selected = static_cast<__mmask16>(chosen >> (16 * part));
    _mm512_storeu_si512(*pairs,
                        _mm512_maskz_compress_epi32(selected, _mm512_or_si512(place, word)));
    *pairs += __builtin_popcount(selected);
  };
  if constexpr (W == 1) {
    pack_pairs(0, _mm512_cvtepu8_epi32(_mm512_castsi512_si128(z)));
    pack_pairs(1, _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(z, 1)));
    pack_pairs(2, _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(z, 2)));
    pack_pairs(3, _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(z, 3)));
    return;
  }
  if constexpr (W == 2) {
    pack_pairs(0, _mm512_cvtepu16_epi32(_mm512_castsi512_si256(z)));
    pack_pairs(1, _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(z, 1)));
    return;
  }
  const __mmask16 selected = static_cast<__mmask16>(chosen);
  if constexpr (W == 4) _mm512_storeu_si512(*packed, _mm512_maskz_compress_epi32(selected, z));
  if constexpr (W == 8)
    _mm512_storeu_si512(*packed, _mm512_maskz_compress_epi64(static_cast<__mmask8>(chosen), z));
  const __m256i place =
      _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(selected, positions_of_line));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(*places), place);
  const uint32_t count = static_cast<uint32_t>(__builtin_popcount(selected));
  *packed += W * count;
  *places += count;
}

template <int W, bool kUpdate>
inline uint32_t compact(const uint8_t* current, uint8_t* base, uint32_t words, Scratch* scratch) {
  const uint32_t bytes = words * W;
  uint32_t* pairs = scratch->pairs;
  uint8_t* packed = scratch->z;
  uint16_t* places = scratch->positions;
  scratch->masks[(words - 1) / 64] = 0;
  uint8_t* masks = reinterpret_cast<uint8_t*>(scratch->masks);
  const auto line = [&](uint32_t at, __m512i c, __m512i b) {
    const __m512i z = zigzag_line<W>(c, b);
    const uint64_t chosen = nonzero_words<W>(z);
    std::memcpy(masks + at / (8 * W), &chosen, 8 / W);
    if (kUpdate) store_words<W>(base + at, chosen, c);
    pack_line<W>(z, chosen, at / W, &pairs, &packed, &places);
  };
  uint32_t at = 0;
  for (; at + 64 <= bytes; at += 64) {
    __builtin_prefetch(current + at + kAheadBytes, 0, 3);
    __builtin_prefetch(base + at + kAheadBytes, 0, 3);
    line(at, _mm512_loadu_si512(current + at), _mm512_loadu_si512(base + at));
  }
  if (at < bytes) {
    // Masked loads do not fault on bytes behind the arrays; those lanes compare as equal.
    const __mmask64 rest = ~uint64_t{0} >> (64 - (bytes - at));
    line(at, _mm512_maskz_loadu_epi8(rest, current + at), _mm512_maskz_loadu_epi8(rest, base + at));
  }
  if constexpr (W > 2) return static_cast<uint32_t>(places - scratch->positions);
  const uint32_t count = static_cast<uint32_t>(pairs - scratch->pairs);
  using U = typename Word<W>::type;
  U* __restrict z = reinterpret_cast<U*>(scratch->z);
  uint16_t* __restrict positions = scratch->positions;
  const uint32_t* __restrict from = scratch->pairs;
#  pragma omp simd
  for (uint32_t k = 0; k < count; ++k) {
    z[k] = static_cast<U>(from[k]);
    positions[k] = static_cast<uint16_t>(from[k] >> 16);
  }
  return count;
}

// Packs the differences above 255, W bytes each, and returns their number. Up to 64 bytes behind
// them may be overwritten.
template <int W>
inline uint32_t pack_wide(const uint8_t* z, uint32_t count, uint8_t* wide) {
  static_assert(W > 1);
  uint8_t* at = wide;
  for (uint32_t k = 0; k < count; k += 64 / W) {
    const uint32_t words_of_line = count - k < 64 / W ? count - k : 64 / W;
    // Two shifts, because a shift by 32 is undefined.
    const uint32_t valid = (1u << (words_of_line - 1) << 1) - 1;
    const __m512i line = _mm512_loadu_si512(z + W * k);
    if constexpr (W == 2) {
      const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(line));
      const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(line, 1));
      const uint32_t chosen = valid & _mm512_cmpgt_epu16_mask(line, _mm512_set1_epi16(255));
      const __mmask16 low_mask = static_cast<__mmask16>(chosen),
                      high_mask = static_cast<__mmask16>(chosen >> 16);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(at),
                          _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(low_mask, low)));
      at += 2 * __builtin_popcount(low_mask);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(at),
                          _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(high_mask, high)));
      at += 2 * __builtin_popcount(high_mask);
    } else if constexpr (W == 4) {
      const __mmask16 chosen =
          static_cast<__mmask16>(valid & _mm512_cmpgt_epu32_mask(line, _mm512_set1_epi32(255)));
      _mm512_storeu_si512(at, _mm512_maskz_compress_epi32(chosen, line));
      at += 4 * __builtin_popcount(chosen);
    } else {
      const __mmask8 chosen =
          static_cast<__mmask8>(valid & _mm512_cmpgt_epu64_mask(line, _mm512_set1_epi64(255)));
      _mm512_storeu_si512(at, _mm512_maskz_compress_epi64(chosen, line));
      at += 8 * __builtin_popcount(chosen);
    }
  }
  return static_cast<uint32_t>(at - wide) / W;
}

#else

#  if defined(__AVX2__)

// The positions of the 1 bits of every byte, ascending. The remaining entries do not matter.
struct BitPlaces {
  uint8_t of[256][8];
};

static constexpr BitPlaces make_bit_places() {
  BitPlaces places{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t count = 0;
    for (uint8_t bit = 0; bit < 8; ++bit) {
      if (byte >> bit & 1) places.of[byte][count++] = bit;
    }
  }
  return places;
}

alignas(64) static constexpr BitPlaces kBitPlaces = make_bit_places();

// Moves the words at `places` of 8 words to the front.
template <int W>
inline void pack8(const uint8_t* z, __m128i places, uint8_t* to) {
  if constexpr (W == 1) {
    const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(z));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(eight, places));
  } else if constexpr (W == 2) {
    const __m128i twice =
        _mm_unpacklo_epi8(_mm_add_epi8(places, places), _mm_add_epi8(places, places));
    const __m128i bytes = _mm_add_epi8(twice, _mm_set1_epi16(0x0100));
    const __m128i eight = _mm_load_si128(reinterpret_cast<const __m128i*>(z));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(eight, bytes));
  } else {
    static_assert(W == 4, "words of 8 bytes are too few to gain from this");
    const __m256i eight = _mm256_load_si256(reinterpret_cast<const __m256i*>(z));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm256_permutevar8x32_epi32(eight, _mm256_cvtepu8_epi32(places)));
  }
}

// Packs the differences of all complete blocks of 64 words, and returns the number of changed
// words.
template <int W>
inline uint32_t pack_blocks(const uint8_t* current, const uint8_t* base, uint32_t words,
                            Scratch* scratch) {
  using Memory = typename Word<W>::Memory;
  uint8_t* packed = scratch->z;
  uint16_t* places = scratch->positions;
  for (uint32_t block = 0; (block + 1) * 64 <= words; ++block) {
    const uint8_t* a = current + 64 * W * block;
    const uint8_t* b = base + 64 * W * block;
    for (int line = 0; line < W; ++line) {
      __builtin_prefetch(a + 64 * line + kAheadBytes, 0, 3);
      __builtin_prefetch(b + 64 * line + kAheadBytes, 0, 3);
    }
    const uint64_t bits = scratch->masks[block] = differing64<W>(a, b);
    alignas(64) typename Word<W>::type z[64];
#    pragma omp simd
    for (uint32_t i = 0; i < 64; ++i)
      z[i] =
          zigzag<W>(reinterpret_cast<const Memory*>(a)[i], reinterpret_cast<const Memory*>(b)[i]);
    for (uint32_t byte = 0; byte < 8; ++byte) {
      const uint32_t chosen = bits >> (8 * byte) & 255;
      const __m128i eight =
          _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kBitPlaces.of[chosen]));
      pack8<W>(reinterpret_cast<const uint8_t*>(z + 8 * byte), eight, packed);
      const __m128i first = _mm_set1_epi16(static_cast<int16_t>(64 * block + 8 * byte));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(places),
                       _mm_add_epi16(_mm_cvtepu8_epi16(eight), first));
      const uint32_t count = static_cast<uint32_t>(__builtin_popcount(chosen));
      packed += W * count;
      places += count;
    }
  }
  return static_cast<uint32_t>(places - scratch->positions);
}

#  endif

// Lists the positions of the 1 bits, ascending. Up to 64 entries behind them may be overwritten.
inline void set_bits(const uint64_t* masks, uint32_t blocks, uint16_t* out) {
  // Keeps the count of trailing zeros defined after all bits have been removed.
  constexpr uint64_t kTop = uint64_t{1} << 63;
  for (uint32_t block = 0; block < blocks; ++block) {
    uint64_t bits = masks[block];
    if (bits == 0) continue;
    const uint32_t count = static_cast<uint32_t>(__builtin_popcountll(bits)), start = 64 * block;
    // Four entries are written at a time, including some too many, because the number of bits in a
    // block cannot be predicted.
    for (uint32_t k = 0; k < count; k += 4) {
      for (uint32_t i = 0; i < 4; ++i) {
        out[k + i] =
            static_cast<uint16_t>(start + static_cast<uint32_t>(__builtin_ctzll(bits | kTop)));
        bits &= bits - 1;
      }
    }
    out += count;
  }
}

template <int W, bool kUpdate>
inline uint32_t compact(const uint8_t* current, uint8_t* base, uint32_t words, Scratch* scratch) {
  using U = typename Word<W>::type;
  using Memory = typename Word<W>::Memory;
  const Memory* c = reinterpret_cast<const Memory*>(current);
  Memory* b = reinterpret_cast<Memory*>(base);
  U* __restrict z = reinterpret_cast<U*>(scratch->z);
  uint32_t count = 0;
#  if defined(__AVX2__)
  if constexpr (W < 8) {
    count = pack_blocks<W>(current, base, words, scratch);
    const uint32_t packed = words / 64 * 64;
    if (packed < words) scratch->masks[packed / 64] = 0;
    for (uint32_t i = packed; i < words; ++i) {
      scratch->positions[count] = static_cast<uint16_t>(i);
      z[count] = zigzag<W>(c[i], b[i]);
      scratch->masks[packed / 64] |= uint64_t(z[count] != 0) << (i % 64);
      count += z[count] != 0;
    }
  } else
#  endif
  {
    count = differing<W>(current, base, words, scratch->masks);
    set_bits(scratch->masks, (words + 63) / 64, scratch->positions);
    for (uint32_t k = 0; k < count; ++k)
      z[k] = zigzag<W>(c[scratch->positions[k]], b[scratch->positions[k]]);
  }
  if (!kUpdate || count == 0) return count;
  if (count * 16 < words) {  // few: write only the cache lines that change
    for (uint32_t k = 0; k < count; ++k) b[scratch->positions[k]] = c[scratch->positions[k]];
  } else {
    std::memcpy(base, current, size_t{words} * W);
  }
  return count;
}

template <int W>
inline uint32_t pack_wide(const uint8_t* z, uint32_t count, uint8_t* wide) {
  const typename Word<W>::type* from = reinterpret_cast<const typename Word<W>::type*>(z);
  typename Word<W>::Memory* to = reinterpret_cast<typename Word<W>::Memory*>(wide);
  uint32_t n = 0;
  for (uint32_t k = 0; k < count; ++k) {
    to[n] = from[k];
    // Every difference is stored, but only a wide one advances the output: no branch.
    n += from[k] > 255;
  }
  return n;
}

#endif

}  // namespace
}  // namespace deltacheck
