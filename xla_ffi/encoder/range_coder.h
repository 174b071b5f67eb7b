// A binary range coder (docs/how-to/publish.md, "The compact encoding"). A model is written once,
// as a template of the coder, and then both writes and reads: `bit` returns the bit that it wrote,
// or that it read, in which case its argument is of no meaning.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace deltacheck {

// Probabilities are fractions of 2^32, from 1 to 2^32 - 1.
constexpr uint64_t kCertain = uint64_t{1} << 32;
constexpr uint32_t kEven = uint32_t{1} << 31;
// The range is multiplied by 2^16 below this.
constexpr uint64_t kLeastRange = uint64_t{1} << 48;

class RangeWriter {
 public:
  static constexpr bool kReads = false;

  bool bit(uint32_t zero, bool value) {
    const uint64_t bound = (range_ >> 32) * zero;
    if (value) {
      add(bound);
      range_ -= bound;
    } else {
      range_ = bound;
    }
    for (; range_ < kLeastRange; range_ <<= 16) put();
    return value;
  }

  // Returns everything written. A reader takes zeros behind the end, so none are stored there.
  std::vector<uint8_t> finish() {
    // The highest 16 bits of this sum, followed by zeros, lie within the range.
    add(kLeastRange - 1);
    put();
    while (!out_.empty() && out_.back() == 0) out_.pop_back();
    return std::move(out_);
  }

 private:
  void put() {
    out_.push_back(static_cast<uint8_t>(low_ >> 56));
    out_.push_back(static_cast<uint8_t>(low_ >> 48));
    low_ <<= 16;
  }

  void add(uint64_t bound) {
    low_ += bound;
    if (low_ >= bound) return;
    auto byte = out_.rbegin();
    while (++*byte == 0) ++byte;
  }

  uint64_t low_ = 0, range_ = ~uint64_t{0};
  std::vector<uint8_t> out_;
};

// Reads any bytes as some bits.
class RangeReader {
 public:
  static constexpr bool kReads = true;

  RangeReader(const uint8_t* data, uint64_t size) : data_(data), size_(size) {
    for (int i = 0; i < 4; ++i) take();
  }

  bool bit(uint32_t zero, bool) {
    const uint64_t bound = (range_ >> 32) * zero;
    const bool value = code_ >= bound;
    code_ -= value ? bound : 0;
    range_ = value ? range_ - bound : bound;
    for (; range_ < kLeastRange; range_ <<= 16) take();
    return value;
  }

  // Returns whether a writer ends with the last byte if it writes the bits that were read.
  bool is_at_end() const { return size_ <= taken_ - 6 && (size_ == 0 || data_[size_ - 1] != 0); }

 private:
  void take() {
    for (int i = 0; i < 2; ++i, ++taken_) code_ = code_ << 8 | (taken_ < size_ ? data_[taken_] : 0);
  }

  const uint8_t* data_;
  uint64_t size_, taken_ = 0, code_ = 0, range_ = ~uint64_t{0};
};

// A bit whose probability follows from the bits before it: it begins at one half, and moves by
// 1 / (n + 2) of the difference after the n-th.
class AdaptiveBit {
 public:
  template <typename Coder>
  bool code(Coder* coder, bool value) {
    value = coder->bit(zero_, value);
    const uint64_t share = kShares[seen_];
    const uint32_t up = static_cast<uint32_t>((kCertain - 1 - zero_) * share >> 16),
                   down = static_cast<uint32_t>(zero_ * share >> 16);
    zero_ = value ? zero_ - down : zero_ + up;
    seen_ += seen_ < kShares.size() - 1;
    return value;
  }

 private:
  // More: closer to the entropy of a constant probability; fewer: faster to follow a change.
  static constexpr std::array<uint16_t, 255> kShares = [] {
    std::array<uint16_t, 255> shares{};
    for (uint32_t n = 0; n < shares.size(); ++n) shares[n] = static_cast<uint16_t>(65536 / (n + 2));
    return shares;
  }();

  uint32_t zero_ = kEven, seen_ = 0;
};

// Numbers from 1 to 2^(kBits) - 1: their length in bits, then the bits below the highest.
template <int kBits>
class AdaptiveNumber {
 public:
  template <typename Coder>
  uint32_t code(Coder* coder, uint32_t number) {
    int length = 1;
    while (length < kBits && is_longer_[length - 1].code(coder, number >> length != 0)) ++length;
    uint32_t result = 1;
    for (int i = length - 2; i >= 0; --i) {
      const bool value = number >> i & 1;
      // The second bit of a number has a skew. Those below it are nearly even.
      result = result << 1 | (i == length - 2 ? second_[length - 1].code(coder, value)
                                              : coder->bit(kEven, value));
    }
    return result;
  }

 private:
  AdaptiveBit is_longer_[kBits], second_[kBits];
};

}  // namespace deltacheck
