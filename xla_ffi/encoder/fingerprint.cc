#include "fingerprint.h"

#include <cstring>

namespace deltacheck {
namespace {

constexpr uint64_t kOdd = 0x9E3779B97F4A7C15u;

uint64_t word_at(const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

// Each step is a bijection of the lane for every word, and of the word for every lane.
uint64_t mixed(uint64_t lane, uint64_t word) {
  lane = (lane ^ word) * kOdd;
  return lane << 31 | lane >> 33;
}

// Four lanes, because each step waits for the multiplication before it.
struct Lanes {
  uint64_t lane[4] = {1, 2, 3, 4};

  void add(const uint8_t* data, uint64_t size) {
    uint64_t at = 0;
    for (; at + 32 <= size; at += 32) {
      for (int k = 0; k < 4; ++k) lane[k] = mixed(lane[k], word_at(data + at + 8 * k));
    }
    for (; at + 8 <= size; at += 8) lane[at / 8 % 4] = mixed(lane[at / 8 % 4], word_at(data + at));
    if (at < size) {
      uint64_t word = 0;
      std::memcpy(&word, data + at, size - at);
      lane[0] = mixed(lane[0], word);
    }
  }

  uint64_t digest(uint64_t size) const {
    uint64_t result = mixed(size, kOdd);
    for (uint64_t word : lane) result = mixed(result ^ word >> 29, word);
    return result ^ result >> 32;
  }
};

uint64_t fingerprint(const uint8_t* data, uint64_t size, const Sampling& sampling) {
  Lanes lanes;
  if (size <= sampling.whole_bytes) {
    lanes.add(data, size);
    return lanes.digest(size);
  }
  const uint64_t stride = size / sampling.blocks;
  const uint64_t start = sampling.seed % (stride - sampling.block_bytes + 1);
  for (uint64_t block = 0; block < sampling.blocks; ++block) {
    lanes.add(data + block * stride + start, sampling.block_bytes);
  }
  return lanes.digest(size);
}

// Starts to load the beginning of a leaf into the cache. Any address may be passed.
void load_ahead(uint64_t address, uint64_t size) {
  constexpr uint64_t kLine = 64;
  // From there on, the processor sees that the accesses ascend.
  constexpr uint64_t kMostBytes = 16 * kLine;
  const auto* data = reinterpret_cast<const uint8_t*>(address);
  for (uint64_t at = 0; at < size && at < kMostBytes; at += kLine) __builtin_prefetch(data + at);
}

}  // namespace

void fingerprints(const uint64_t* addresses, const uint64_t* sizes, size_t leaves,
                  const Sampling& sampling, uint64_t* out) {
  // Small leaves lie apart, so each of them would wait for the memory.
  constexpr size_t kAhead = 2;
  for (size_t leaf = 0; leaf < leaves; ++leaf) {
    if (leaf + kAhead < leaves) load_ahead(addresses[leaf + kAhead], sizes[leaf + kAhead]);
    out[leaf] =
        fingerprint(reinterpret_cast<const uint8_t*>(addresses[leaf]), sizes[leaf], sampling);
  }
}

}  // namespace deltacheck
