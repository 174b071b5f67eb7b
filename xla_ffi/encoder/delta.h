// Encode, apply and measure runs of chunks on the host, on several threads. No result depends on
// how many.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "blocks.h"
#include "elements.h"
#include "format.h"
#include "lattice.h"
#include "octaves.h"
#include "run.h"

namespace deltacheck {

struct Encoded {
  std::vector<Row> rows;  // of the chunks that changed, ascending
  Bytes streams[kStreams];
};

// Encodes `current` against `base`, which becomes equal to it; with `base` null every chunk is
// stored. Throws std::bad_alloc, after which base holds a mixture: the caller must drop it.
//
// `method`: taken for every chunk that changed instead of the best, except that sparse or bitmap
// streams larger than the chunk are raw; kUnchanged chooses. REQUIRES: without a base only planes
// and raw can be asked for.
//
// Memory: what the output needs, about 3 chunks a thread, and kKeptBytes. Address space: up to six
// times the run, given back at the end.
Encoded encode(const Run& run, const uint8_t* current, uint8_t* base, Method method = kUnchanged);

struct StreamView {
  const uint8_t* data;  // null where size is 0
  uint64_t size;
};

// Turns `base` into what was encoded, chunk by chunk, each checked before it is written. Returns an
// empty string, or why the first bad chunk was refused; chunks may then have been applied, never a
// bad one.
std::string apply(const Run& run, const Row* rows, uint64_t row_count, const StreamView* streams,
                  uint8_t* base);

// What apply would refuse, without a base: everything that format.md 4.3 asks for. `offsets`:
// becomes, for each row, the kStreams offsets at which its parts of the streams begin.
std::string check(const Run& run, const Row* rows, uint64_t row_count, const StreamView* streams,
                  std::vector<uint64_t>* offsets);

// Of every chunk. REQUIRES: the run's words have the size of `elements`.
std::vector<Statistics> statistics(const Run& run, Elements elements, const uint8_t* current,
                                   const uint8_t* base);

// The codes of lattice.h. Element i takes its phase from seed + i. `weights`: bfloat16, or null.
// REQUIRES: `step` is finite and at least 2^-149.
LatticeErrors lattice_codes(const uint8_t* values, const uint8_t* weights, uint64_t count,
                            double step, uint64_t seed, uint8_t* codes);

// The other way round. `values` may be `codes`.
void lattice_values(const uint8_t* codes, const uint8_t* weights, uint64_t count, double step,
                    uint64_t seed, uint8_t* values);

// The codes of octaves.h. `base`: codes of the same form, or null; one is taken again where |L(x')
// - L(x)| <= band. `codes` may be `base`. REQUIRES: band <= 2^26.
OctaveErrors octave_codes(const uint8_t* values, const uint8_t* base, uint64_t count,
                          const OctaveForm& form, uint32_t band, uint8_t* codes);

// The other way round. Returns the number of codes that no value has, which become 0.
uint64_t octave_values(const uint8_t* codes, uint64_t count, const OctaveForm& form,
                       uint8_t* values);

// Threads that one call may use, its caller among them. At first the processors that this process
// may run on, at most 8.
int threads();
void set_threads(int count);

// The instruction sets that this build has kernels for and this processor can run, best first, and
// the one in use: at first the one that the environment variable DELTACHECK_ISA names, or the best.
// Throws std::invalid_argument for a name that is not in the list.
std::vector<std::string> instruction_sets();
std::string instruction_set();
void use_instruction_set(const std::string& name);

}  // namespace deltacheck
