#include "canonical.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace deltacheck {

namespace {

// The bytes that stand for themselves in a text: Python escapes all but printable ASCII.
constexpr std::array<bool, 256> plain_bytes() {
  std::array<bool, 256> is_plain{};
  for (int byte = ' '; byte <= '~'; ++byte) is_plain[byte] = byte != '"' && byte != '\\';
  return is_plain;
}
constexpr std::array<bool, 256> kIsPlain = plain_bytes();

class Canonical {
 public:
  Canonical(std::string_view text, IsSpelled is_spelled)
      : next_(text.data()), end_(text.data() + text.size()), is_spelled_(is_spelled) {
    form_.reserve(text.size());
  }

  // Returns false for a refused text.
  bool compute() { return take_value(0) && next_ == end_; }

  std::string form() { return std::move(form_); }

 private:
  // Deeper texts are refused, because the walk is recursive.
  static constexpr int kMostLevels = 1000;
  // Python refuses to read integers of some thousand digits; no document has one of more than 20.
  static constexpr size_t kMostDigits = 20;

  // A key, and the place of the key and its value in the form.
  struct Member {
    std::string_view key;
    size_t begin, end;
  };

  bool take_value(int level) {
    if (level > kMostLevels || next_ == end_) return false;
    switch (*next_) {
      case '{':
        return take_object(level);
      case '[':
        return take_array(level);
      case '"':
        return take_text(nullptr);
      case 't':
        return take_word("true");
      case 'f':
        return take_word("false");
      case 'n':
        return take_word("null");
      default:
        return take_number();
    }
  }

  bool take(char expected) {
    if (next_ == end_ || *next_ != expected) return false;
    form_ += *next_++;
    return true;
  }

  bool take_word(std::string_view word) {
    if (static_cast<size_t>(end_ - next_) < word.size()) return false;
    if (std::memcmp(next_, word.data(), word.size()) != 0) return false;
    form_ += word;
    next_ += word.size();
    return true;
  }

  bool take_array(int level) {
    take('[');
    if (take(']')) return true;
    do {
      if (!take_value(level + 1)) return false;
    } while (take(','));
    return take(']');
  }

  bool take_object(int level) {
    take('{');
    if (take('}')) return true;
    const size_t first = members_.size();
    bool is_ascending = true;
    do {
      const size_t begin = form_.size();
      std::string_view key;
      if (!take_text(&key) || !take(':') || !take_value(level + 1)) return false;
      is_ascending = is_ascending && (members_.size() == first || members_.back().key < key);
      members_.push_back({key, begin, form_.size()});
    } while (take(','));
    if (!is_ascending && !order(first)) return false;
    members_.resize(first);
    return take('}');
  }

  // Orders the members of the innermost object in the form. Returns false if two keys are equal.
  bool order(size_t first) {
    const auto begin = members_.begin() + static_cast<std::ptrdiff_t>(first);
    const size_t place = begin->begin;
    std::sort(begin, members_.end(),
              [](const Member& a, const Member& b) { return a.key < b.key; });
    const auto is_equal = [](const Member& a, const Member& b) { return a.key == b.key; };
    if (std::adjacent_find(begin, members_.end(), is_equal) != members_.end()) return false;
    ordered_.clear();
    for (auto member = begin; member != members_.end(); ++member) {
      if (member != begin) ordered_ += ',';
      ordered_.append(form_, member->begin, member->end - member->begin);
    }
    form_.replace(place, ordered_.size(), ordered_);
    return true;
  }

  // Takes a text in quotes. `key` is set to its content, and may have no escapes.
  bool take_text(std::string_view* key) {
    const char* begin = next_;
    if (next_ == end_ || *next_++ != '"') return false;
    for (;; ++next_) {
      while (next_ != end_ && kIsPlain[static_cast<unsigned char>(*next_)]) ++next_;
      if (next_ == end_) return false;
      if (*next_ == '"') break;
      if (*next_ != '\\' || key != nullptr || !skip_escape()) return false;
    }
    ++next_;
    if (key != nullptr) *key = {begin + 1, static_cast<size_t>(next_ - begin - 2)};
    form_.append(begin, next_);
    return true;
  }

  // Goes on to the last character of an escape. Returns false if Python would write it otherwise.
  bool skip_escape() {
    if (++next_ == end_) return false;
    if (std::strchr("\"\\bfnrt", *next_) != nullptr) return *next_ != 0;
    if (*next_ != 'u' || end_ - next_ < 5) return false;
    unsigned code = 0;
    for (int digit = 0; digit < 4; ++digit) {
      const char c = *++next_;
      if (!(c >= '0' && c <= '9') && !(c >= 'a' && c <= 'f')) return false;
      code = code * 16 + static_cast<unsigned>(c <= '9' ? c - '0' : c - 'a' + 10);
    }
    const bool has_short_form = code >= '\b' && code <= '\r' && code != '\v';
    return !has_short_form && (code < ' ' || code > '~');
  }

  bool take_number() {
    const char* begin = next_;
    bool is_integer = true;
    for (; next_ != end_; ++next_) {
      if (*next_ >= '0' && *next_ <= '9') continue;
      if (*next_ == 0 || std::strchr("+-.Ee", *next_) == nullptr) break;
      is_integer = is_integer && next_ == begin;
    }
    const std::string_view number(begin, static_cast<size_t>(next_ - begin));
    if (!(is_integer ? is_integer_spelled(number) : is_spelled_(number))) return false;
    form_ += number;
    return true;
  }

  static bool is_integer_spelled(std::string_view number) {
    if (number == "0") return true;
    if (!number.empty() && number.front() == '-') number.remove_prefix(1);
    return !number.empty() && number.size() <= kMostDigits && number.front() >= '1' &&
           number.front() <= '9';
  }

  const char* next_;
  const char* end_;
  IsSpelled is_spelled_;
  std::string form_, ordered_;
  std::vector<Member> members_;  // of all objects that are open
};

}  // namespace

std::optional<std::string> canonical_json(std::string_view text, IsSpelled is_spelled) {
  Canonical canonical(text, is_spelled);
  if (!canonical.compute()) return std::nullopt;
  return canonical.form();
}

}  // namespace deltacheck
