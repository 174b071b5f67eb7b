// The law of Adam for one element: the prediction of a step's weight, m and v from the step before
// and what is stored of the gradient. Part of the format: docs/reference/format.md, 4.6. Host and
// device code include this file.
//
// A wrong prediction costs bytes and never bits, but a decoder must compute the prediction of its
// encoder: float operations are rounded to nearest in the order of the source, none is contracted
// unless it is written as fused(), and every NaN has one bit pattern. CMakeLists.txt turns
// contraction off for host and device.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "format.h"

namespace deltacheck {

// The stream law of a chunk, as it stands in memory.
struct AdamLaw {
  uint32_t mean, square, weight;  // forms
  uint32_t reserved;              // 0
  float beta1, rest1, inverse1;   // of m: b1, 1 - b1, 1 / (1 - b1)
  float beta2, rest2;             // of v
  float eps, rate, earlier;       // of the update: its divisor, and the factors of two directions
  float keep, pull;               // of the decay: as a factor, as a summand
  float scale, unscale;           // of clipped gradients, and its inverse
};
static_assert(sizeof(AdamLaw) == kLawBytes);

constexpr uint32_t kMeanForms = 5, kSquareForms = 5, kWeightForms = 2;

DELTACHECK_HD bool is_known(const AdamLaw& law) {
  return law.mean < kMeanForms && law.square < kSquareForms && law.weight < kWeightForms &&
         law.reserved == 0;
}

// Returns a * b + c, rounded once. Without an instruction for it: the product is exact in double,
// and the sum is rounded to odd before it is rounded to float (Boldo and Melquiond, "Emulation of
// FMA and correctly rounded sums", 2008).
DELTACHECK_HD float fused(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#elif defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  const double product = static_cast<double>(a) * b, addend = c, total = product + addend;
  const double back = total - product, error = (product - (total - back)) + (addend - back);
  int64_t bits;
  std::memcpy(&bits, &total, sizeof bits);
  const bool inexact = error != 0 && total - total == 0;
  const int64_t towards = (error > 0) == (total > 0) ? 1 : -1;
  bits += inexact && (bits & 1) == 0 ? towards : 0;
  double odd;
  std::memcpy(&odd, &bits, sizeof odd);
  return static_cast<float>(odd);
#endif
}

// Returns the bits of a value; of every NaN the same, because processors make different ones.
DELTACHECK_HD uint32_t canonical(float value) {
  return value == value ? bits_of(value) : 0x7fc00000u;
}

// Returns the next m. `form`: that of the law; a constant where a loop is to be vectorised.
DELTACHECK_HD float mean_of(uint32_t form, const AdamLaw& law, float m, float g) {
  const float b = law.beta1, c = law.rest1;
  if (form == 0) return m + c * (g - m);
  if (form == 1) return fused(g - m, c, m);
  if (form == 2) return b * m + c * g;
  if (form == 3) return fused(g, c, b * m);
  return fused(m, b, c * g);
}

// Returns the next v. `form`: that of the law; a constant where a loop is to be vectorised.
DELTACHECK_HD float square_of(uint32_t form, const AdamLaw& law, float v, float g) {
  const float b = law.beta2, c = law.rest2;
  if (form == 0) return b * v + (c * g) * g;
  if (form == 1) return fused(c * g, g, b * v);
  if (form == 2) return b * v + c * (g * g);
  if (form == 3) return fused(g * g, c, b * v);
  return fused(v, b, c * (g * g));
}

// Returns m / (sqrt(v) + eps), 0 where that is not finite, as for elements without updates.
DELTACHECK_HD float direction_of(const AdamLaw& law, float m, float v) {
  const float direction = m / (std::sqrt(v) + law.eps);
  return direction - direction == 0 ? direction : 0.0f;
}

// Returns the next weight.
DELTACHECK_HD float weight_of(uint32_t form, const AdamLaw& law, float w, float update) {
  if (form == 0) return w * law.keep + update;
  return w + (update + law.pull * w);
}

DELTACHECK_HD float gradient_of(const AdamLaw& law, float before, float now) {
  return (now - law.beta1 * before) * law.inverse1;
}

// Returns the bfloat16 gradient that leads from one m to the next, if there is one.
DELTACHECK_HD uint16_t short_gradient_of(const AdamLaw& law, float before, float now) {
  const uint32_t word = canonical(gradient_of(law, before, now) * law.unscale);
  return static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

// Returns a stored bfloat16 gradient as it was after clipping.
DELTACHECK_HD float clipped(const AdamLaw& law, uint32_t gradient) {
  return float_of(gradient << 16) * law.scale;
}

// Returns what an update adds to a weight, without its decay.
DELTACHECK_HD float update_of(const AdamLaw& law, float m, float v) {
  return law.rate * direction_of(law, m, v);
}

// Returns the same of several steps, with the direction at the step before.
DELTACHECK_HD float later_update_of(const AdamLaw& law, float m0, float v0, float m, float v) {
  return update_of(law, m, v) + law.earlier * direction_of(law, m0, v0);
}

}  // namespace deltacheck
