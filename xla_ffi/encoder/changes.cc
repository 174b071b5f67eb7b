#include "changes.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "delta.h"
#include "format.h"
#include "range_coder.h"
#include "thread_pool.h"

namespace deltacheck {
namespace {

// Words that are coded together. Larger: less for tables; smaller: more threads.
constexpr uint64_t kPieceWords = uint64_t{1} << 22;
constexpr uint64_t kLengthBytes = 4;
constexpr int kClassCount = 256, kMostBlockBits = 6;

// --- probabilities of a class --------------------------------------------------------------------

// A code for a probability, from 0 to 255, grows with it: four codes for each factor of two, below
// one half of the probability itself, and above of its complement.
constexpr uint64_t small_probability(uint32_t code) {
  return uint64_t{4 + code % 4} << (code / 4) >> 2;
}

constexpr uint64_t probability_of(uint32_t code) {
  return code < 128 ? small_probability(code) : kCertain - small_probability(255 - code);
}

// Returns the code of count / of. REQUIRES: 0 < count <= of < 2^32.
uint32_t code_of_ratio(uint64_t count, uint64_t of) {
  const bool is_large = 2 * count > of;
  const uint64_t share = ((is_large ? of - count : count) << 32) / of;
  uint32_t code = 0;
  while (code < 127 && small_probability(code) + small_probability(code + 1) <= 2 * share) ++code;
  return is_large ? 255 - code : code;
}

// --- the model -----------------------------------------------------------------------------------

// Codes a piece. The class of a word is the eight bits below its sign: the exponent of a bfloat16.
// A learning rate moves all weights by about the same amount, so words of one class change equally
// often, and by equally many units.
template <typename Coder, int W>
class Piece {
  using Type = typename Word<W>::type;
  using Memory = typename Word<W>::Memory;

 public:
  // A reader changes `words`, and `now` is null. A writer does not change them.
  Piece(Coder coder, Memory* words, const Memory* now, uint64_t count)
      : coder_(std::move(coder)), words_(words), now_(now), count_(count), sizes_(kClassCount) {}

  // Returns the coder after the whole piece.
  Coder& code() {
    std::vector<uint32_t> codes(kClassCount);
    uint32_t bits = 0;
    if constexpr (!Coder::kReads) bits = choose(&codes);
    bits = block_bits(bits);
    code_table(&codes);
    const uint64_t block = uint64_t{1} << bits, whole = bits > 0 ? count_ >> bits << bits : 0;
    for (uint64_t at = 0; at < whole; at += block) code_block(at, block);
    for (uint64_t at = whole; at < count_; ++at) {
      if (coder_.bit(keep_[class_of(words_[at])], changes(at))) code_word(at);
    }
    return coder_;
  }

 private:
  static uint32_t class_of(Type word) { return static_cast<Type>(word << 1) >> (8 * W - 8); }

  // Returns whether a word changes; a reader does not know.
  bool changes(uint64_t at) const { return !Coder::kReads && words_[at] != now_[at]; }

  // Counts changes; returns the bits of the number of words in a block.
  uint32_t choose(std::vector<uint32_t>* codes) const {
    // Words take turns, because a counter that is incremented twice in a row waits for the first
    // store.
    constexpr uint64_t kTurns = 4;
    std::vector<uint32_t> words(kTurns * kClassCount), changed(kTurns * kClassCount);
    constexpr uint64_t kGroup = 64;  // is counted faster if nothing changes
    for (uint64_t first = 0; first < count_; first += kGroup) {
      const uint64_t end = std::min(first + kGroup, count_);
      const bool any = std::memcmp(words_ + first, now_ + first, (end - first) * W) != 0;
      for (uint64_t i = first; i < end; ++i) {
        const uint64_t place = kTurns * class_of(words_[i]) + i % kTurns;
        ++words[place];
        if (any) changed[place] += changes(i);
      }
    }
    const auto sum = [](const std::vector<uint32_t>& numbers, uint64_t first, uint64_t count) {
      return std::accumulate(&numbers[first], &numbers[first] + count, uint64_t{0});
    };
    for (uint32_t c = 0; c < kClassCount; ++c) {
      const uint64_t some = sum(changed, kTurns * c, kTurns);
      if (some > 0) (*codes)[c] = 1 + code_of_ratio(some, sum(words, kTurns * c, kTurns));
    }
    const uint64_t all = sum(changed, 0, changed.size());
    // At least eight blocks for a change: larger ones are divided more often, smaller ones are
    // more.
    uint32_t bits = 0;
    while (bits < kMostBlockBits && all << (bits + 3) <= count_) ++bits;
    return bits;
  }

