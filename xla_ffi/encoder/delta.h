// Encode and apply runs of chunks on the host, on several threads. The bytes do not depend on how many.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "blocks.h"
#include "format.h"

namespace deltacheck {

// The words of a leaf, or of a part of it, cut into chunks. REQUIRES: `bounds` has `chunks + 1` offsets in words,
// ascending from 0, less than 2^32 apart; `word_bytes` is 1, 2, 4 or 8.
struct Run {
  const uint64_t* bounds;
  uint64_t chunks;
  int word_bytes;

  uint64_t words() const { return bounds[chunks]; }
  uint64_t bytes() const { return words() * word_bytes; }
};

// What is wrong with a run that came from outside; empty if nothing is. `bytes`: of the array that it cuts.
std::string problem_with(const Run& run, uint64_t bytes);

struct Encoded {
  std::vector<Row> rows;  // of the chunks that changed, ascending
  Bytes streams[kStreams];
};

// Encodes `current` against `base`, which becomes equal to it; with `base` null every chunk is stored. Throws
// std::bad_alloc, after which base holds a mixture: the caller must drop it.
//
// `method`: taken for every chunk that changed instead of the best, except that sparse or bitmap streams larger than
// the chunk are raw; kUnchanged chooses. REQUIRES: without a base only planes and raw can be asked for.
//
// Memory: what the output needs, about 3 chunks a thread, and kKeptBytes. Address space: up to six times the run, given
// back at the end.
Encoded encode(const Run& run, const uint8_t* current, uint8_t* base, Method method = kUnchanged);

struct StreamView {
  const uint8_t* data;  // null where size is 0
  uint64_t size;
};

// Turns `base` into what was encoded, chunk by chunk, each checked before it is written. Returns an empty string, or
// why the first bad chunk was refused; chunks may then have been applied, never a bad one.
std::string apply(const Run& run, const Row* rows, uint64_t row_count, const StreamView* streams, uint8_t* base);

// Threads that one call may use, its caller among them. At first the processors that this process may run on, at
// most 8.
int threads();
void set_threads(int count);

// The instruction sets that this build has kernels for and this processor can run, best first, and the one in use: at
// first the one that the environment variable DELTACHECK_ISA names, or the best. Throws std::invalid_argument for a
// name that is not in the list.
std::vector<std::string> instruction_sets();
std::string instruction_set();
void use_instruction_set(const std::string& name);

}  // namespace deltacheck
