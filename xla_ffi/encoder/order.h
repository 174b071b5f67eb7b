// The order of ordered chunks (docs/reference/format.md, 4.1): words of 2 bytes by the class of
// their base, which is the exponent of a bfloat16. Small weights change more often than large ones,
// and by more units. So words of one class have one density of changes, and neighbours in this
// order compress better.

#pragma once

#include <algorithm>
#include <array>
#include <bitset>
#include <cstdint>
#include <vector>

#ifdef __SSE2__
#  include <emmintrin.h>
#endif

#include "format.h"

namespace deltacheck {

constexpr int kOrderedWordBytes = 2;

constexpr uint32_t kClasses = 256, kClassBits = 0x7f80;
// Quarters of a chunk take turns, because a counter that is incremented twice in a row waits for
// the first store.
constexpr uint32_t kQuarters = 4;

inline uint32_t class_of_word(uint16_t word) { return (word & kClassBits) >> 7; }

// Calls `work` with each word of a chunk and its quarter.
template <typename Work>
inline void for_each_in_quarters(uint64_t words, const Work& work) {
  const uint64_t quarter = words / kQuarters;
  for (uint64_t i = 0; i < quarter; ++i) {
    for (uint32_t k = 0; k < kQuarters; ++k) work(k * quarter + i, k);
  }
  // Those behind the last quarter belong to it.
  for (uint64_t i = kQuarters * quarter; i < words; ++i) work(i, kQuarters - 1);
}

// A number for each class in each quarter.
struct ClassCounts {
  std::array<uint32_t, kClasses> of[kQuarters];

  // Counts the words of a chunk. Not a template of their type, which would lose its alignment.
  void count(const Word<kOrderedWordBytes>::Memory* base, uint64_t words) {
    for (auto& quarter : of) quarter.fill(0);
    for_each_in_quarters(words, [&](uint64_t i, uint32_t k) { ++of[k][class_of_word(base[i])]; });
  }

  // Returns the place of the first word of each class and quarter in the order of the chunk.
  ClassCounts places() const {
    ClassCounts first;
    uint32_t place = 0;
    for (uint32_t c = 0; c < kClasses; ++c) {
      for (uint32_t k = 0; k < kQuarters; ++k) {
        first.of[k][c] = place;
        place += of[k][c];
      }
    }
    return first;
  }
};

// Writes the differences of a chunk in the order of its words, and makes the base equal to it.
inline void take_differences(const uint8_t* current, uint8_t* base, uint64_t words,
                             uint8_t* differences) {
  using Memory = Word<kOrderedWordBytes>::Memory;
  Memory* const out = reinterpret_cast<Memory*>(differences);
  Memory* const before = reinterpret_cast<Memory*>(base);
  const Memory* const now = reinterpret_cast<const Memory*>(current);
  ClassCounts counts;
  counts.count(before, words);
  ClassCounts next = counts.places();
  for_each_in_quarters(words, [&](uint64_t i, uint32_t k) {
    const uint16_t word = now[i];
    out[next.of[k][class_of_word(before[i])]++] = static_cast<uint16_t>(word - before[i]);
    before[i] = word;
  });
}

// The inverse: adds differences in the order of the words to the base of a chunk. One object adds
// those of several saves, one after the other, and counts the words of each class only once.
class OrderedAdder {
 public:
  // REQUIRED before another chunk, and after any other change of the base.
  void forget() { counted_ = has_quarters_ = false; }

  // Returns zeros in place of the differences of a chunk, for the caller to fill.
  uint8_t* zeros(uint64_t words) {
    if (differences_.size() < words) differences_.resize(words);
    return reinterpret_cast<uint8_t*>(differences_.data());
  }

  // Adds what the caller has put there. `changed`: about how many differences are not zero.
  void add(uint8_t* base, uint64_t words, uint64_t changed) {
    base_ = reinterpret_cast<Memory*>(base);
    words_ = words;
    if (words == 0 || changed * kSparse > words || words > kMostCounted) {
      add_to_all();
    } else {
      if (!counted_) count();
      has_quarters_ = false;
      find_changes();
      add_changes();
    }
  }

 private:
  using Memory = Word<kOrderedWordBytes>::Memory;
  struct Change {
    uint64_t word;
    uint16_t difference;
  };

  // Words with counts of their own. Smaller: a word is found sooner in its block; larger: fewer
  // blocks. A count must fit into 16 bits.
  static constexpr uint64_t kBlock = 512;
  static constexpr uint64_t kGroup = 64;  // words that are compared with a class together
  // Looking for words one by one is faster below one change in this many words.
  static constexpr uint64_t kSparse = 48;
  static constexpr uint64_t kMostCounted = uint64_t{1} << 20;  // more counts leave the cache

  uint32_t class_of(uint64_t word) const { return class_of_word(base_[word]); }

  // Adds every difference, zeros too. Words are counted once, since few of them change their class.
  void add_to_all() {
    if (!has_quarters_) quarters_.count(base_, words_);
    has_quarters_ = true;
    ClassCounts next = quarters_.places();
    for_each_in_quarters(words_, [&](uint64_t i, uint32_t k) {
      const uint16_t before = base_[i];
      const uint32_t c = class_of_word(before);
      const uint16_t after = static_cast<uint16_t>(before + differences_[next.of[k][c]++]);
      base_[i] = after;
      if (class_of_word(after) == c) return;
      --quarters_.of[k][c];
      ++quarters_.of[k][class_of_word(after)];
    });
    std::fill_n(differences_.begin(), words_, uint16_t{0});
    counted_ = false;
  }

