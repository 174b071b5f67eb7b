// Lattice codes relative to the bfloat16 weight beside a master. The weight says which cells of the
// lattice the master can lie in, so the code is the number of its cell modulo a power of two that
// is at least the number of those cells: a coset code with side information at the decoder (Slepian
// & Wolf, "Noiseless coding of correlated information sources", 1973). The number of bits depends
// on the weight's exponent only. So a weight that moves by a unit in its last place changes no
// code. If the spacing is halved, the difference of two codes of one weight is the new bit, unless
// the master has moved.
//
// A weight that needs no bits gives a point of its cell that the phase draws (subtractive dither:
// Roberts, "Picture coding using pseudo-random noise", 1962): a master that always came back as the
// middle of its cell would lose each time what it had gained since the last one.
//
// Part of the format: docs/reference/format.md, 4.5.3. The rules of lattice.h hold here too.

#pragma once

#include "lattice.h"

namespace deltacheck {

DELTACHECK_HD uint32_t is_finite_weight(uint32_t weight) {
  return (weight & 0x7f80u) != 0x7f80u ? 1 : 0;
}

// The lattice of a tensor after some halvings.
struct NestedLattice {
  HalvedLattice halved;
  int32_t place;  // added to a weight's exponent, it gives the number of bits
};

// REQUIRES: as halved_lattice_of.
DELTACHECK_HD NestedLattice nested_lattice_of(double step, uint32_t halvings) {
  const HalvedLattice halved = halved_lattice_of(step, halvings);
  uint64_t bits;
  memcpy(&bits, &halved.step, sizeof bits);
  const int32_t octave = static_cast<int32_t>(bits >> 52) - 1023;  // floor(log2 step)
  return {halved, static_cast<int32_t>(halvings) - 133 - octave};
}

// The cells that a master of one weight can lie in.
struct NestedCells {
  int32_t bits;   // of a code; 0: no code is needed
  double count;   // 2^bits
  double lowest;  // the number of the first one
  double fits;    // 1, or 0 if there are more than `most_bits`; the count is then 1
};

// A weight that is infinite or NaN gives numbers of no meaning.
DELTACHECK_HD NestedCells nested_cells_of(uint32_t weight, const NestedLattice& lattice, double u,
                                          int32_t most_bits) {
  const int32_t exponent = static_cast<int32_t>((weight >> 7) & 0xffu);
  const int32_t place = exponent > 1 ? exponent : 1, needed = place + lattice.place;
  const int32_t fits = needed <= most_bits ? 1 : 0, positive = needed > 0 ? needed : 0;
  const int32_t bits = positive * fits;
  const double width = double_of(static_cast<uint64_t>(place + 889) << 52);
  const double center = float_of(weight << 16);
  const double lowest = number_of(center - 0.5 * width, lattice.halved, u);
  return {bits, double_of(static_cast<uint64_t>(bits + 1023) << 52), lowest,
          static_cast<double>(fits)};
}

// Returns number modulo 2^bits. REQUIRES: number is an integer.
DELTACHECK_HD double modulo_of_bits(double number, int32_t bits) {
  const double count = double_of(static_cast<uint64_t>(1023 + bits) << 52);
  const double inverse = double_of(static_cast<uint64_t>(1023 - bits) << 52);
  return number - count * floor(number * inverse);
}

// Returns x' of cell q.
DELTACHECK_HD uint32_t nested_value(uint32_t weight, int32_t bits, double q,
                                    const NestedLattice& lattice, double u) {
  const uint32_t exponent = (weight >> 7) & 0xffu, place = exponent > 1 ? exponent : 1;
  const double width = double_of(static_cast<uint64_t>(place + 889) << 52);
  const float center = float_of(weight << 16);
  const float point = static_cast<float>(static_cast<double>(center) + (u - 0.5) * width);
  const float middle = limited(((q + 0.5) * lattice.halved.unscale - u) * lattice.halved.step);
  const uint32_t coded = bits > 0 ? ~0u : 0u;
  const uint32_t from = (coded & bits_of(middle)) | (~coded & bits_of(point));
  const uint32_t moved = in_cell(from, static_cast<uint16_t>(weight));
  const uint32_t finite = is_finite_weight(weight) ? ~0u : 0u;
  return (finite & moved) | (~finite & (weight << 16));
}

namespace {

template <int W>
inline LatticeErrors nested_codes_of(const uint8_t* values, const uint8_t* weights, uint64_t count,
                                     double step, uint64_t seed, uint32_t halvings,
                                     uint32_t spare_bits, uint8_t* codes) {
  const NestedLattice lattice = nested_lattice_of(step, halvings);
  const int32_t most_bits = 8 * W - static_cast<int32_t>(spare_bits);
  const Word<4>::Memory* x = reinterpret_cast<const Word<4>::Memory*>(values);
  const Word<2>::Memory* w = reinterpret_cast<const Word<2>::Memory*>(weights);
  typename Word<W>::Memory* to = reinterpret_cast<typename Word<W>::Memory*>(codes);
  double coded_count = 0, largest = 0;
#pragma omp simd reduction(+ : coded_count) reduction(max : largest)
  for (uint64_t i = 0; i < count; ++i) {
    const uint32_t pattern = x[i], weight = w[i];
    // Numbers in place of conditions: GCC 12 does not vectorise choices between conditions.
    const uint32_t finite =
        ((pattern & kMagnitude) < kInfinity ? 1u : 0u) & is_finite_weight(weight);
    const float value = float_of(finite ? pattern : 0);
    const uint32_t known = finite ? weight : 0;
    const double u = phase(seed, i);
    const NestedCells cells = nested_cells_of(known, lattice, u, most_bits);
    const double coded = cells.fits * static_cast<int32_t>(finite);
    const double last = cells.lowest + (cells.count - 1);
    double q = number_of(value, lattice.halved, u);
    q = q > cells.lowest ? q : cells.lowest;
    q = q < last ? q : last;
    const double rest = coded * modulo_of_bits(q, cells.bits);
    const uint32_t number = static_cast<uint32_t>(static_cast<int32_t>(rest));
    const float restored = float_of(nested_value(known, cells.bits, q, lattice, u));
    const double distance = fabs(static_cast<double>(restored) - static_cast<double>(value));
    const double error = coded * distance;
    largest = error > largest ? error : largest;
    coded_count += coded;
    to[i] = static_cast<typename Word<W>::type>(number << spare_bits);
  }
  return {count - static_cast<uint64_t>(coded_count), largest};
}

template <int W>
inline uint64_t nested_values_of(const uint8_t* codes, const uint8_t* weights, uint64_t count,
                                 double step, uint64_t seed, uint32_t halvings, uint32_t spare_bits,
                                 uint8_t* values) {
  const NestedLattice lattice = nested_lattice_of(step, halvings);
  const int32_t most_bits = 8 * W - static_cast<int32_t>(spare_bits);
  const uint32_t spare = (1u << spare_bits) - 1;
  const typename Word<W>::Memory* from = reinterpret_cast<const typename Word<W>::Memory*>(codes);
  const Word<2>::Memory* w = reinterpret_cast<const Word<2>::Memory*>(weights);
  Word<4>::Memory* to = reinterpret_cast<Word<4>::Memory*>(values);
  double valid_count = 0;
#pragma omp simd reduction(+ : valid_count)
  for (uint64_t i = 0; i < count; ++i) {
    const uint32_t weight = w[i], code = uint32_t{from[i]};
    const double number = static_cast<double>(static_cast<int32_t>(code >> spare_bits));
    const uint32_t is_known = is_finite_weight(weight) & ((code & spare) == 0 ? 1u : 0u);
    const double u = phase(seed, i);
    const NestedCells cells = nested_cells_of(weight, lattice, u, most_bits);
    const double below = number < cells.count ? cells.fits : 0;
    const double valid = below * static_cast<int32_t>(is_known);
    const int32_t bits = valid > 0 ? cells.bits : 0;
    const double q = cells.lowest + modulo_of_bits(number - cells.lowest, bits);
    to[i] = nested_value(weight, bits, q, lattice, u);
    valid_count += valid;
  }
  return count - static_cast<uint64_t>(valid_count);
}

// Codes one part. `values`: float32 at any address. `weights`: bfloat16. `codes`: of `code_bytes`,
// 1 or 2. `step`: after the halvings.
inline LatticeErrors nested_codes_part(const uint8_t* values, const uint8_t* weights,
                                       uint64_t count, double step, uint64_t seed,
                                       uint32_t code_bytes, uint32_t halvings, uint32_t spare_bits,
                                       uint8_t* codes) {
  return code_bytes == 1
             ? nested_codes_of<1>(values, weights, count, step, seed, halvings, spare_bits, codes)
             : nested_codes_of<2>(values, weights, count, step, seed, halvings, spare_bits, codes);
}

// Decodes one part. Returns the number of codes that no value has; their values are drawn from the
// cells of the weights.
inline uint64_t nested_values_part(const uint8_t* codes, const uint8_t* weights, uint64_t count,
                                   double step, uint64_t seed, uint32_t code_bytes,
                                   uint32_t halvings, uint32_t spare_bits, uint8_t* values) {
  return code_bytes == 1
             ? nested_values_of<1>(codes, weights, count, step, seed, halvings, spare_bits, values)
             : nested_values_of<2>(codes, weights, count, step, seed, halvings, spare_bits, values);
}

}  // namespace

}  // namespace deltacheck
