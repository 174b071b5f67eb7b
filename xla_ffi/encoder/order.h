// The order of ordered chunks (docs/reference/format.md, 4.1): words of 2 bytes by the class of
// their base, which is the exponent of a bfloat16. Small weights change more often than large ones,
// and by more units. So words of one class have one density of changes, and neighbours in this
// order compress better.

#pragma once

#include <cstdint>

#include "format.h"

namespace deltacheck {

constexpr int kOrderedWordBytes = 2;

// Calls `work` with each word's position in the order of a chunk. The word of number i has the base
// `base_of(i)`. Quarters of the chunk take turns, because a counter that is incremented twice in a
// row waits for the first store.
template <typename BaseOf, typename Work>
inline void for_each_in_order(uint64_t words, const BaseOf& base_of, const Work& work) {
  constexpr uint32_t kClasses = 256, kQuarters = 4;
  const auto class_of = [&](uint64_t i) { return base_of(i) >> 7 & 0xff; };
  const uint64_t quarter = words / kQuarters;
  uint32_t next[kQuarters][kClasses] = {};
  for (uint64_t i = 0; i < quarter; ++i) {
    for (uint32_t k = 0; k < kQuarters; ++k) ++next[k][class_of(k * quarter + i)];
  }
  // Those behind the last quarter belong to it.
  for (uint64_t i = kQuarters * quarter; i < words; ++i) ++next[kQuarters - 1][class_of(i)];
  uint32_t place = 0;
  for (uint32_t c = 0; c < kClasses; ++c) {
    for (uint32_t k = 0; k < kQuarters; ++k) {
      const uint32_t count = next[k][c];
      next[k][c] = place;
      place += count;
    }
  }
  for (uint64_t i = 0; i < quarter; ++i) {
    for (uint32_t k = 0; k < kQuarters; ++k) {
      const uint64_t word = k * quarter + i;
      work(word, next[k][class_of(word)]++);
    }
  }
  for (uint64_t i = kQuarters * quarter; i < words; ++i)
    work(i, next[kQuarters - 1][class_of(i)]++);
}

// Writes the differences of a chunk in the order of its words, and makes the base equal to it.
inline void take_differences(const uint8_t* current, uint8_t* base, uint64_t words,
                             uint8_t* differences) {
  using Memory = Word<kOrderedWordBytes>::Memory;
  Memory* const out = reinterpret_cast<Memory*>(differences);
  Memory* const before = reinterpret_cast<Memory*>(base);
  const Memory* const now = reinterpret_cast<const Memory*>(current);
  for_each_in_order(
      words, [&](uint64_t i) { return before[i]; },
      [&](uint64_t i, uint32_t place) {
        const uint16_t word = now[i];
        out[place] = static_cast<uint16_t>(word - before[i]);
        before[i] = word;
      });
}

// The inverse: adds differences in the order of the words to a base.
inline void add_differences(const uint8_t* differences, uint8_t* base, uint64_t words) {
  using Memory = Word<kOrderedWordBytes>::Memory;
  const Memory* const added = reinterpret_cast<const Memory*>(differences);
  Memory* const before = reinterpret_cast<Memory*>(base);
  for_each_in_order(
      words, [&](uint64_t i) { return before[i]; },
      [&](uint64_t i, uint32_t place) {
        before[i] = static_cast<uint16_t>(before[i] + added[place]);
      });
}

}  // namespace deltacheck
