// The law of Adam (adam.h) for parts of a chunk. Called through kernels.h. The loops are written so
// that compilers vectorise them. All functions have internal linkage, see format.h.

#pragma once

#include <cstdint>

#include "adam.h"

namespace deltacheck {
namespace {

// Elements that stay in the cache from loop to loop.
constexpr uint64_t kLawPart = 4096;

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
  for (uint64_t i = 0; i < count; ++i)
    g[i] = short_gradient_of(law, float_of(m0[i]), float_of(m[i]));
}

template <uint32_t F>
inline void law_means(const AdamLaw& law, uint64_t count, const FloatWords* m0, const HalfWords* g,
                      FloatWords* m) {
#pragma omp simd
  for (uint64_t i = 0; i < count; ++i)
    m[i] = canonical(mean_of(F, law, float_of(m0[i]), clipped(law, g[i])));
}

template <uint32_t F>
inline void law_squares(const AdamLaw& law, uint64_t count, const FloatWords* v0,
                        const HalfWords* g, const FloatWords* m0, const FloatWords* m,
                        FloatWords* v) {
  if (g != nullptr) {
#pragma omp simd
    for (uint64_t i = 0; i < count; ++i)
      v[i] = canonical(square_of(F, law, float_of(v0[i]), clipped(law, g[i])));
    return;
  }
#pragma omp simd
  for (uint64_t i = 0; i < count; ++i) {
    const float gradient = gradient_of(law, float_of(m0[i]), float_of(m[i]));
    v[i] = canonical(square_of(F, law, float_of(v0[i]), gradient));
  }
}

template <uint32_t F>
inline void law_weights(const AdamLaw& law, uint64_t count, const FloatWords* w0,
                        const FloatWords* m, const FloatWords* v, FloatWords* w) {
#pragma omp simd
  for (uint64_t i = 0; i < count; ++i) {
    const float update = update_of(law, float_of(m[i]), float_of(v[i]));
    w[i] = canonical(weight_of(F, law, float_of(w0[i]), update));
  }
}

// The same after several steps, with the direction at the step before.
template <uint32_t F>
inline void law_later_weights(const AdamLaw& law, uint64_t count, const FloatWords* w0,
                              const FloatWords* m0, const FloatWords* v0, const FloatWords* m,
                              const FloatWords* v, FloatWords* w) {
#pragma omp simd
  for (uint64_t i = 0; i < count; ++i) {
    const float update =
        later_update_of(law, float_of(m0[i]), float_of(v0[i]), float_of(m[i]), float_of(v[i]));
    w[i] = canonical(weight_of(F, law, float_of(w0[i]), update));
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
