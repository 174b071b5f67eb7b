// The laws of adam_law.py as loops that compilers vectorise, to time them and to compare their bits
// between instruction sets. `benchmarks/law.py` compiles this file, once for each instruction set,
// with -ffp-contract=off: no product and sum are fused unless the source says so.

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef LAW_MAIN
#  include <cstdio>
#  include <vector>
#endif

namespace {

struct Law {
  int32_t mean, square, weight;  // positions of the forms in adam_law.py
  float beta1, rest1, inverse1, beta2, rest2, eps, rate, keep, pull, scale, unscale;
};

// Returns a * b + c, rounded once. Without an instruction for it: the product is exact in double,
// and the sum is rounded to odd before it is rounded to float (Boldo and Melquiond, 2008).
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

// Returns a value with one bit pattern for every NaN: processors make different ones.
inline float same(float value) {
  const uint32_t nan = 0x7fc00000;
  float canonical;
  std::memcpy(&canonical, &nan, sizeof canonical);
  return value == value ? value : canonical;
}

template <int F>
inline float mean_of(const Law& law, float m, float g) {
  const float b = law.beta1, c = law.rest1;
  if (F == 0) return m + c * (g - m);
  if (F == 1) return fused(g - m, c, m);
  if (F == 2) return b * m + c * g;
  if (F == 3) return fused(g, c, b * m);
  return fused(m, b, c * g);
}

template <int F>
inline float square_of(const Law& law, float v, float g) {
  const float b = law.beta2, c = law.rest2;
  if (F == 0) return b * v + (c * g) * g;
  if (F == 1) return fused(c * g, g, b * v);
  if (F == 2) return b * v + c * (g * g);
  if (F == 3) return fused(g * g, c, b * v);
  return fused(v, b, c * (g * g));
}

template <int F>
inline float weight_of(const Law& law, float w, float m, float v) {
  const float direction = m / (std::sqrt(v) + law.eps);
  // An element that was never updated has no direction.
  const float u = law.rate * (direction - direction == 0 ? direction : 0.0f);
  if (F == 0) return w * law.keep + u;
  return w + (u + law.pull * w);
}

inline float wide(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// Rounds to the nearest bfloat16, ties to even. NaN is left to the exceptions.
inline uint16_t narrow(float value) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  return static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

constexpr int64_t kPart = 4096;  // elements that stay in the cache between the loops

void gradients(const Law& law, int64_t n, const float* m0, const float* m, uint16_t* g) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    g[i] = narrow(same((m[i] - law.beta1 * m0[i]) * law.inverse1 * law.unscale));
  }
}

template <int M>
void means(const Law& law, int64_t n, const float* m0, const uint16_t* g, float* m) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) m[i] = same(mean_of<M>(law, m0[i], wide(g[i]) * law.scale));
}

template <int S>
void squares(const Law& law, int64_t n, const float* v0, const uint16_t* g, const float* m0,
             const float* m, float* v) {
  if (g != nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) v[i] = same(square_of<S>(law, v0[i], wide(g[i]) * law.scale));
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      v[i] = same(square_of<S>(law, v0[i], (m[i] - law.beta1 * m0[i]) * law.inverse1));
    }
  }
}

template <int W>
void weights(const Law& law, int64_t n, const float* w0, const float* m, const float* v, float* w) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) w[i] = same(weight_of<W>(law, w0[i], m[i], v[i]));
}

#define FOR_FORM(form, function, ...) \
  switch (form) {                     \
    case 0:                           \
      function<0>(__VA_ARGS__);       \
      break;                          \
    case 1:                           \
      function<1>(__VA_ARGS__);       \
      break;                          \
    case 2:                           \
      function<2>(__VA_ARGS__);       \
      break;                          \
    case 3:                           \
      function<3>(__VA_ARGS__);       \
      break;                          \
    default:                          \
      function<4>(__VA_ARGS__);       \
  }

}  // namespace

// Computes the bfloat16 gradients, for an encoder.
extern "C" void law_gradients(const Law* law, int64_t n, const float* m0, const float* m,
                              uint16_t* g) {
  gradients(*law, n, m0, m, g);
}

// Computes m (if there are gradients), v and the weight, part by part, as a decoder does.
extern "C" void law_predict(const Law* law, int64_t n, const float* w0, const float* m0,
                            const float* v0, const uint16_t* g, float* m, float* v, float* w) {
  for (int64_t at = 0; at < n; at += kPart) {
    const int64_t size = n - at < kPart ? n - at : kPart;
    const uint16_t* part = g == nullptr ? nullptr : g + at;
    if (part != nullptr) FOR_FORM(law->mean, means, *law, size, m0 + at, part, m + at)
    FOR_FORM(law->square, squares, *law, size, v0 + at, part, m0 + at, m + at, v + at)
    if (law->weight == 0) {
      weights<0>(*law, size, w0 + at, m + at, v + at, w + at);
    } else {
      weights<1>(*law, size, w0 + at, m + at, v + at, w + at);
    }
  }
}

#ifdef LAW_MAIN
// Prints a hash of the results of all forms, on numbers of every class, so that programs for other
// processors can be compared.
int main() {
  constexpr int64_t kCount = 1 << 16;
  uint64_t state = 1, hash = 1469598103934665603u;
  const auto next = [&state] {  // splitmix64
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  };
  const auto add = [&hash](const void* data, size_t size) {
    for (size_t i = 0; i < size; ++i)
      hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211u;
  };
  std::vector<uint32_t> words[4];
  for (std::vector<uint32_t>& array : words) {
    for (int64_t i = 0; i < kCount; ++i) {
      const uint32_t word = static_cast<uint32_t>(next());
      // Half of them are of usual sizes: 2^-20 to 2^11. The others are any bits: subnormals, NaN.
      array.push_back(i % 2 ? word : (word & 0x81ffffff) | ((107 + word % 32) << 23 & 0x7f800000));
    }
  }
  std::vector<float> in[4], m(kCount), v(kCount), w(kCount);
  for (int k = 0; k < 4; ++k) {
    in[k].resize(kCount);
    std::memcpy(in[k].data(), words[k].data(), sizeof(float) * kCount);
  }
  std::vector<uint16_t> g(kCount);
  Law law{0,      0,     0,      0.9f,    0.1f,   10.0f, 0.999f,
          0.001f, 1e-9f, -1e-3f, 0.9999f, -1e-4f, 0.7f,  1 / 0.7f};
  for (law.mean = 0; law.mean < 5; ++law.mean) {
    for (law.square = 0; law.square < 5; ++law.square) {
      for (law.weight = 0; law.weight < 2; ++law.weight) {
        for (const bool narrow : {true, false}) {
          std::memcpy(m.data(), in[3].data(), sizeof(float) * kCount);
          if (narrow) law_gradients(&law, kCount, in[1].data(), m.data(), g.data());
          law_predict(&law, kCount, in[0].data(), in[1].data(), in[2].data(),
                      narrow ? g.data() : nullptr, m.data(), v.data(), w.data());
          for (const std::vector<float>& out : {m, v, w}) add(out.data(), sizeof(float) * kCount);
          if (narrow) add(g.data(), sizeof(uint16_t) * kCount);
        }
      }
    }
  }
  std::printf("%016llx\n", static_cast<unsigned long long>(hash));
}
#endif
