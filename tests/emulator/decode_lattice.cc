// The emulated device's quantisation against the host's: the same bits and the same report.

#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "cuda/device.h"
#include "encoder/delta.h"
#include "memory.h"

using namespace deltacheck;
using check::Memory;

namespace {

std::mt19937_64 random_bits(5);

// `spread`: 0 for any bits at all.
void check_quantise(uint64_t count, float spread, double step, bool weights, bool in_place) {
  Memory values(4 * count, 4 * (random_bits() % 9)), out(4 * count), expected(4 * count),
      cells(2 * count, 2 * (random_bits() % 9));
  for (uint64_t i = 0; i < count; ++i) {
    const float value = (static_cast<float>(random_bits() >> 40) * 0x1p-24f - 0.5f) * spread;
    const uint32_t bits = spread == 0 ? static_cast<uint32_t>(random_bits()) : bits_of(value);
    // Mostly the weight that the value rounds to, now and then any.
    const uint16_t weight =
        static_cast<uint16_t>(random_bits() % 8 ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : random_bits());
    std::memcpy(values.data() + 4 * i, &bits, 4);
    std::memcpy(cells.data() + 2 * i, &weight, 2);
  }
  const uint64_t seed = random_bits();
  const uint8_t* const chosen = weights ? cells.data() : nullptr;
  const Quantised said = quantise(values.data(), chosen, count, step, seed, expected.data());
  Quantised found{~uint64_t{0}, -1};
  float* const from = reinterpret_cast<float*>(values.data());
  float* const to = in_place ? from : reinterpret_cast<float*>(out.data());
  CHECK(device::quantise({from, reinterpret_cast<const uint16_t*>(chosen), count, step, seed, to, &found}, nullptr) ==
        cudaSuccess);
  CHECK(count == 0 || std::memcmp(to, expected.data(), 4 * count) == 0);
  CHECK(found.nonfinite == said.nonfinite && found.largest_error == said.largest_error);
  CHECK(spread != 0 || count < 10000 || said.nonfinite > 0);
}

}  // namespace

int main() {
  for (const bool weights : {false, true}) {
    for (const double step : {0x1p-149, 1e-42, 16e-6, 0.1, 1e30, 0x1.fffffep127}) {
      check_quantise(3000, 0, step, weights, false);
      check_quantise(1000, 0.04f, step, weights, true);
    }
    check_quantise(0, 1, 1e-3, weights, false);
    check_quantise(1, 1, 1e-3, weights, false);
  }
  check_quantise(1024 * 256 + 77, 0, 16e-6, true, false);  // more values than threads
  return check::result();
}
