// The statistics of (current, base) as numbers. elements.h has their definition; kernels.cc
// compiles this file once for each instruction set, and delta.cc calls it through kernels.h.
//
// Chunks are processed in blocks, so that all passes but the first find their data in the nearest
// cache. Lanes are held in vectors of the width of the instruction set, as many at a time as there
// are registers. If not all values are finite, which is rare, elements are added one by one. All
// functions have internal linkage, see format.h.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "elements.h"
#include "format.h"
#include "intrinsics.h"

namespace deltacheck {
namespace {

constexpr uint32_t kBlockBytes = 2048;         // bytes of current in a block
constexpr uint32_t kMeasureAheadBytes = 4096;  // prefetch distance in bytes
constexpr uint32_t kVectorLanes = kVectorBytes / sizeof(double);
constexpr uint32_t kVectors = 4;  // of each sum at a time
constexpr uint32_t kPassLanes = kVectors * kVectorLanes;
static_assert(kLanes % kPassLanes == 0);

// The place of a lane in the vectors. Elements of 16 bits share 32-bit words, so their two halves
// go to separate vectors.
template <int W>
constexpr uint32_t place_of(uint32_t lane) {
  if (W != 2) return lane;
  const uint32_t pass = lane / kPassLanes * kPassLanes, pair = lane % kPassLanes / 2;
  return pass + lane % 2 * (kPassLanes / 2) + pair;
}

// The partial sums of a tile, by place.
struct Lanes {
  alignas(64) double squared_difference[kLanes] = {};
  alignas(64) double squared_base[kLanes] = {};
  double largest_difference = 0;
};

// Adds elements one by one, from element `first` of the block on. REQUIRES: the block begins with
// lane 0.
template <Elements kElements>
inline void add_elements(const uint8_t* current, const uint8_t* base, uint32_t first,
                         uint32_t words, Lanes* lanes, uint64_t* nonfinite) {
  constexpr int W = Element<kElements>::kWordBytes;
  using Memory = typename Word<W>::Memory;
  const Memory* c = reinterpret_cast<const Memory*>(current);
  const Memory* b = reinterpret_cast<const Memory*>(base);
  for (uint32_t i = first; i < words; ++i) {
    *nonfinite += !is_finite<kElements>(c[i]);
    if (!is_finite<kElements>(c[i]) || !is_finite<kElements>(b[i])) continue;
    const uint32_t place = place_of<W>(i % kLanes);
    const Number<kElements> value = value_of<kElements>(b[i]),
                            d = value_of<kElements>(c[i]) - value;
    lanes->squared_difference[place] += square(d);
    lanes->squared_base[place] += square(value);
    lanes->largest_difference = std::max<double>(lanes->largest_difference, std::fabs(d));
  }
}

// Loads half of the kPassLanes elements of up to 32 bits at `memory`: vector `v` of them.
template <Elements kElements>
inline Floats load(const uint8_t* memory, uint32_t v) {
  typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
  Bits bits;
  if constexpr (Element<kElements>::kWordBytes == 4) {
    std::memcpy(&bits, memory + v * kVectorBytes, kVectorBytes);
    return reinterpret_cast<Floats>(bits);
  }
  std::memcpy(&bits, memory, kVectorBytes);
  if constexpr (kElements == Elements::kBfloat16) {
    return reinterpret_cast<Floats>(v == 0 ? bits << 16 : bits & 0xffff0000u);
  }
  // Converts as value_of does. The result is not finite if the half is not.
  bits = v == 0 ? bits & 0xffffu : bits >> 16;
  const Bits magnitude = bits & 0x7fffu, subnormal = reinterpret_cast<Bits>(magnitude < 0x400u),
             infinite = reinterpret_cast<Bits>(magnitude >= 0x7c00u);
  const Bits extra = subnormal & (113u << 23),
             sum = (magnitude << 13) + (112u << 23) + (subnormal & (1u << 23));
  const Floats value =
      reinterpret_cast<Floats>(sum | (infinite & 0x7f800000u)) - reinterpret_cast<Floats>(extra);
  return reinterpret_cast<Floats>(reinterpret_cast<Bits>(value) | (bits & 0x8000u) << 16);
}

// Adds `groups` times kLanes elements. If one of them is not finite, neither is a sum. Without
// `kChanged`, current is not read, because it equals base.
template <Elements kElements, bool kChanged>
inline void add_groups(const uint8_t* current, const uint8_t* base, uint32_t groups, Lanes* lanes) {
  constexpr int W = Element<kElements>::kWordBytes;
  using Vector = std::conditional_t<W == 8, Doubles, Floats>;
  using Integer = std::conditional_t<W == 8, int64_t, int32_t>;
  typedef Integer Integers __attribute__((vector_size(kVectorBytes)));
  const Integers magnitude = Integers{} + std::numeric_limits<Integer>::max();
  Integers most{};  // bits of magnitudes, which have the order of their values
  const auto see = [&](Vector d) {
    const Integers size = reinterpret_cast<Integers>(d) & magnitude;
    most = size > most ? size : most;
  };
  for (uint32_t first = 0; first < kLanes; first += kPassLanes) {
    Doubles differences[kVectors], bases[kVectors];
    std::memcpy(differences, lanes->squared_difference + first, sizeof differences);
    std::memcpy(bases, lanes->squared_base + first, sizeof bases);
    for (uint32_t group = 0; group < groups; ++group) {
      const uint8_t* c = current + (group * kLanes + first) * W;
      const uint8_t* b = base + (group * kLanes + first) * W;
      if (first == 0) {
        for (uint32_t line = 0; line < kLanes * W; line += 64) {
          __builtin_prefetch(c + kMeasureAheadBytes + line, 0, 3);
          __builtin_prefetch(b + kMeasureAheadBytes + line, 0, 3);
        }
      }
      if constexpr (W == 8) {
        for (uint32_t v = 0; v < kVectors; ++v) {
          Doubles value, d;
          std::memcpy(&value, b + v * kVectorBytes, kVectorBytes);
          bases[v] += value * value;
          if (!kChanged) continue;
          std::memcpy(&d, c + v * kVectorBytes, kVectorBytes);
          d -= value;
          differences[v] += d * d;
          see(d);
        }
      } else {
        for (uint32_t v = 0; v < kVectors / 2; ++v) {
          const Floats value = load<kElements>(b, v);
          bases[2 * v] = with_square(bases[2 * v], widened<0>(value));
          bases[2 * v + 1] = with_square(bases[2 * v + 1], widened<1>(value));
          if (!kChanged) continue;
          const Floats d = load<kElements>(c, v) - value;
          differences[2 * v] = with_square(differences[2 * v], widened<0>(d));
          differences[2 * v + 1] = with_square(differences[2 * v + 1], widened<1>(d));
          see(d);
        }
      }
    }
    std::memcpy(lanes->squared_difference + first, differences, sizeof differences);
    std::memcpy(lanes->squared_base + first, bases, sizeof bases);
  }
  const Vector largest = reinterpret_cast<Vector>(most);
  for (uint32_t i = 0; i < kVectorBytes / sizeof largest[0]; ++i) {
    lanes->largest_difference = std::max<double>(lanes->largest_difference, largest[i]);
  }
}

template <int W>
inline double added_in_halves(const double* places) {
  double lanes[kLanes];
  for (uint32_t i = 0; i < kLanes; ++i) lanes[i] = places[place_of<W>(i)];
  for (uint32_t half = kLanes / 2; half > 0; half /= 2) {
    for (uint32_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// Sums of squares never decrease, so a sum that is not finite stays so.
inline bool all_finite(const Lanes& lanes) {
  Doubles any{};
  for (uint32_t first = 0; first < kLanes; first += kVectorLanes) {
    Doubles differences, bases;
    std::memcpy(&differences, lanes.squared_difference + first, sizeof differences);
    std::memcpy(&bases, lanes.squared_base + first, sizeof bases);
    any += differences + bases;
  }
  double sum = 0;
  for (uint32_t i = 0; i < kVectorLanes; ++i) sum += any[i];
  return std::isfinite(sum);
}

template <int W>
inline uint32_t count_differing(const uint8_t* current, const uint8_t* base, uint32_t words) {
  using Memory = typename Word<W>::Memory;
  uint32_t count = 0, i = 0;
  for (; i + 64 <= words; i += 64) {
    count +=
        static_cast<uint32_t>(__builtin_popcountll(differing64<W>(current + i * W, base + i * W)));
  }
  const Memory* c = reinterpret_cast<const Memory*>(current);
  const Memory* b = reinterpret_cast<const Memory*>(base);
  for (; i < words; ++i) count += c[i] != b[i];
  return count;
}

// Adds a block. Values that are not finite are detected afterwards, from the sums, and the block is
// then added again element by element. The common case so needs no test per element.
template <Elements kElements>
inline void add_block(const uint8_t* current, const uint8_t* base, uint32_t words, bool changed,
                      Lanes* lanes, uint64_t* nonfinite) {
  const Lanes before = *lanes;
  const uint32_t groups = words / kLanes;
  if (changed)
    add_groups<kElements, true>(current, base, groups, lanes);
  else
    add_groups<kElements, false>(current, base, groups, lanes);
  const bool finite = all_finite(*lanes);
  if (!finite) *lanes = before;
  add_elements<kElements>(current, base, finite ? groups * kLanes : 0, words, lanes, nonfinite);
}

// Returns the statistics of at most one span. REQUIRES: words <= kSpanTiles * kTileWords.
template <Elements kElements>
inline Statistics span_statistics(const uint8_t* current, const uint8_t* base, uint32_t words) {
  constexpr int W = Element<kElements>::kWordBytes;
  constexpr uint32_t kBlock = kBlockBytes / W;
  static_assert(kBlock % kLanes == 0 && kTileWords<W> % kBlock == 0);
  Statistics sum{};
  for (uint32_t tile = 0; tile < words; tile += kTileWords<W>) {
    const uint32_t end = words - tile < kTileWords<W> ? words : tile + kTileWords<W>;
    Lanes lanes;
    for (uint32_t start = tile; start < end; start += kBlock) {
      const uint8_t* c = current + start * W;
      const uint8_t* b = base + start * W;
      const uint32_t size = end - start < kBlock ? end - start : kBlock;
      const uint32_t changed = count_differing<W>(c, b, size);
      sum.changed += changed;
      if constexpr (Element<kElements>::kNumbers) {
        add_block<kElements>(c, b, size, changed != 0, &lanes, &sum.nonfinite);
      }
    }
    if constexpr (Element<kElements>::kNumbers) {
      sum.squared_difference += added_in_halves<W>(lanes.squared_difference);
      sum.squared_base += added_in_halves<W>(lanes.squared_base);
      sum.largest_difference = std::max(sum.largest_difference, lanes.largest_difference);
    }
  }
  return sum;
}

}  // namespace
}  // namespace deltacheck