  // Counts the words of each class in each block. Four blocks take turns, as quarters do above.
  void count() {
    const uint64_t blocks = (words_ + kBlock - 1) / kBlock, quarter = words_ / kBlock / 4;
    counts_.assign(blocks * kClasses, 0);
    for (uint64_t block = 0; block < quarter; ++block) {
      uint16_t* const counts = counts_.data() + block * kClasses;
      for (uint64_t i = block * kBlock; i < (block + 1) * kBlock; ++i) {
        for (uint64_t k = 0; k < 4; ++k)
          ++counts[k * quarter * kClasses + class_of(k * quarter * kBlock + i)];
      }
    }
    for (uint64_t i = 4 * quarter * kBlock; i < words_; ++i)
      ++counts_[i / kBlock * kClasses + class_of(i)];
    totals_.assign(kClasses, 0);
    for (uint64_t block = 0; block < blocks; ++block) {
      for (uint32_t c = 0; c < kClasses; ++c) totals_[c] += counts_[block * kClasses + c];
    }
    counted_ = true;
  }

  // Finds the words of all differences that are not zero, and clears the differences.
  void find_changes() {
    changes_.clear();
    uint64_t class_end = totals_[0], block = 0, block_end = counts_[0];
    uint32_t c = 0;
    // The first word of a group, its words of the class that are still to come, and the place of
    // the first of these.
    uint64_t at = 0, group = 0, next = 0;
    bool is_new = true;  // `group` is not yet that of `at`
    for (uint64_t place = 0; place < words_; ++place) {
      if (place % kGroup == 0 && place + kGroup <= words_ && is_zero(place)) {
        place += kGroup - 1;
        continue;
      }
      if (differences_[place] == 0) continue;
      while (place >= class_end) {
        next = block_end = class_end;
        class_end += totals_[++c];
        block = at = 0;
        block_end += counts_[c];
        is_new = true;
      }
      while (place >= block_end) {
        next = block_end;
        at = ++block * kBlock;
        block_end += counts_[block * kClasses + c];
        is_new = true;
      }
      if (is_new) group = words_of(c, at);
      is_new = false;
      for (uint64_t count; next + (count = count_of(group)) <= place; next += count) {
        at += kGroup;
        group = words_of(c, at);
      }
      for (; next < place; ++next) group &= group - 1;
      changes_.push_back({at + first_of(group), differences_[place]});
      differences_[place] = 0;
    }
  }

  // The classes are those of the base before all changes, so it is changed in the end.
  void add_changes() {
    for (const Change& change : changes_) {
      uint16_t* const counts = counts_.data() + change.word / kBlock * kClasses;
      const uint32_t before = class_of(change.word);
      base_[change.word] = static_cast<uint16_t>(base_[change.word] + change.difference);
      const uint32_t after = class_of(change.word);
      --counts[before], --totals_[before];
      ++counts[after], ++totals_[after];
    }
  }

  bool is_zero(uint64_t place) const {
    uint16_t any = 0;
    for (uint64_t i = place; i < place + kGroup; ++i) any |= differences_[i];
    return any == 0;
  }

  // Returns a bit for each of the words from `at` on that is in a class, for a group of words.
  uint64_t words_of(uint32_t c, uint64_t at) const {
    uint64_t bits = 0;
#ifdef __SSE2__
    if (at + kGroup <= words_) {
      const __m128i mask = _mm_set1_epi16(kClassBits);
      const __m128i wanted = _mm_set1_epi16(static_cast<int16_t>(c << 7));
      const auto equal = [&](uint64_t i) {
        const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(base_ + at + i));
        return _mm_cmpeq_epi16(_mm_and_si128(words, mask), wanted);
      };
      for (uint64_t i = 0; i < kGroup; i += 16) {
        const int both = _mm_movemask_epi8(_mm_packs_epi16(equal(i), equal(i + 8)));
        bits |= static_cast<uint64_t>(static_cast<uint32_t>(both)) << i;
      }
      return bits;
    }
#endif
    const uint64_t words = std::min(kGroup, words_ - at);
    for (uint64_t i = 0; i < words; ++i) bits |= uint64_t{class_of(at + i) == c} << i;
    return bits;
  }

  static uint64_t count_of(uint64_t bits) { return std::bitset<64>(bits).count(); }
  // The number of the lowest bit. REQUIRES: there is one.
  static uint64_t first_of(uint64_t bits) { return count_of((bits & -bits) - 1); }

  Memory* base_ = nullptr;
  uint64_t words_ = 0;
  bool counted_ = false, has_quarters_ = false;
  std::vector<uint16_t> differences_;  // in the order of the words; zeros between two calls
  std::vector<uint16_t> counts_;       // of the words of each class, block by block
  std::vector<uint32_t> totals_;       // of the words of each class in the chunk
  std::vector<Change> changes_;
  ClassCounts quarters_;  // of the words of the chunk
};

}  // namespace deltacheck