  uint32_t block_bits(uint32_t bits) {
    uint32_t result = 0;
    for (int i = 2; i >= 0; --i) result = result << 1 | coder_.bit(kEven, bits >> i & 1);
    return std::min<uint32_t>(result, kMostBlockBits);
  }

  // Codes 1 + the code of the probability of each class, or 0 for a class without changes.
  // A class has about half the probability of the class below, which is four codes less.
  void code_table(std::vector<uint32_t>* codes) {
    AdaptiveBit has_changes[2];
    AdaptiveNumber<10> distance;
    int32_t before = 128;
    bool had_changes = false;
    for (uint32_t c = 0; c < kClassCount; ++c) {
      had_changes = has_changes[had_changes].code(&coder_, (*codes)[c] > 0);
      keep_[c] = kCertain - 1;
      if (!had_changes) continue;
      const int32_t step = static_cast<int32_t>((*codes)[c]) - 1 - (before - 4);
      // Zigzag from 1: 0, -1, 1, -2, ... are 1, 2, 3, 4, ...
      const uint32_t coded = distance.code(
          &coder_, 1 + (static_cast<uint32_t>(step) << 1 ^ static_cast<uint32_t>(step >> 31)));
      const int32_t taken =
          static_cast<int32_t>(coded - 1) >> 1 ^ -static_cast<int32_t>((coded - 1) & 1);
      before = std::clamp(before - 4 + taken, 0, 255);
      keep_[c] = kCertain - probability_of(static_cast<uint32_t>(before));
    }
  }

  // Codes which words of a block change, then by how much.
  void code_block(uint64_t at, uint64_t size) {
    uint64_t changed = 0;
    if (!Coder::kReads && std::memcmp(words_ + at, now_ + at, size * W) != 0) {
      for (uint64_t i = 0; i < size; ++i) changed |= uint64_t{changes(at + i)} << i;
    }
    // The probability that nothing changes in a node of a binary tree: its children are nodes 2 n
    // and 2 n + 1, and the words are the last nodes.
    for (uint64_t i = 0; i < size; ++i) none_[size + i] = keep_[class_of(words_[at + i])];
    for (uint64_t n = size - 1; n > 0; --n) {
      const uint64_t both = uint64_t{none_[2 * n]} * none_[2 * n + 1] >> 32;
      none_[n] = static_cast<uint32_t>(std::max<uint64_t>(both, 1));
    }
    if (!coder_.bit(none_[1], changed != 0)) return;
    for (changed = code_changed(size, changed); changed != 0; changed &= changed - 1)
      code_word(at + static_cast<uint64_t>(__builtin_ctzll(changed)));
  }

  // Codes which words of a block change, one of them at least, level by level of the tree. Returns
  // a bit for each word.
  uint64_t code_changed(uint64_t size, uint64_t changed) {
    uint64_t nodes = 1;  // those with changes, of a level of `width` nodes
    for (uint64_t width = 1; width < size; width *= 2) {
      const uint64_t half = size / width / 2, ones = (uint64_t{1} << half) - 1;
      uint64_t children = 0;
      for (; nodes != 0; nodes &= nodes - 1) {
        const uint64_t n = static_cast<uint64_t>(__builtin_ctzll(nodes)), left = 2 * (width + n),
                       below = changed >> (2 * n * half);
        // The probability of changes on the left, given changes on either side.
        const uint64_t any = ((kCertain - none_[left]) << 32) / (kCertain - none_[width + n]);
        const uint32_t zero = static_cast<uint32_t>(kCertain - std::min(any, kCertain - 1));
        const bool on_left = coder_.bit(zero, (below & ones) != 0);
        const bool on_right = !on_left || coder_.bit(none_[left + 1], (below >> half & ones) != 0);
        children |= (uint64_t{on_left} | uint64_t{on_right} << 1) << (2 * n);
      }
      nodes = children;
    }
    return nodes;
  }

