// Codes on a lattice whose phase differs from element to element: subtractive dither (Schuchman,
// "Dither signals and their effect on quantization noise", 1964). Changes far below the spacing
// survive on average. If u is uniform and independent of x, then x' - x is uniform in [-s/2, s/2]
// and independent of x. This holds unless x is chosen by the hash, and for one quantisation only:
// later saves share the phase.
//
// The spacing may be halved again and again. A halving splits every cell in two, so that a code
// gains one bit and keeps the others: an embedded quantiser (Equitz & Cover, "Successive refinement
// of information", 1991). A code is the number of its cell above some spare bits, which are zero. A
// halving takes the highest of these. Without halvings and spare bits, it is the number of the
// cell.
//
// Part of the format: docs/reference/format.md, 4.5.1. Called through kernels.h. All
// functions have internal linkage, see format.h. All arithmetic is in double, in the order of the
// source, and the host is compiled with -ffp-contract=off, so the bits are the same on every
// processor. The loops are written so that compilers vectorise them. There is no device code yet.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "format.h"

namespace deltacheck {

// The finaliser of splitmix64 (Steele, Lea & Flood, 2014).
DELTACHECK_HD uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// Returns u of element `number`, in [0, 1).
DELTACHECK_HD double phase(uint64_t seed, uint64_t number) {
  return static_cast<double>(static_cast<int32_t>(mix64(seed + number) >> 40)) * 0x1p-24;
}

constexpr uint32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;

DELTACHECK_HD double double_of(uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Returns the value as a float, at most the largest finite one in magnitude.
DELTACHECK_HD float limited(double value) {
  constexpr double kMost = 0x1.fffffep127;  // largest finite float
  value = value < kMost ? value : kMost;
  value = value > -kMost ? value : -kMost;
  return static_cast<float>(value);
}

// A lattice after some halvings.
struct HalvedLattice {
  double step;     // the spacing before the first halving
  double scale;    // 2^halvings
  double unscale;  // 2^-halvings
};

// `step`: the spacing after the halvings. REQUIRES: halvings is at most 31, and step * 2^halvings
// is finite and at least 2^-149.
DELTACHECK_HD HalvedLattice halved_lattice_of(double step, uint32_t halvings) {
  const double scale = double_of(uint64_t{1023 + halvings} << 52);
  return {step * scale, scale, 1 / scale};
}

// Returns the number of the cell that a value lies in. A product with `scale` is exact, so one more
// halving gives twice this number, or one more.
DELTACHECK_HD double number_of(double value, const HalvedLattice& lattice, double u) {
  return floor((value / lattice.step + u) * lattice.scale);
}

// Returns the middle of cell q of the lattice.
DELTACHECK_HD float middle_of(double q, const HalvedLattice& lattice, double u) {
  return limited((q * lattice.unscale - u + 0.5 * lattice.unscale) * lattice.step);
}

// Returns the finite float nearest to `bits` among those that round to the bfloat16 `weight`, to
// nearest and ties to even. No finite float rounds to a NaN; the result is then `bits`.
DELTACHECK_HD uint32_t in_cell(uint32_t bits, uint16_t weight) {
  const uint32_t whole = static_cast<uint32_t>(weight) << 16, center = whole & kMagnitude,
                 odd = weight & 1u;
  const uint32_t low = center == 0 ? 0 : center - 0x8000 + odd, above = center + 0x8000 - odd,
                 high = above < kInfinity ? above : kInfinity - 1;
  const uint32_t magnitude = bits & kMagnitude, not_above = magnitude < high ? magnitude : high,
                 inside = not_above > low ? not_above : low;
  const uint32_t same_sign = (bits ^ whole) <= kMagnitude ? inside : low;
  return center > kInfinity ? bits : same_sign | (whole & ~kMagnitude);
}

// The cell of a value. A number in place of a condition: GCC 12 does not vectorise choices between
// conditions.
struct LatticeCell {
  float value;   // 0 if it is infinite or NaN
  double u;      // its phase
  double q;      // its number; 0 without a code
  double code;   // q * place; 0 without one
  double coded;  // 1, or 0 if the value is not finite or its code is no int32
};

// `place`: 2^spare_bits, which a code is a multiple of.
DELTACHECK_HD LatticeCell cell_of(uint32_t bits, const HalvedLattice& lattice, double place,
                                  double u) {
  const bool finite = (bits & kMagnitude) < kInfinity;
  const float value = float_of(finite ? bits : 0);
  const double q = number_of(value, lattice, u), code = q * place;
  const bool coded = finite & (code >= -0x1p31) & (code < 0x1p31);
  return {value, u, coded ? q : 0, coded ? code : 0, coded ? 1.0 : 0.0};
}

// Returns 2^spare_bits.
DELTACHECK_HD double place_of(uint32_t spare_bits) {
  return static_cast<double>(int32_t{1} << spare_bits);
}

// The errors of coding, x being a value and x' its code's value.
struct LatticeErrors {
  uint64_t refused;  // values that are not finite or have no int32 code; stored as 0
  double largest;    // |x' - x| of the others
};

// The errors of bfloat16 weights that are cast from the codes of their masters.
struct CastErrors {
  uint64_t refused;    // masters that have no code
  double largest;      // |x' - x| of the others
  double differences;  // sum of (w' - w)^2 of the others, w' being x' rounded to bfloat16
  double weights;      // sum of w^2
};

// The order of a sum: element i of a part is added to lane i mod 32, the lanes are added in
// halves, then the parts. A fixed order gives equal bits on every processor.
constexpr uint32_t kSumLanes = 32;
constexpr uint32_t kPartValues = 65536;
constexpr uint32_t kBlockValues = 1024;  // within the nearest cache
static_assert(kBlockValues % kSumLanes == 0);

namespace {

// Adds the squares of the errors of a block to their lanes. Writes zeros behind the errors, up to a
// multiple of kSumLanes.
inline void add_squares(double* errors, uint64_t size, double* lanes) {
  const uint32_t rows = static_cast<uint32_t>((size + kSumLanes - 1) / kSumLanes);
  for (uint64_t i = size; i < uint64_t{rows} * kSumLanes; ++i) errors[i] = 0;
  for (uint32_t row = 0; row < rows; ++row) {
#pragma omp simd
    for (uint32_t lane = 0; lane < kSumLanes; ++lane) {
      const double error = errors[row * kSumLanes + lane];
      lanes[lane] += error * error;
    }
  }
}

// Returns the sum of the lanes, added in halves.
inline double added(double* lanes) {
  for (uint32_t half = kSumLanes / 2; half > 0; half /= 2) {
    for (uint32_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

template <bool kCells>
inline LatticeErrors lattice_codes_of(const uint8_t* values, const uint8_t* weights, uint64_t count,
                                      double step, uint64_t seed, uint32_t halvings,
                                      uint32_t spare_bits, uint8_t* codes) {
  const HalvedLattice lattice = halved_lattice_of(step, halvings);
  const double place = place_of(spare_bits);
  const Word<4>::Memory* x = reinterpret_cast<const Word<4>::Memory*>(values);
  const Word<2>::Memory* w = reinterpret_cast<const Word<2>::Memory*>(weights);
  Word<4>::Memory* to = reinterpret_cast<Word<4>::Memory*>(codes);
  double coded_count = 0, largest = 0;
#pragma omp simd reduction(+ : coded_count) reduction(max : largest)
  for (uint64_t i = 0; i < count; ++i) {
    const LatticeCell cell = cell_of(x[i], lattice, place, phase(seed, i));
    uint32_t moved = bits_of(middle_of(cell.q, lattice, cell.u));
    if (kCells) moved = in_cell(moved, w[i]);
    const double distance =
        fabs(static_cast<double>(float_of(moved)) - static_cast<double>(cell.value));
    const double error = cell.coded * distance;
    largest = error > largest ? error : largest;
    coded_count += cell.coded;
    to[i] = static_cast<uint32_t>(static_cast<int32_t>(cell.code));
  }
  return {count - static_cast<uint64_t>(coded_count), largest};
}

// Measures one part. `values`: float32 at any address. `weights`: bfloat16.
inline CastErrors lattice_cast_part(const uint8_t* values, const uint8_t* weights, uint64_t count,
                                    double step, uint64_t seed, uint32_t halvings,
                                    uint32_t spare_bits) {
  const HalvedLattice lattice = halved_lattice_of(step, halvings);
  const double place = place_of(spare_bits);
  const Word<4>::Memory* x = reinterpret_cast<const Word<4>::Memory*>(values);
  const Word<2>::Memory* w = reinterpret_cast<const Word<2>::Memory*>(weights);
  alignas(64) double differences[kBlockValues], lives[kBlockValues];
  alignas(64) double difference_lanes[kSumLanes] = {}, live_lanes[kSumLanes] = {};
  double coded_count = 0, largest = 0;
  for (uint64_t start = 0; start < count; start += kBlockValues) {
    const uint64_t size = count - start < kBlockValues ? count - start : kBlockValues;
#pragma omp simd reduction(+ : coded_count) reduction(max : largest)
    for (uint64_t i = 0; i < size; ++i) {
      const LatticeCell cell = cell_of(x[start + i], lattice, place, phase(seed, start + i));
      const float middle = middle_of(cell.q, lattice, cell.u);
      const double distance = fabs(static_cast<double>(middle) - static_cast<double>(cell.value));
      const double error = cell.coded * distance;
      const uint32_t from = bits_of(middle);
      const double cast = float_of((from + 0x7fff + ((from >> 16) & 1u)) & 0xffff0000u);
      const double live = float_of(uint32_t{w[start + i]} << 16);
      differences[i] = cell.coded > 0 ? cast - live : 0;
      lives[i] = live;
      largest = error > largest ? error : largest;
      coded_count += cell.coded;
    }
    add_squares(differences, size, difference_lanes);
    add_squares(lives, size, live_lanes);
  }
  return {count - static_cast<uint64_t>(coded_count), largest, added(difference_lanes),
          added(live_lanes)};
}

template <bool kCells>
inline uint64_t lattice_values_of(const uint8_t* codes, const uint8_t* weights, uint64_t count,
                                  double step, uint64_t seed, uint32_t halvings,
                                  uint32_t spare_bits, uint8_t* values) {
  const HalvedLattice lattice = halved_lattice_of(step, halvings);
  const double unplace = 1 / place_of(spare_bits);
  const uint32_t spare = (1u << spare_bits) - 1;
  const Word<4>::Memory* code = reinterpret_cast<const Word<4>::Memory*>(codes);
  const Word<2>::Memory* w = reinterpret_cast<const Word<2>::Memory*>(weights);
  Word<4>::Memory* to = reinterpret_cast<Word<4>::Memory*>(values);
  double valid_count = 0;
#pragma omp simd reduction(+ : valid_count)
  for (uint64_t i = 0; i < count; ++i) {
    const uint32_t pattern = code[i];
    const double q = static_cast<int32_t>(pattern) * unplace;
    uint32_t moved = bits_of(middle_of(q, lattice, phase(seed, i)));
    if (kCells) moved = in_cell(moved, w[i]);
    to[i] = moved;
    valid_count += static_cast<int32_t>((pattern & spare) == 0 ? 1u : 0u);
  }
  return count - static_cast<uint64_t>(valid_count);
}

// Codes one part. `values`: float32 at any address. `weights`: bfloat16, or null. `codes`: int32.
// `step`: after the halvings.
inline LatticeErrors lattice_codes_part(const uint8_t* values, const uint8_t* weights,
                                        uint64_t count, double step, uint64_t seed,
                                        uint32_t halvings, uint32_t spare_bits, uint8_t* codes) {
  const auto function = weights != nullptr ? lattice_codes_of<true> : lattice_codes_of<false>;
  return function(values, weights, count, step, seed, halvings, spare_bits, codes);
}

// The inverse of lattice_codes_part. `values` may be the memory of `codes`. Returns the number of
// codes with a spare bit that is not zero; their values are finite.
inline uint64_t lattice_values_part(const uint8_t* codes, const uint8_t* weights, uint64_t count,
                                    double step, uint64_t seed, uint32_t halvings,
                                    uint32_t spare_bits, uint8_t* values) {
  const auto function = weights != nullptr ? lattice_values_of<true> : lattice_values_of<false>;
  return function(codes, weights, count, step, seed, halvings, spare_bits, values);
}

}  // namespace

}  // namespace deltacheck
