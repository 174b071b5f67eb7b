// Compares the statistics of the emulated device with those of the host: equal bits for every
// element type.

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/device.h"
#include "encoder/delta.h"
#include "memory.h"

using namespace deltacheck;
using check::Memory;

namespace {

std::mt19937_64 random_bits(3);

uint64_t below(uint64_t end) { return random_bits() % end; }

// Fills words and replaces a few by difficult ones: infinities, NaNs, subnormals, zeros of both
// signs, the largest values.
void fill(Elements elements, uint64_t words, bool hard, uint8_t* current, uint8_t* base) {
  const int w = word_bytes_of(elements);
  const uint64_t exponent = elements == Elements::kFloat16    ? 0x7c00
                            : elements == Elements::kBfloat16 ? 0x7f80
                            : elements == Elements::kFloat32  ? 0x7f800000
                                                              : uint64_t{0x7ff} << 52;
  const uint64_t sign = uint64_t{1} << (8 * w - 1),
                 specials[] = {exponent, exponent | sign,    exponent + 1, exponent - 1, 1, 0,
                               sign,     exponent | 3 | sign};
  for (uint64_t i = 0; i < words; ++i) {
    uint64_t before = random_bits();
    // Values near 1, so that sums round. With exponents over the whole range, one term would
    // dominate.
    if (elements >= Elements::kFloat16)
      before = (before & ~exponent) | (exponent / 2 & exponent) | (before & sign);
    uint64_t now = below(3) ? before : before + below(999);
    if (hard && below(50) == 0) before = specials[below(8)];
    if (hard && below(50) == 0) now = specials[below(8)];
    std::memcpy(current + i * w, &now, w);
    std::memcpy(base + i * w, &before, w);
  }
}

}  // namespace

int main() {
  struct Piece {
    Memory current, base;
    Elements elements;
    uint64_t words;
  };
  std::vector<Piece> pieces;
  for (uint32_t type = 0; type < kElementTypes; ++type) {
    const Elements elements = static_cast<Elements>(type);
    const uint64_t w = static_cast<uint64_t>(word_bytes_of(elements)), tile = kTileBytes / w;
    for (const uint64_t words :
         {uint64_t{0}, uint64_t{1}, uint64_t{31}, uint64_t{33}, tile - 1, tile, 9 * tile + 50}) {
      for (const bool hard : {false, true}) {
        const size_t offset = below(20) * w;
        pieces.push_back(
            {Memory(words * w, offset), Memory(words * w, below(20) * w), elements, words});
        fill(elements, words, hard, pieces.back().current.data(), pieces.back().base.data());
      }
    }
  }
  {  // more than a span
    const uint64_t words = (kSpanTiles + 3) * uint64_t{kTileBytes} / 8 + 5;
    pieces.push_back({Memory(8 * words), Memory(8 * words), Elements::kFloat64, words});
    fill(Elements::kFloat64, words, false, pieces.back().current.data(), pieces.back().base.data());
  }
  std::vector<device::Chunk> table;
  std::vector<Elements> elements;
  for (const Piece& piece : pieces) {
    table.push_back({piece.current.data(), piece.base.data(), static_cast<uint32_t>(piece.words),
                     static_cast<uint32_t>(word_bytes_of(piece.elements))});
    elements.push_back(piece.elements);
  }
  std::vector<Statistics> found(table.size());
  CHECK(device::statistics(table.data(), elements.data(), static_cast<uint32_t>(table.size()),
                           found.data(), nullptr) == cudaSuccess);
  bool numbers = false;
  CHECK(std::isnormal(found.back().squared_difference) && std::isnormal(found.back().squared_base));
  for (size_t i = 0; i < pieces.size(); ++i) {
    const uint64_t bounds[2] = {0, pieces[i].words};
    const Run run{bounds, 1, word_bytes_of(pieces[i].elements)};
    const Statistics expected =
        statistics(run, pieces[i].elements, pieces[i].current.data(), pieces[i].base.data())[0];
    if (std::memcmp(&found[i], &expected, sizeof expected) != 0) {
      check::fail(__FILE__, __LINE__, kElementNames[static_cast<uint32_t>(pieces[i].elements)],
                  std::to_string(pieces[i].words) + " words: not the host's bits");
    }
    numbers = numbers || (expected.squared_difference > 0 && expected.squared_base > 0 &&
                          expected.nonfinite > 0);
  }
  CHECK(numbers);
  return check::result();
}