  // Codes by how much a word changes.
  void code_word(uint64_t at) {
    Sizes& sizes = sizes_[class_of(words_[at])];
    const Type up = Coder::kReads ? Type{} : static_cast<Type>(now_[at] - words_[at]);
    const bool is_down = sizes.is_down.code(&coder_, up >> (8 * W - 1));
    const Type size =
        static_cast<Type>(sizes.size.code(&coder_, static_cast<Type>(is_down ? -up : up)));
    if constexpr (Coder::kReads)
      words_[at] = static_cast<Type>(words_[at] + (is_down ? -size : size));
  }

  struct Sizes {
    AdaptiveBit is_down;
    AdaptiveNumber<8 * W> size;
  };

  Coder coder_;
  Memory* const words_;
  const Memory* const now_;
  const uint64_t count_;
  uint32_t keep_[kClassCount] = {};  // the probability that a word of each class does not change
  uint32_t none_[2 << kMostBlockBits] = {};
  std::vector<Sizes> sizes_;
};

uint64_t pieces_of(uint64_t words) { return (words + kPieceWords - 1) / kPieceWords; }

// Calls `work` with the number, the first word and the words of every piece.
template <typename Work>
void for_each_piece(uint64_t words, const Work& work) {
  std::atomic<uint64_t> next{0};
  std::atomic<bool> failed{false};
  const uint64_t pieces = pieces_of(words);
  run_on_threads(static_cast<int>(std::min<uint64_t>(pieces, static_cast<uint64_t>(threads()))),
                 [&] {
                   try {
                     for (uint64_t i = next++; i < pieces; i = next++)
                       work(i, i * kPieceWords, std::min(kPieceWords, words - i * kPieceWords));
                   } catch (const std::bad_alloc&) {
                     failed = true;
                   }
                 });
  if (failed) throw std::bad_alloc();
}

template <int W>
Bytes encode(const uint8_t* before, const uint8_t* now, uint64_t words) {
  using Memory = typename Word<W>::Memory;
  std::vector<std::vector<uint8_t>> pieces(pieces_of(words));
  for_each_piece(words, [&](uint64_t i, uint64_t first, uint64_t count) {
    Memory* const words = const_cast<Memory*>(reinterpret_cast<const Memory*>(before));
    Piece<RangeWriter, W> piece({}, words + first, reinterpret_cast<const Memory*>(now) + first,
                                count);
    pieces[i] = piece.code().finish();
  });
  size_t size = 0;
  for (const auto& piece : pieces) size += piece.size() + kLengthBytes;
  Bytes changes = allocate(size);
  uint8_t* to = changes.data.get();
  for (const auto& piece : pieces) {
    const uint32_t length = static_cast<uint32_t>(piece.size());
    std::memcpy(to, &length, kLengthBytes);
    std::copy(piece.begin(), piece.end(), to + kLengthBytes);
    to += kLengthBytes + length;
  }
  return changes;
}

template <int W>
std::string apply(const uint8_t* changes, uint64_t size, uint8_t* words, uint64_t count) {
  using Memory = typename Word<W>::Memory;
  std::vector<RangeReader> readers;
  for (uint64_t i = 0; i < pieces_of(count); ++i) {
    uint32_t length = 0;
    if (size < kLengthBytes) return "a piece lacks its length";
    std::memcpy(&length, changes, kLengthBytes);
    size -= kLengthBytes;
    if (length > size) return "a piece is cut off";
    readers.emplace_back(changes + kLengthBytes, length);
    changes += kLengthBytes + length;
    size -= length;
  }
  if (size > 0) return "pieces are followed by other bytes";
  std::atomic<bool> damaged{false};
  for_each_piece(count, [&](uint64_t i, uint64_t first, uint64_t some) {
    Piece<RangeReader, W> piece(readers[i], reinterpret_cast<Memory*>(words) + first, nullptr,
                                some);
    if (!piece.code().is_at_end()) damaged = true;
  });
  return damaged ? "a piece does not end with its last change" : "";
}

}  // namespace

Bytes encode_changes(const uint8_t* before, const uint8_t* now, uint64_t words, int word_bytes) {
  return word_bytes == 1 ? encode<1>(before, now, words) : encode<2>(before, now, words);
}

std::string apply_changes(const uint8_t* changes, uint64_t size, uint8_t* words, uint64_t count,
                          int word_bytes) {
  return word_bytes == 1 ? apply<1>(changes, size, words, count)
                         : apply<2>(changes, size, words, count);
}

}  // namespace deltacheck
