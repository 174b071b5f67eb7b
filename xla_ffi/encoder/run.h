// The words of a leaf, or of a part of it, divided into chunks. The input of every function in
// delta.h.

#pragma once

#include <cstdint>
#include <string>

namespace deltacheck {

// A division into chunks. REQUIRES: `bounds` has `chunks + 1` offsets in words, ascending from 0,
// less than 2^32 apart; `word_bytes` is 1, 2, 4 or 8.
struct Run {
  const uint64_t* bounds;
  uint64_t chunks;
  int word_bytes;

  uint64_t words() const { return bounds[chunks]; }
  uint64_t bytes() const { return words() * word_bytes; }
};

// Returns the defect of a run that a caller outside of this library made, or an empty string.
// `bytes`: the size of the array that it divides.
inline std::string problem_with(const Run& run, uint64_t bytes) {
  if (run.word_bytes != 1 && run.word_bytes != 2 && run.word_bytes != 4 && run.word_bytes != 8) {
    return "word_bytes must be 1, 2, 4 or 8, not " + std::to_string(run.word_bytes);
  }
  if (run.bounds[0] != 0) return "bounds must ascend from 0";
  for (uint64_t chunk = 0; chunk < run.chunks; ++chunk) {
    if (run.bounds[chunk + 1] < run.bounds[chunk]) return "bounds must ascend from 0";
    if ((run.bounds[chunk + 1] - run.bounds[chunk]) >> 32)
      return "a chunk must have fewer than 2^32 words";
  }
  if (bytes % static_cast<uint64_t>(run.word_bytes) != 0 ||
      run.words() != bytes / static_cast<uint64_t>(run.word_bytes)) {
    return "bounds end at " + std::to_string(run.words()) + " words of " +
           std::to_string(run.word_bytes) + " bytes, but there are " + std::to_string(bytes) +
           " bytes";
  }
  if (run.chunks >> 32) return "there must be fewer than 2^32 chunks";
  return "";
}

}  // namespace deltacheck
