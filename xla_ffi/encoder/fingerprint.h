// Fingerprints of leaves in host memory: many leaves in one call, because a call from Python costs
// more than the fingerprint of a small leaf. They are compared within one process and never stored.

#pragma once

#include <cstddef>
#include <cstdint>

namespace deltacheck {

// The part of a leaf that its fingerprint covers; deltacheck/leaf/fingerprint.py explains it.
struct Sampling {
  uint64_t whole_bytes;  // leaves up to this size are covered entirely
  uint64_t blocks;       // of a larger leaf, the number of strides, of each of which ...
  uint64_t block_bytes;  // ... this many bytes are covered,
  uint64_t seed;         // from a place that the seed chooses
};

// Writes the fingerprint of each leaf to out. A change of one word always changes a fingerprint,
// other changes do with a probability of 1 - 2^-64.
void fingerprints(const uint64_t* addresses, const uint64_t* sizes, size_t leaves,
                  const Sampling& sampling, uint64_t* out);

}  // namespace deltacheck
