// Fuzzes the arithmetic of the format with any numbers: fast forms equal the definitions of the
// document, and inverses are inverses.

#include "target.h"

using namespace deltacheck;

namespace {

template <int W>
void check_word(uint64_t first, uint64_t second) {
  using U = typename Word<W>::type;
  const U current = static_cast<U>(first), base = static_cast<U>(second),
          z = zigzag<W>(current, base);
  promise(static_cast<U>(base + unzigzag<W>(z)) == current, "a difference gives the word back");
  promise((z == 0) == (current == base), "a difference is 0 where words are equal");
  promise(rotated_right<W>(rotated_left<W>(current)) == current, "a rotated word comes back");
}

// 4.4, step 3, literally.
uint64_t cost_by_the_document(const uint32_t* histogram, uint64_t n) {
  uint64_t entropy = 0, most = 0;
  for (int byte = 0; byte < 256; ++byte) {
    const uint64_t h = histogram[byte];
    if (h > 0) entropy += h * (log2_256_by_squaring(n) - log2_256_by_squaring(h));
    if (h > most) most = h;
  }
  const uint64_t skew = 2 * most > n ? (n - most) * (2 * most - n) / n : 0;
  return entropy + 2048 * skew < 2048 * n ? entropy + 2048 * skew : 2048 * n;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Reader reader(data, size);
  const uint64_t first = reader.take<uint64_t>(), second = reader.take<uint64_t>();
  check_word<1>(first, second);
  check_word<2>(first, second);
  check_word<4>(first, second);
  check_word<8>(first, second);
  for (const uint64_t x : {(first >> (second & 63)) | 1, first >> 30, second >> 30})
    if (x > 0) promise(log2_256(x) == log2_256_by_squaring(x), "L is what the document defines");

  const int word_bytes = static_cast<int>(reader.take<uint8_t>() % 10);
  std::vector<uint64_t> bounds;
  for (uint32_t count = 1 + reader.take<uint8_t>() % 6; count > 0; --count) {
    const uint64_t some = reader.take<uint64_t>();
    bounds.push_back(some >> (some & 63));
  }
  if (first & 1) bounds[0] = 0;
  const Run run{bounds.data(), bounds.size() - 1, word_bytes};
  const uint64_t bytes = second & 1 ? run.bytes() : second;
  if (problem_with(run, bytes).empty()) {
    promise(word_bytes == 1 || word_bytes == 2 || word_bytes == 4 || word_bytes == 8,
            "words have 1, 2, 4 or 8 bytes");
    promise(bounds.front() == 0 && bounds.back() == bytes / static_cast<uint64_t>(word_bytes),
            "bounds cover the bytes");
    for (size_t i = 1; i < bounds.size(); ++i)
      promise(bounds[i] >= bounds[i - 1] && bounds[i] - bounds[i - 1] < uint64_t{1} << 32,
              "bounds ascend by less than 2^32");
  }

  uint32_t histogram[256] = {};
  uint64_t n = 0;
  while (reader.left() > 0) {
    const uint8_t byte = reader.take<uint8_t>();
    const uint32_t more = reader.take<uint32_t>() >> (8 + byte % 24);
    histogram[byte] += more;
    n += more;
  }
  if (n > 0) {
    promise(cost(histogram, n) == cost_by_the_document(histogram, n),
            "a cost is what the document defines");
    promise(cost(histogram, n, false) <= cost(histogram, n),
            "a cost without its skew is a bound from below");
  }
  return 0;
}

std::vector<Input> seeds() {
  std::vector<Input> all;
  for (uint64_t x : {uint64_t{0}, uint64_t{1}, uint64_t{255}, uint64_t{1} << 31, ~uint64_t{0},
                     uint64_t{0x7fc00001}}) {
    Input input;
    put(&input, x);
    put(&input, x * 3 + 1);
    put<uint8_t>(&input, 4);
    put<uint8_t>(&input, 3);
    for (uint64_t bound : {uint64_t{0}, uint64_t{64}, uint64_t{6400}, uint64_t{64000}})
      put(&input, bound);
    for (uint8_t byte = 0; byte < 40; ++byte) {
      put<uint8_t>(&input, static_cast<uint8_t>(byte * x));
      put<uint32_t>(&input, static_cast<uint32_t>(x * byte + (byte << 20)));
    }
    all.push_back(input);
  }
  return all;
}
