// Words as numbers, and the definition of the statistics. Shared by the host (statistics.h) and the
// device (cuda/statistics.cu), whose results have equal bits. All functions have internal linkage,
// see format.h.

#pragma once

#include <cstdint>
#include <cstring>

#include "format.h"

namespace deltacheck {

// The type of the words of a run. Words of type bits are compared and nothing else.
enum class Elements : uint32_t {
  kBits8,
  kBits16,
  kBits32,
  kBits64,
  kFloat16,
  kBfloat16,
  kFloat32,
  kFloat64
};
constexpr uint32_t kElementTypes = 8;
constexpr const char* kElementNames[kElementTypes] = {"bits8",   "bits16",   "bits32",  "bits64",
                                                      "float16", "bfloat16", "float32", "float64"};

// The statistics of a chunk's pairs of words. Differences are computed in the precision of the
// elements, or in float32 for smaller ones, and are infinite on overflow. Squares and sums are
// double. A pair with a value that is not finite does not count in the last three fields. These are
// 0 for bits.
struct Statistics {
  uint64_t changed;                         // words whose bits differ
  uint64_t nonfinite;                       // infinities and NaNs in current; 0 under bits
  double squared_difference, squared_base;  // sums of squares
  double largest_difference;                // magnitude
};

// The order of the two sums, fixed because floating-point addition is not associative. Element i of
// a tile is added to lane i mod 32, the lanes of a tile are added in halves, then the tiles of a
// span one after the other, and then the spans.
constexpr uint32_t kLanes = 32;
constexpr uint32_t kSpanTiles = 64;

// The layout of an element type in its word. kExponent: the bits that are all set if a value is not
// finite; 0 for bits.
template <int W, uint64_t kExponentBits>
struct ElementOf {
  static constexpr int kWordBytes = W;
  static constexpr bool kNumbers = kExponentBits != 0;
  static constexpr typename Word<W>::type kExponent = kExponentBits;
};
template <Elements kElements>
struct Element;
template <>
struct Element<Elements::kBits8> : ElementOf<1, 0> {};
template <>
struct Element<Elements::kBits16> : ElementOf<2, 0> {};
template <>
struct Element<Elements::kBits32> : ElementOf<4, 0> {};
template <>
struct Element<Elements::kBits64> : ElementOf<8, 0> {};
template <>
struct Element<Elements::kFloat16> : ElementOf<2, 0x7c00> {};
template <>
struct Element<Elements::kBfloat16> : ElementOf<2, 0x7f80> {};
template <>
struct Element<Elements::kFloat32> : ElementOf<4, 0x7f800000> {};
template <>
struct Element<Elements::kFloat64> : ElementOf<8, 0x7ff0000000000000> {};

// Returns the number of bytes of a word of this type.
DELTACHECK_HD int word_bytes_of(Elements elements) {
  switch (elements) {
    case Elements::kBits8:
      return 1;
    case Elements::kBits16:
    case Elements::kFloat16:
    case Elements::kBfloat16:
      return 2;
    case Elements::kBits32:
    case Elements::kFloat32:
      return 4;
    default:
      return 8;
  }
}

template <Elements kElements>
DELTACHECK_HD bool is_finite(typename Word<Element<kElements>::kWordBytes>::type word) {
  return (word & Element<kElements>::kExponent) != Element<kElements>::kExponent;
}

// The type in which an element is computed.
template <int W>
struct NumberOf {
  using type = float;
};
template <>
struct NumberOf<8> {
  using type = double;
};
template <Elements kElements>
using Number = typename NumberOf<Element<kElements>::kWordBytes>::type;

// Returns the value of an element. The conversion is exact. REQUIRES: is_finite(word).
template <Elements kElements>
DELTACHECK_HD Number<kElements> value_of(typename Word<Element<kElements>::kWordBytes>::type word) {
  Number<kElements> value;
  if constexpr (kElements == Elements::kFloat16) {
    const uint32_t magnitude = word & 0x7fffu;
    // A subnormal gets the exponent of the smallest normal value, which adds 2^-14. The subtraction
    // removes it again and normalises the result.
    const bool subnormal = magnitude < 0x400;
    const uint32_t bits = (magnitude << 13) + (subnormal ? 113u << 23 : 112u << 23);
    memcpy(&value, &bits, sizeof value);
    if (subnormal) value -= 0x1p-14f;
    return word >> 15 ? -value : value;
  } else if constexpr (kElements == Elements::kBfloat16) {
    const uint32_t bits = static_cast<uint32_t>(word) << 16;
    memcpy(&value, &bits, sizeof value);
  } else {
    memcpy(&value, &word, sizeof value);
  }
  return value;
}

// Rounds the square before it enters a sum. This matters for doubles; squares of floats are exact
// in double. The host is compiled with -ffp-contract=off for the same reason.
DELTACHECK_HD double square(double value) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(value, value);
#else
  return value * value;
#endif
}

}  // namespace deltacheck
