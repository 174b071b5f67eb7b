// Codes of floats on a logarithmic scale, taken from their bit patterns. Part of the format:
// docs/reference/format.md, 4.5.2. Called through kernels.h. The arithmetic is integer; conversions
// between integers below 2^24 and floats are exact. The loops are written so that compilers
// vectorise them. All functions have internal linkage, see format.h. There is no device code yet.

#pragma once

#include <cstdint>

#include "format.h"
#include "lattice.h"

namespace deltacheck {

constexpr int32_t kLeastOctave = -149, kOctavesEnd = 128;  // of positive finite floats

// The numbers that the fraction bits determine.
struct OctaveForm {
  uint32_t code_bytes;  // 1 without fraction bits, else 2
  uint32_t shift;       // from L to cells
  int32_t lowest;       // the first cell that has a code
  uint32_t most;        // code; the cells that have one
};

// Returns the form of codes. REQUIRES: fraction_bits <= 7.
DELTACHECK_HD OctaveForm octave_form(uint32_t fraction_bits) {
  const uint32_t code_bytes = fraction_bits == 0 ? 1 : 2;
  const uint32_t room = (1u << 8 * code_bytes) - 1,
                 cells = static_cast<uint32_t>(kOctavesEnd - kLeastOctave) << fraction_bits;
  return {code_bytes, 23 - fraction_bits, kLeastOctave * (1 << fraction_bits),
          room < cells ? room : cells};
}

constexpr uint32_t kLeastNormal = 1u << 23, kBias = 127u << 23, kSubnormalBias = 276u << 23;

// Returns a condition as a mask of bits. Selections by masks have no branches, which would keep
// compilers from vectorising.
DELTACHECK_HD uint32_t mask_of(bool holds) { return 0 - uint32_t{holds}; }
DELTACHECK_HD uint32_t either(uint32_t mask, uint32_t a, uint32_t b) {
  return b ^ ((a ^ b) & mask);
}

// Returns L of a positive finite float, as two's complement. REQUIRES: magnitude > 0.
DELTACHECK_HD uint32_t octave_of(uint32_t magnitude) {
  const uint32_t whole =
      bits_of(static_cast<float>(static_cast<int32_t>(magnitude)));  // a subnormal is an integer
  return either(mask_of(magnitude < kLeastNormal), whole - kSubnormalBias, magnitude - kBias);
}

// Returns the bits of the largest float whose L is not above `octave`.
DELTACHECK_HD uint32_t magnitude_of(uint32_t octave) {
  const uint32_t subnormal = mask_of(static_cast<int32_t>(octave) < -126 * (1 << 23));
  const float whole = float_of(subnormal & (octave + kSubnormalBias));
  return either(subnormal, static_cast<uint32_t>(static_cast<int32_t>(whole)), octave + kBias);
}

// Returns the bits of the value of a code. REQUIRES: 1 <= code <= form.most.
DELTACHECK_HD uint32_t middle_of(uint32_t code, const OctaveForm& form) {
  const uint32_t cell = code - 1 + static_cast<uint32_t>(form.lowest);
  return magnitude_of((cell << form.shift) + (1u << (form.shift - 1)));
}

namespace {

template <int W, bool kBase>
inline uint64_t octave_codes_of(const uint8_t* values, const uint8_t* base, uint64_t count,
                                const OctaveForm form, uint32_t band, uint8_t* codes) {
  const Word<4>::Memory* x = reinterpret_cast<const Word<4>::Memory*>(values);
  const typename Word<W>::Memory* before = reinterpret_cast<const typename Word<W>::Memory*>(base);
  typename Word<W>::Memory* to = reinterpret_cast<typename Word<W>::Memory*>(codes);
  uint64_t refused = 0;
  // In blocks, so that the counters of the inner loop fit 32 bits.
  for (uint64_t start = 0; start < count; start += kPartValues) {
    const uint32_t size_of_block =
        static_cast<uint32_t>(count - start < kPartValues ? count - start : kPartValues);
    uint32_t coded_or_zero = 0;
#pragma omp simd reduction(+ : coded_or_zero)
    for (uint32_t i = 0; i < size_of_block; ++i) {
      const uint32_t bits = x[start + i], magnitude = bits & kMagnitude;
      const uint32_t minus = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31);
      const uint32_t octave = octave_of(magnitude);
      const int32_t cell = static_cast<int32_t>(octave) >> form.shift;
      const uint32_t nearest = static_cast<uint32_t>(cell - form.lowest) + 1,
                     is_zero = mask_of(magnitude == 0),
                     coded = ~is_zero & ~minus & mask_of(nearest <= form.most);
      uint32_t code = nearest;
      if (kBase) {
        const uint32_t old = before[start + i], valid = mask_of(old - 1 < form.most);
        const uint32_t apart = octave_of(middle_of(either(valid, old, 1), form)) - octave;
        code = either(valid & mask_of(apart + band <= 2 * band), old, nearest);
      }
      coded_or_zero += (coded | is_zero) & 1;
      to[start + i] = static_cast<typename Word<W>::type>(coded & code);
    }
    refused += size_of_block - coded_or_zero;
  }
  return refused;
}

template <int W>
inline uint64_t octave_values_of(const uint8_t* codes, uint64_t count, const OctaveForm form,
                                 uint8_t* values) {
  const typename Word<W>::Memory* from = reinterpret_cast<const typename Word<W>::Memory*>(codes);
  Word<4>::Memory* to = reinterpret_cast<Word<4>::Memory*>(values);
  uint64_t bad = 0;
  for (uint64_t start = 0; start < count; start += kPartValues) {
    const uint32_t size_of_block =
        static_cast<uint32_t>(count - start < kPartValues ? count - start : kPartValues);
    uint32_t bad_here = 0;
#pragma omp simd reduction(+ : bad_here)
    for (uint32_t i = 0; i < size_of_block; ++i) {
      const uint32_t code = from[start + i];
      const bool valid = code - 1 < form.most;
      bad_here += !valid & (code != 0);
      const uint32_t magnitude = middle_of(valid ? code : 1, form);
      to[start + i] = valid ? magnitude : 0;
    }
    bad += bad_here;
  }
  return bad;
}

// Codes one part. `values`: float32 at any address. `base`: codes, or null. `band`: the limit of
// |L(x') - L(x)| within which a code of the base is reused, at most 2^26. `codes` may be the memory
// of `base`. Returns the number of values that are infinite, NaN, too large or negative; their code
// is 0.
inline uint64_t octave_codes_part(const uint8_t* values, const uint8_t* base, uint64_t count,
                                  const OctaveForm& form, uint32_t band, uint8_t* codes) {
  if (form.code_bytes == 1) {
    return base != nullptr ? octave_codes_of<1, true>(values, base, count, form, band, codes)
                           : octave_codes_of<1, false>(values, base, count, form, band, codes);
  }
  return base != nullptr ? octave_codes_of<2, true>(values, base, count, form, band, codes)
                         : octave_codes_of<2, false>(values, base, count, form, band, codes);
}

// Decodes one part. Returns the number of codes that no value has; they become 0.
inline uint64_t octave_values_part(const uint8_t* codes, uint64_t count, const OctaveForm& form,
                                   uint8_t* values) {
  return form.code_bytes == 1 ? octave_values_of<1>(codes, count, form, values)
                              : octave_values_of<2>(codes, count, form, values);
}

}  // namespace
}  // namespace deltacheck
