// The law of Adam: the prediction of a step's weight, m and v from the step before and what is
// stored of the gradient. Part of the format: docs/reference/format.md, 4.6. Called through
// kernels.h.
//
// A wrong prediction costs bytes and never bits, but a decoder must compute the prediction of its
// encoder: float operations are rounded to nearest in the order of the source, none is contracted
// unless it is written as fused(), and every NaN has one bit pattern. The loops are written so that
// compilers vectorise them.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "format.h"
#include "lattice.h"

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

namespace {

// Elements that stay in the cache from loop to loop.
constexpr uint64_t kLawPart = 4096;

// Returns a * b + c, rounded once. Without an instruction for it: the product is exact in double,
// and the sum is rounded to odd before it is rounded to float (Boldo and Melquiond, "Emulation of
// FMA and correctly rounded sums", 2008).
inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
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
inline uint32_t canonical(float value) { return value == value ? bits_of(value) : 0x7fc00000u; }

template <uint32_t F>
inline float mean_of(const AdamLaw& law, float m, float g) {
  const float b = law.beta1, c = law.rest1;
  if (F == 0) return m + c * (g - m);
  if (F == 1) return fused(g - m, c, m);
  if (F == 2) return b * m + c * g;
  if (F == 3) return fused(g, c, b * m);
  return fused(m, b, c * g);
}

template <uint32_t F>
inline float square_of(const AdamLaw& law, float v, float g) {
  const float b = law.beta2, c = law.rest2;
  if (F == 0) return b * v + (c * g) * g;
  if (F == 1) return fused(c * g, g, b * v);
  if (F == 2) return b * v + c * (g * g);
  if (F == 3) return fused(g * g, c, b * v);
  return fused(v, b, c * (g * g));
}

// Returns m / (sqrt(v) + eps), 0 where that is not finite, as for elements without updates.
inline float direction_of(const AdamLaw& law, float m, float v) {
  const float direction = m / (std::sqrt(v) + law.eps);
  return direction - direction == 0 ? direction : 0.0f;
}

template <uint32_t F>
inline float weight_of(const AdamLaw& law, float w, float update) {
  if (F == 0) return w * law.keep + update;
  return w + (update + law.pull * w);
}

inline float gradient_of(const AdamLaw& law, float before, float now) {
  return (now - law.beta1 * before) * law.inverse1;
}

// Returns a stored bfloat16 gradient as it was after clipping.
inline float clipped(const AdamLaw& law, uint32_t gradient) {
  return float_of(gradient << 16) * law.scale;
}

using FloatWords = Word<4>::Memory;
using HalfWords = Word<2>::Memory;

// Writes the bfloat16 gradients that lead from one m to the next, if there are such.
inline void law_gradients_part(const AdamLaw& given, uint64_t count, const uint8_t* before,
                               const uint8_t* now, uint8_t* gradients) {
  const AdamLaw law = given;
  const FloatWords *m0 = reinterpret_cast<const FloatWords*>(before),
                   *m = reinterpret_cast<const FloatWords*>(now);
  HalfWords* g = reinterpret_cast<HalfWords*>(gradients);
#pragma omp simd
  for (uint64_t i = 0; i < count; ++i) {
    const uint32_t word =
        canonical(gradient_of(law, float_of(m0[i]), float_of(m[i])) * law.unscale);
    g[i] = static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
  }
}

template <uint32_t F>
inline void law_means(const AdamLaw& law, uint64_t count, const FloatWords* m0, const HalfWords* g,
                      FloatWords* m) {
#pragma omp simd
  for (uint64_t i = 0; i < count; ++i)
    m[i] = canonical(mean_of<F>(law, float_of(m0[i]), clipped(law, g[i])));
}

template <uint32_t F>
inline void law_squares(const AdamLaw& law, uint64_t count, const FloatWords* v0,
                        const HalfWords* g, const FloatWords* m0, const FloatWords* m,
                        FloatWords* v) {
  if (g != nullptr) {
#pragma omp simd
    for (uint64_t i = 0; i < count; ++i)
      v[i] = canonical(square_of<F>(law, float_of(v0[i]), clipped(law, g[i])));
    return;
  }
#pragma omp simd
  for (uint64_t i = 0; i < count; ++i) {
    const float gradient = gradient_of(law, float_of(m0[i]), float_of(m[i]));
    v[i] = canonical(square_of<F>(law, float_of(v0[i]), gradient));
  }
}

template <uint32_t F>
inline void law_weights(const AdamLaw& law, uint64_t count, const FloatWords* w0,
                        const FloatWords* m, const FloatWords* v, FloatWords* w) {
#pragma omp simd
  for (uint64_t i = 0; i < count; ++i) {
    const float update = law.rate * direction_of(law, float_of(m[i]), float_of(v[i]));
    w[i] = canonical(weight_of<F>(law, float_of(w0[i]), update));
  }
}

// The same after several steps, with the direction at the step before.
template <uint32_t F>
inline void law_later_weights(const AdamLaw& law, uint64_t count, const FloatWords* w0,
                              const FloatWords* m0, const FloatWords* v0, const FloatWords* m,
                              const FloatWords* v, FloatWords* w) {
#pragma omp simd
  for (uint64_t i = 0; i < count; ++i) {
    const float update = law.rate * direction_of(law, float_of(m[i]), float_of(v[i])) +
                         law.earlier * direction_of(law, float_of(m0[i]), float_of(v0[i]));
    w[i] = canonical(weight_of<F>(law, float_of(w0[i]), update));
  }
}

#define DELTACHECK_FOR_FORM(form, function, ...) \
  switch (form) {                                \
    case 0:                                      \
      function<0>(__VA_ARGS__);                  \
      break;                                     \
    case 1:                                      \
      function<1>(__VA_ARGS__);                  \
      break;                                     \
    case 2:                                      \
      function<2>(__VA_ARGS__);                  \
      break;                                     \
    case 3:                                      \
      function<3>(__VA_ARGS__);                  \
      break;                                     \
    default:                                     \
      function<4>(__VA_ARGS__);                  \
  }

// Writes the prediction of one step. `base` and `prediction` have three parts of `count` elements:
// weight, m, v. With `gradients`, all of the prediction is written; without them, it has m already.
inline void law_step_part(const AdamLaw& given, uint64_t count, const uint8_t* base,
                          const uint8_t* gradients, uint8_t* prediction) {
  const AdamLaw law = given;
  const FloatWords* from = reinterpret_cast<const FloatWords*>(base);
  FloatWords* to = reinterpret_cast<FloatWords*>(prediction);
  for (uint64_t at = 0; at < count; at += kLawPart) {
    const uint64_t size = count - at < kLawPart ? count - at : kLawPart;
    const FloatWords *w0 = from + at, *m0 = w0 + count, *v0 = m0 + count;
    FloatWords *w = to + at, *m = w + count, *v = m + count;
    const HalfWords* g =
        gradients == nullptr ? nullptr : reinterpret_cast<const HalfWords*>(gradients) + at;
    if (g != nullptr) DELTACHECK_FOR_FORM(law.mean, law_means, law, size, m0, g, m)
    DELTACHECK_FOR_FORM(law.square, law_squares, law, size, v0, g, m0, m, v)
    if (law.weight == 0)
      law_weights<0>(law, size, w0, m, v, w);
    else
      law_weights<1>(law, size, w0, m, v, w);
  }
}

// Writes beta2 times v, the prediction of v after several steps.
inline void law_squares_part(const AdamLaw& given, uint64_t count, const uint8_t* before,
                             uint8_t* prediction) {
  const float factor = given.beta2;
  const FloatWords* v0 = reinterpret_cast<const FloatWords*>(before);
  FloatWords* v = reinterpret_cast<FloatWords*>(prediction);
#pragma omp simd
  for (uint64_t i = 0; i < count; ++i) v[i] = canonical(factor * float_of(v0[i]));
}

// Writes the prediction of the weights after several steps. `now` has m and v behind its weights.
inline void law_weights_part(const AdamLaw& given, uint64_t count, const uint8_t* base,
                             const uint8_t* now, uint8_t* prediction) {
  const AdamLaw law = given;
  const FloatWords *w0 = reinterpret_cast<const FloatWords*>(base), *m0 = w0 + count,
                   *v0 = m0 + count;
  const FloatWords *m = reinterpret_cast<const FloatWords*>(now) + count, *v = m + count;
  FloatWords* w = reinterpret_cast<FloatWords*>(prediction);
  if (law.weight == 0)
    law_later_weights<0>(law, count, w0, m0, v0, m, v, w);
  else
    law_later_weights<1>(law, count, w0, m0, v0, m, v, w);
}

}  // namespace
}  // namespace deltacheck
