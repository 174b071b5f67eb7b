// Codes of first moments as multiples of a part of the root of their second moments. An optimizer
// of the Adam family moves a weight by m / sqrt(v) learning rates, so equal steps of the codes are
// equal steps of the update.
//
// Part of the format: docs/reference/format.md, 4.5.4. Called through kernels.h. The rules of
// lattice.h hold here too: double arithmetic in the order of the source, so the bits are the same
// on every processor. The loops are written so that compilers vectorise them.

#pragma once

#include <cmath>
#include <cstdint>

#include "format.h"
#include "lattice.h"

namespace deltacheck {

// The second moments that have codes beside them: positive, finite and normal.
constexpr uint32_t kLeastVariance = 1u << 23;
constexpr double kMostRatio = 127;
// First moments beside smaller second moments are coded as zero if they are below this.
constexpr double kLeastMoment = 0x1p-60;

// The numbers that determine the values of codes.
struct RatioForm {
  double step;  // the spacing, in units of the root: 2^-32 to 2^32
  double most;  // the largest magnitude of a value, in the same units; infinity without a limit
};

// Returns the root of a second moment, 1 if it has no codes.
DELTACHECK_HD double root_of(uint32_t variance, bool has_codes) {
  return sqrt(static_cast<double>(float_of(has_codes ? variance : 0x3f800000u)));
}

DELTACHECK_HD bool has_ratios(uint32_t variance) {
  return variance - kLeastVariance < kInfinity - kLeastVariance;
}

// Returns x' of a code.
DELTACHECK_HD float ratio_value(double code, double root, const RatioForm& form) {
  const double bound = form.most * root;
  double value = (code * form.step) * root;
  value = value < bound ? value : bound;
  value = value > -bound ? value : -bound;
  return static_cast<float>(value);
}

// The errors of coding, x being a value and x' its code's value.
struct RatioErrors {
  uint64_t refused;  // values that are infinite, NaN or too large; their code is 0
  double largest;    // |x' - x| over the root of the second moment, of the others that have one
};

namespace {

inline RatioErrors ratio_codes_part(const uint8_t* values, const uint8_t* variances, uint64_t count,
                                    const RatioForm& given, uint8_t* codes) {
  const RatioForm form = given;
  const Word<4>::Memory* x = reinterpret_cast<const Word<4>::Memory*>(values);
  const Word<4>::Memory* v = reinterpret_cast<const Word<4>::Memory*>(variances);
  double coded_count = 0, largest = 0;
#pragma omp simd reduction(+ : coded_count) reduction(max : largest)
  for (uint64_t i = 0; i < count; ++i) {
    const uint32_t bits = x[i], variance = v[i];
    const bool finite = (bits & kMagnitude) < kInfinity, visible = has_ratios(variance);
    const double value = float_of(finite ? bits : 0), root = root_of(variance, visible);
    double ratio = value / (form.step * root);
    // Numbers that are too large stay so, and the sum below is exact.
    ratio = ratio < kMostRatio + 1 ? ratio : kMostRatio + 1;
    ratio = ratio > -(kMostRatio + 1) ? ratio : -(kMostRatio + 1);
    const double nearest = (ratio + 0x1.8p52) - 0x1.8p52;  // ties to even
    const bool fits = visible ? fabs(nearest) <= kMostRatio : fabs(value) < kLeastMoment;
    const double coded = (finite & fits) ? 1.0 : 0.0;
    const double code = (finite & fits & visible) ? nearest : 0;
    const double error = fabs(static_cast<double>(ratio_value(code, root, form)) - value) / root;
    const double counted = (finite & fits & visible) ? error : 0;
    largest = counted > largest ? counted : largest;
    coded_count += coded;
    codes[i] = static_cast<uint8_t>(static_cast<int32_t>(code));
  }
  return {count - static_cast<uint64_t>(coded_count), largest};
}

// Returns the number of codes that no value has; they become 0.
inline uint64_t ratio_values_part(const uint8_t* codes, const uint8_t* variances, uint64_t count,
                                  const RatioForm& given, uint8_t* values) {
  const RatioForm form = given;
  const Word<4>::Memory* v = reinterpret_cast<const Word<4>::Memory*>(variances);
  Word<4>::Memory* to = reinterpret_cast<Word<4>::Memory*>(values);
  uint64_t bad = 0;
  for (uint64_t start = 0; start < count; start += kPartValues) {
    const uint32_t size =
        static_cast<uint32_t>(count - start < kPartValues ? count - start : kPartValues);
    uint32_t bad_here = 0;
#pragma omp simd reduction(+ : bad_here)
    for (uint32_t i = 0; i < size; ++i) {
      const int32_t code = static_cast<int8_t>(codes[start + i]);
      const uint32_t variance = v[start + i];
      const bool visible = has_ratios(variance), valid = visible & (code != -128);
      bad_here += !valid & (code != 0);
      const double known = valid ? code : 0;
      to[start + i] = bits_of(ratio_value(known, root_of(variance, visible), form) + 0.0f);
    }
    bad += bad_here;
  }
  return bad;
}

}  // namespace
}  // namespace deltacheck
