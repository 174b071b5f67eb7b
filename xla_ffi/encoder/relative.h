// Lattice codes relative to the bfloat16 weight beside a master. The weight says which cells of the
// lattice the master can lie in, so the code is the number of its cell modulo the number of those
// cells: a coset code with side information at the decoder (Slepian & Wolf, "Noiseless coding of
// correlated information sources", 1973). The modulus depends on the weight's exponent only. So a
// weight that moves by a unit in its last place changes no code.
//
// If the weight's cell is fine enough, no code is needed. Plain codes then give the weight itself,
// dithered ones a point of the cell that the phase draws (subtractive dither: Roberts, "Picture
// coding using pseudo-random noise", 1962): a master that always came back as the middle of its
// cell would lose each time what it had gained since the last one.
//
// Part of the format: docs/reference/format.md, 4.5.3 and 4.5.4. The rules of lattice.h hold here
// too.

#pragma once

#include "lattice.h"

namespace deltacheck {

// The lattice of a tensor.
struct Lattice {
  double step;     // the spacing: finite and at least 2^-149
  double inverse;  // 1 / step
  double most;     // the number of codes
  double finest;   // weights with a unit of at most this in their last place need no code
  uint32_t drawn;  // all ones: the values of these weights are drawn; 0: they are the weights
};

// REQUIRES: `most` is 2^8 or 2^16.
DELTACHECK_HD Lattice lattice_of(double step, double most, bool dithered) {
  return {step, 1 / step, most, dithered ? 0.5 * step : step, dithered ? ~0u : 0u};
}

// The cells that a master of one weight can lie in.
struct Cells {
  double count;   // the modulus of the codes; 1: the weight itself is close enough
  double lowest;  // the number of the first one
  double fits;    // 1, or 0 if the count is above the number of codes
};

// A weight that is infinite or NaN gives numbers of no meaning.
DELTACHECK_HD Cells cells_of(uint32_t weight, const Lattice& lattice, double u) {
  const uint32_t exponent = (weight >> 7) & 0xffu, place = exponent > 1 ? exponent : 1;
  // 2^(place - 134), a unit in the last place of the weight.
  const double width = double_of(static_cast<uint64_t>(place + 889) << 52);
  const double center = float_of(weight << 16);
  // A product with a power of two is exact, so this is the quotient width / step, rounded once.
  const double steps = width * lattice.inverse;
  const double count = width > lattice.finest ? ceil(steps) + 1 : 1;
  const double fits = count <= lattice.most ? 1 : 0;
  return {count, floor((center - 0.5 * width) / lattice.step + u), fits};
}

// Returns number modulo `modulus`. REQUIRES: both are integers, and their quotient is below 2^31.
DELTACHECK_HD double modulo(double number, double modulus) {
  // A quotient from an inverse of 48 valid bits is at most one too large or too small.
  const double about = 1.0f / static_cast<float>(modulus);
  const double rest = number - modulus * floor(number * (about * (2 - modulus * about)));
  const double positive = rest < 0 ? rest + modulus : rest;
  return positive < modulus ? positive : positive - modulus;
}

DELTACHECK_HD uint32_t is_finite_weight(uint32_t weight) {
  return (weight & 0x7f80u) != 0x7f80u ? 1 : 0;
}

// Returns x' of cell q, which is one of the weight's.
DELTACHECK_HD uint32_t relative_value(uint32_t weight, double count, double q,
                                      const Lattice& lattice, double u) {
  const uint32_t exponent = (weight >> 7) & 0xffu, place = exponent > 1 ? exponent : 1;
  const double width = double_of(static_cast<uint64_t>(place + 889) << 52);
  const float center = float_of(weight << 16);
  const float point = static_cast<float>(static_cast<double>(center) + (u - 0.5) * width);
  const uint32_t several = static_cast<int32_t>(count) > 1 ? ~0u : 0u;
  const float middle = limited((q - u + 0.5) * lattice.step);
  const uint32_t from = (several & bits_of(middle)) | (~several & bits_of(point));
  const uint32_t moved = in_cell(from, static_cast<uint16_t>(weight));
  const uint32_t is_moved = (several | lattice.drawn) & (is_finite_weight(weight) ? ~0u : several);
  return (is_moved & moved) | (~is_moved & (weight << 16));
}

namespace {

template <int W>
inline LatticeErrors relative_codes_of(const uint8_t* values, const uint8_t* weights,
                                       uint64_t count, double step, uint64_t seed, bool dithered,
                                       uint8_t* codes) {
  const Lattice lattice = lattice_of(step, W == 1 ? 0x1p8 : 0x1p16, dithered);
  const Word<4>::Memory* x = reinterpret_cast<const Word<4>::Memory*>(values);
  const Word<2>::Memory* w = reinterpret_cast<const Word<2>::Memory*>(weights);
  typename Word<W>::Memory* to = reinterpret_cast<typename Word<W>::Memory*>(codes);
  alignas(64) double errors[kBlockValues], lanes[kSumLanes] = {};
  double coded_count = 0, largest = 0;
  for (uint64_t start = 0; start < count; start += kBlockValues) {
    const uint64_t size = count - start < kBlockValues ? count - start : kBlockValues;
#pragma omp simd reduction(+ : coded_count) reduction(max : largest)
    for (uint64_t i = 0; i < size; ++i) {
      const uint32_t bits = x[start + i], weight = w[start + i];
      // Numbers in place of conditions: GCC 12 does not vectorise choices between conditions.
      const uint32_t finite =
          ((bits & kMagnitude) < kInfinity ? 1u : 0u) & is_finite_weight(weight);
      const float value = float_of(finite ? bits : 0);
      const uint32_t known = finite ? weight : 0;
      const double u = phase(seed, start + i);
      const Cells cells = cells_of(known, lattice, u);
      const double coded = cells.fits * static_cast<int32_t>(finite);
      const double modulus = coded > 0 ? cells.count : 1, last = cells.lowest + (modulus - 1);
      double q = floor(value / step + u);
      q = q > cells.lowest ? q : cells.lowest;
      q = q < last ? q : last;
      const double code = modulo(q, modulus);
      const float restored = float_of(relative_value(known, modulus, q, lattice, u));
      const double distance = fabs(static_cast<double>(restored) - static_cast<double>(value));
      const double error = coded * distance;
      errors[i] = error;
      largest = error > largest ? error : largest;
      coded_count += coded;
      const uint32_t stored = static_cast<uint32_t>(static_cast<int32_t>(coded * code));
      to[start + i] = static_cast<typename Word<W>::type>(stored);
    }
    add_squares(errors, size, lanes);
  }
  return {count - static_cast<uint64_t>(coded_count), largest, added(lanes)};
}

template <int W>
inline uint64_t relative_values_of(const uint8_t* codes, const uint8_t* weights, uint64_t count,
                                   double step, uint64_t seed, bool dithered, uint8_t* values) {
  const Lattice lattice = lattice_of(step, 0x1p16, dithered);
  const typename Word<W>::Memory* from = reinterpret_cast<const typename Word<W>::Memory*>(codes);
  const Word<2>::Memory* w = reinterpret_cast<const Word<2>::Memory*>(weights);
  Word<4>::Memory* to = reinterpret_cast<Word<4>::Memory*>(values);
  double valid_count = 0;
#pragma omp simd reduction(+ : valid_count)
  for (uint64_t i = 0; i < count; ++i) {
    const uint32_t weight = w[i];
    const double code = static_cast<double>(static_cast<int32_t>(uint32_t{from[i]}));
    const double u = phase(seed, i);
    const Cells cells = cells_of(weight, lattice, u);
    const double below = code < cells.count ? cells.fits : 0;
    const double valid = below * static_cast<int32_t>(is_finite_weight(weight));
    const double modulus = valid > 0 ? cells.count : 1;
    const double q = cells.lowest + modulo(code - cells.lowest, modulus);
    to[i] = relative_value(weight, modulus, q, lattice, u);
    valid_count += valid;
  }
  return count - static_cast<uint64_t>(valid_count);
}

// Codes one part. `values`: float32 at any address. `weights`: bfloat16. `codes`: of `code_bytes`,
// 1 or 2.
inline LatticeErrors relative_codes_part(const uint8_t* values, const uint8_t* weights,
                                         uint64_t count, double step, uint64_t seed,
                                         uint32_t code_bytes, bool dithered, uint8_t* codes) {
  return code_bytes == 1
             ? relative_codes_of<1>(values, weights, count, step, seed, dithered, codes)
             : relative_codes_of<2>(values, weights, count, step, seed, dithered, codes);
}

// Decodes one part. Returns the number of codes that no value has; their values are the weights.
inline uint64_t relative_values_part(const uint8_t* codes, const uint8_t* weights, uint64_t count,
                                     double step, uint64_t seed, uint32_t code_bytes, bool dithered,
                                     uint8_t* values) {
  return code_bytes == 1
             ? relative_values_of<1>(codes, weights, count, step, seed, dithered, values)
             : relative_values_of<2>(codes, weights, count, step, seed, dithered, values);
}

}  // namespace

}  // namespace deltacheck
