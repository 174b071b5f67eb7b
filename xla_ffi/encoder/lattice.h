// Values on a lattice whose phase differs from element to element, so that steps far below its spacing are kept on
// average: subtractive dither, after Schuchman (Dither signals and their effect on quantization noise, 1964).
// Where u is uniform and independent of x, as it is to whoever does not choose x by the hash, x' - x is uniform
// in [-s/2, s/2] and independent of x; it holds for one quantisation of x, not across saves, which share the phase.
//
// Host and device code include this file; internal linkage throughout, see format.h. All arithmetic is in double, in
// the order in which it stands here, and a product that goes into a sum is exact: a compiler that fuses them changes
// nothing, and the bits are the same on every processor.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "format.h"

namespace deltacheck {

// The finaliser of splitmix64 (Steele, Lea and Flood, 2014).
DELTACHECK_HD uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// u of element `number`, in [0, 1).
DELTACHECK_HD double phase(uint64_t seed, uint64_t number) {
  return static_cast<double>(static_cast<int32_t>(mix64(seed + number) >> 40)) * 0x1p-24;
}

constexpr uint32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;

DELTACHECK_HD uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

DELTACHECK_HD float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// The middle of x's cell of the lattice. REQUIRES: x is finite; step is finite and at least 2^-149.
DELTACHECK_HD float on_lattice(float x, double step, double u) {
  constexpr double kMost = 0x1.fffffep127;  // of a finite float
  const double q = floor(x / step + u);
  double middle = (q - u + 0.5) * step;
  middle = middle < kMost ? middle : kMost;
  middle = middle > -kMost ? middle : -kMost;
  return static_cast<float>(middle);
}

// The finite float nearest to `bits` among those that round to the bfloat16 `weight`, to nearest and ties to even. No
// finite float rounds to a NaN: then `bits` itself.
DELTACHECK_HD uint32_t in_cell(uint32_t bits, uint16_t weight) {
  const uint32_t whole = static_cast<uint32_t>(weight) << 16, center = whole & kMagnitude, odd = weight & 1u;
  const uint32_t low = center == 0 ? 0 : center - 0x8000 + odd, above = center + 0x8000 - odd,
                 high = above < kInfinity ? above : kInfinity - 1;
  const uint32_t magnitude = bits & kMagnitude, not_above = magnitude < high ? magnitude : high,
                 inside = not_above > low ? not_above : low;
  const uint32_t same_sign = (bits ^ whole) <= kMagnitude ? inside : low;
  return center > kInfinity ? bits : same_sign | (whole & ~kMagnitude);
}

// What a quantisation left to say.
struct Quantised {
  uint64_t nonfinite;    // values, which stay as they are
  double largest_error;  // |x' - x| of the others
};

#ifndef __CUDACC__
namespace {

template <bool kCells>
inline Quantised quantise_values(const uint8_t* values, const uint8_t* weights, uint64_t count, double step,
                                 uint64_t seed, uint8_t* out) {
  const Word<4>::Memory* x = reinterpret_cast<const Word<4>::Memory*>(values);
  const Word<2>::Memory* w = reinterpret_cast<const Word<2>::Memory*>(weights);
  Word<4>::Memory* to = reinterpret_cast<Word<4>::Memory*>(out);
  uint64_t finite_count = 0;
  double largest = 0;
#  pragma omp simd reduction(+ : finite_count) reduction(max : largest)
  for (uint64_t i = 0; i < count; ++i) {
    const uint32_t bits = x[i];
    const bool finite = (bits & kMagnitude) < kInfinity;
    const float value = float_of(finite ? bits : 0);
    uint32_t moved = bits_of(on_lattice(value, step, phase(seed, i)));
    if (kCells) moved = in_cell(moved, w[i]);
    const double distance = fabs(static_cast<double>(float_of(moved)) - static_cast<double>(value));
    const double error = finite ? distance : 0;
    largest = error > largest ? error : largest;
    finite_count += finite;
    to[i] = finite ? moved : bits;
  }
  return {count - finite_count, largest};
}

// `values`, `out`: float32 at any address; they may be the same. `weights`: bfloat16, or null.
inline Quantised quantise_part(const uint8_t* values, const uint8_t* weights, uint64_t count, double step,
                               uint64_t seed, uint8_t* out) {
  return weights != nullptr ? quantise_values<true>(values, weights, count, step, seed, out)
                            : quantise_values<false>(values, weights, count, step, seed, out);
}

}  // namespace
#endif

}  // namespace deltacheck
