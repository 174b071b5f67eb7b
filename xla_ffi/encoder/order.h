// The order of ordered chunks (docs/reference/format.md, 4.1): words of 2 bytes by the class of
// their base, which is the exponent of a bfloat16. Small weights change more often than large ones,
// and by more units. So words of one class have one density of changes, and neighbours in this
// order compress better.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#ifdef __SSE2__
#  include <emmintrin.h>
#endif

#include "format.h"

namespace deltacheck {

// Quarters of a chunk take turns, because a counter that is incremented twice in a row waits for
// the first store.
constexpr uint32_t kQuarters = 4;

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
// those of several saves, one after the other, and sorts the words of the chunk only once.
class OrderedAdder {
 public:
  // REQUIRED before another chunk, and after any other change of the base.
  void forget() { has_quarters_ = has_places_ = false; }

  // Returns zeros in place of the differences of a chunk, for the caller to fill.
  uint8_t* zeros(uint64_t words) {
    const uint64_t size = (words + kGroup - 1) / kGroup * kGroup;
    if (differences_.size() < size) differences_.resize(size);
    return reinterpret_cast<uint8_t*>(differences_.data());
  }

  // Adds what the caller has put there. `changed`: about how many differences are not zero.
  void add(uint8_t* base, uint64_t words, uint64_t changed) {
    base_ = reinterpret_cast<Memory*>(base);
    words_ = words;
    const bool is_sparse = changed * kSparse <= words;
    // Sorting takes longer than one addition to all, so it waits for a second one.
    if (is_sparse && (has_quarters_ || has_places_)) {
      if (!has_places_) sort();
      has_quarters_ = false;
      add_to_changed();
    } else {
      has_places_ = false;
      add_to_all();
    }
  }

 private:
  using Memory = Word<kOrderedWordBytes>::Memory;
  struct Move {  // of a word to another class
    uint64_t word;
    uint32_t from, to;
  };

  // Words that are sorted by themselves, whose numbers must fit into 16 bits. Smaller: a word that
  // changes its class moves sooner; larger: fewer blocks are passed on the way to a change.
  static constexpr uint64_t kBlock = 8192;
  static constexpr uint64_t kGroup = 64;  // differences that are compared with zero together
  // Above one change in this many words, adding to all of them is faster.
  static constexpr uint64_t kSparse = 16;
  // Above one word in this many that changes its class, sorting again is faster.
  static constexpr uint64_t kFewMoves = 128;

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
  }

  // Finds the order of the words in each block.
  void sort() {
    blocks_ = (words_ + kBlock - 1) / kBlock;
    counts_.resize(kClasses * blocks_);
    places_.resize(blocks_ * kBlock);
    totals_.fill(0);
    for (uint64_t block = 0; block < blocks_; ++block) {
      const Memory* const words = base_ + block * kBlock;
      const uint64_t size = std::min(kBlock, words_ - block * kBlock);
      uint16_t* const places = places_.data() + block * kBlock;
      ClassCounts counts;
      counts.count(words, size);
      for (uint32_t c = 0; c < kClasses; ++c) {
        uint32_t count = 0;
        for (const auto& quarter : counts.of) count += quarter[c];
        count_of(c, block) = static_cast<uint16_t>(count);
        totals_[c] += count;
      }
      ClassCounts next = counts.places();
      for_each_in_quarters(size, [&](uint64_t i, uint32_t k) {
        places[next.of[k][class_of_word(words[i])]++] = static_cast<uint16_t>(i);
      });
    }
    has_places_ = true;
  }

  // Adds the differences that are not zero, and clears them.
  void add_to_changed() {
    moves_.clear();
    // Of the present class and block: the places of the first word and behind the last one in the
    // order of the chunk. Of each block: the place of its first word of the class in its own order.
    uint64_t begin = 0, end = 0, block = blocks_;
    uint32_t c = 0, next_class = 0;
    first_.assign(blocks_, 0);
    for (uint64_t group = 0; group < words_; group += kGroup) {
      for (uint64_t bits = changed_of(group); bits != 0; bits &= bits - 1) {
        const uint64_t place = group + static_cast<uint64_t>(__builtin_ctzll(bits));
        while (place >= end) {
          if (block < blocks_) first_[block++] += static_cast<uint32_t>(end - begin);
          if (block == blocks_) {
            while (totals_[next_class] == 0) ++next_class;
            c = next_class++;
            block = 0;
          }
          begin = end;
          end += count_of(c, block);
        }
        const uint64_t at = block * kBlock + first_[block] + (place - begin);
        const uint64_t word = block * kBlock + places_[at];
        base_[word] = static_cast<uint16_t>(base_[word] + differences_[place]);
        differences_[place] = 0;
        // The order is that of the base before all changes, so words move in the end.
        const uint32_t after = class_of_word(base_[word]);
        if (after != c) moves_.push_back({word, c, after});
      }
    }
    if (moves_.size() * kFewMoves > words_) {
      has_places_ = false;
    } else {
      for (const Move& move : moves_) move_word(move);
    }
  }

  // Moves a word to its new class in the order of its block.
  void move_word(const Move& move) {
    const uint64_t block = move.word / kBlock;
    const uint16_t number = static_cast<uint16_t>(move.word % kBlock);
    uint16_t* const places = places_.data() + block * kBlock;
    // Returns the first place of a class whose word is not before this one.
    const auto place_in = [&](uint32_t c) {
      uint64_t first = 0;
      for (uint32_t k = 0; k < c; ++k) first += count_of(k, block);
      return std::lower_bound(places + first, places + first + count_of(c, block), number);
    };
    uint16_t* const from = place_in(move.from);
    uint16_t* const to = place_in(move.to);
    if (from < to) {
      std::rotate(from, from + 1, to);
    } else {
      std::rotate(to, from, from + 1);
    }
    --count_of(move.from, block), --totals_[move.from];
    ++count_of(move.to, block), ++totals_[move.to];
  }

  uint16_t& count_of(uint32_t c, uint64_t block) { return counts_[c * blocks_ + block]; }

  // Returns a bit for each difference of a group that is not zero.
  uint64_t changed_of(uint64_t group) const {
    const uint16_t* const differences = differences_.data() + group;
    uint64_t bits = 0;
#ifdef __SSE2__
    const auto zero = [&](uint64_t i) {
      return _mm_cmpeq_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(differences + i)),
                             _mm_setzero_si128());
    };
    for (uint64_t i = 0; i < kGroup; i += 16) {
      const int both = _mm_movemask_epi8(_mm_packs_epi16(zero(i), zero(i + 8)));
      bits |= static_cast<uint64_t>(static_cast<uint16_t>(~both)) << i;
    }
#else
    for (uint64_t i = 0; i < kGroup; ++i) bits |= uint64_t{differences[i] != 0} << i;
#endif
    return bits;
  }

  Memory* base_ = nullptr;
  uint64_t words_ = 0, blocks_ = 0;
  bool has_quarters_ = false, has_places_ = false;
  std::vector<uint16_t> differences_;      // in the order of the words; zeros between two calls
  ClassCounts quarters_;                   // of the words of the chunk
  std::vector<uint16_t> places_;           // the words of each block in their order
  std::vector<uint16_t> counts_;           // of the words of each class, by class and block
  std::array<uint32_t, kClasses> totals_;  // of the words of each class in the chunk
  std::vector<uint32_t> first_;
  std::vector<Move> moves_;
};

}  // namespace deltacheck
