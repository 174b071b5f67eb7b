// Encodes and applies runs of chunks on the host, on several threads. The entry points
// for module.cc and the CPU handlers. No result depends on the number of threads. Rows and streams
// are defined in docs/reference/format.md, section 4.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "adam.h"
#include "blocks.h"
#include "format.h"
#include "lattice.h"
#include "octaves.h"
#include "ratios.h"
#include "run.h"

namespace deltacheck {

struct Encoded {
  std::vector<Row> rows;  // of the chunks that changed, ascending
  Bytes streams[kStreams];
};

// Encodes `current` against `base`, which becomes equal to it. If `base` is null, every chunk is
// stored by itself. Throws std::bad_alloc; the base is then a mixture, and the caller must discard
// it.
//
// `method`: used for every changed chunk instead of the cheapest one. Sparse or bitmap streams
// larger than the chunk are replaced by raw. kUnchanged selects the cheapest. REQUIRES: without a
// base only planes and raw may be requested.
//
// `method` may be a law: each chunk of three equal parts is then encoded against the prediction of
// `law`, unless that takes too many bytes; the other chunks take the cheapest method. REQUIRES:
// words of 4 bytes, a base, and a known law.
//
// `ordered`: sparse and bitmap chunks of words of 2 bytes are stored in the order of order.h.
// True: fewer bytes for floats of 16 bits, more time; false: the opposite.
//
// Memory: the size of the output, about 3 chunks per thread, and kKeptBytes. Address space: up to
// six times the run, released at the end.
Encoded encode(const Run& run, const uint8_t* current, uint8_t* base, Method method = kUnchanged,
               bool ordered = false, const AdamLaw* law = nullptr);

struct StreamView {
  const uint8_t* data;  // null if size is 0
  uint64_t size;
};

// Applies a delta to `base`, chunk by chunk; each chunk is checked before it is written. Returns an
// empty string, or the reason why the first bad chunk was refused. Other chunks may have been
// applied by then, but never a bad one.
std::string apply(const Run& run, const Row* rows, uint64_t row_count, const StreamView* streams,
                  uint8_t* base);

// A row of any delta with its chunk. `offsets`: the kStreams offsets of its parts
// in one memory that holds all streams; only those of streams in which it has bytes matter.
struct PlacedRow {
  Row row;
  uint64_t words;
  int word_bytes;
  uint8_t* chunk;
  const uint64_t* offsets;
};

// Applies rows of several deltas, each checked before it is written. Consecutive rows of the same
// chunk are applied in order by one thread, while the chunk is in its cache. Returns an empty
// string, or the reason why the first bad row was refused, and its number. Other rows may have been
// applied by then, but never a bad one. REQUIRES: rows of one chunk are consecutive, and different
// chunks are disjoint in memory.
std::string apply_rows(const std::vector<PlacedRow>& rows, const StreamView& streams,
                       uint64_t* bad_row);

// Writes the codes of lattice.h. Element i takes its phase from seed + i. `weights`: bfloat16, or
// null. `step`: after the halvings. REQUIRES: `step` is finite and at least 2^-149, halvings is at
// most 31, and spare_bits at most 7.
LatticeErrors lattice_codes(const uint8_t* values, const uint8_t* weights, uint64_t count,
                            double step, uint64_t seed, uint32_t halvings, uint32_t spare_bits,
                            uint8_t* codes);

// The inverse of lattice_codes. `values` may be the memory of `codes`. Returns the number of codes
// that no value has.
uint64_t lattice_values(const uint8_t* codes, const uint8_t* weights, uint64_t count, double step,
                        uint64_t seed, uint32_t halvings, uint32_t spare_bits, uint8_t* values);

// Measures the errors of weights that are cast from the codes of lattice.h. `weights`: bfloat16.
// The other arguments are as in lattice_codes.
CastErrors lattice_cast_errors(const uint8_t* values, const uint8_t* weights, uint64_t count,
                               double step, uint64_t seed, uint32_t halvings, uint32_t spare_bits);

// Writes the codes of nested.h, of `code_bytes` 1 or 2. `step`: after the halvings. Otherwise as
// lattice_codes; `weights` are required. REQUIRES: halvings is at most 31, and spare_bits at
// most 7.
LatticeErrors nested_codes(const uint8_t* values, const uint8_t* weights, uint64_t count,
                           double step, uint64_t seed, uint32_t code_bytes, uint32_t halvings,
                           uint32_t spare_bits, uint8_t* codes);

// The inverse of nested_codes. Returns the number of codes that no value has.
uint64_t nested_values(const uint8_t* codes, const uint8_t* weights, uint64_t count, double step,
                       uint64_t seed, uint32_t code_bytes, uint32_t halvings, uint32_t spare_bits,
                       uint8_t* values);

// Writes the codes of octaves.h. `base`: codes of the same form, or null. A code of the base is
// reused if |L(x') - L(x)| <= band. `codes` may be the memory of `base`. Returns the number of
// values that have no code; theirs becomes 0. REQUIRES: band <= 2^26.
uint64_t octave_codes(const uint8_t* values, const uint8_t* base, uint64_t count,
                      const OctaveForm& form, uint32_t band, uint8_t* codes);

// The inverse of octave_codes. Returns the number of codes that no value has; these become 0.
uint64_t octave_values(const uint8_t* codes, uint64_t count, const OctaveForm& form,
                       uint8_t* values);

// Writes the codes of ratios.h, of one byte. `values`, `variances`: float32.
RatioErrors ratio_codes(const uint8_t* values, const uint8_t* variances, uint64_t count,
                        const RatioForm& form, uint8_t* codes);

// The inverse of ratio_codes. Returns the number of codes that no value has; these become 0.
uint64_t ratio_values(const uint8_t* codes, const uint8_t* variances, uint64_t count,
                      const RatioForm& form, uint8_t* values);

// The number of threads that one call may use, including its caller. By default the processors
// available to this process, at most 8. More: faster calls; fewer: more processors left for
// training.
int threads();
void set_threads(int count);

// The instruction sets that this build has kernels for and this processor can run, best first, and
// the one in use. Initially it is the one that the environment variable DELTACHECK_ISA names, or
// the best. Throws std::invalid_argument for a name that is not in the list.
std::vector<std::string> instruction_sets();
std::string instruction_set();
void use_instruction_set(const std::string& name);

}  // namespace deltacheck
