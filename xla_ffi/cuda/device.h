// The encoder on a device: the same rows and streams as encoder/delta.h gives for the same chunks,
// bit for bit.
//
// Everything here only enqueues work on a stream and returns the first CUDA error; nothing waits,
// allocates or copies to the host. All pointers are device memory unless the name says host. Sizes
// are bounded by what the caller has allocated; no kernel writes past it.

#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/runtime.h"
#include "encoder/elements.h"
#include "encoder/format.h"

namespace deltacheck {
namespace device {

// One chunk of a group: a group holds the chunks of any number of leaves, so that small ones share
// a launch.
struct Chunk {
  const uint8_t* current;  // null where there is only a base (apply, digest)
  uint8_t* base;           // null: encoded by itself
  uint32_t words;
  uint32_t word_bytes;  // 1, 2, 4 or 8; both pointers are aligned to it, and need not be to more
};

struct EncodeArguments {
  const Chunk* table;
  uint32_t chunks;
  uint8_t* scratch;  // scratch_bytes(..), 256-byte aligned
  Row* rows;  // room for `chunks`; of the chunks that changed, ascending; `chunk` counts in the
              // table
  uint64_t* head;          // kHeadEntries
  uint8_t* payload;        // the streams one after the other, each as encoder/delta.h has it
  uint64_t payload_bytes;  // its size; where it does not suffice, it holds nothing useful and head
                           // says so
  uint64_t* digests;       // room for (chunks, 2): xxh3_128 (high, low) of the new content of every
                           // row's chunk; or null
};

// Scratch for a group of so many chunks that have so many bytes together.
size_t scratch_bytes(uint32_t chunks, uint64_t bytes);

// Encodes every chunk against its base, which becomes equal to it also where the payload overflows.
cudaError_t encode(const EncodeArguments& arguments, cudaStream_t stream);

struct ApplyArguments {
  const Chunk* table;
  const Row* rows;  // REQUIRES: checked against the streams by encoder/delta.h; rows under
                    // unchanged may follow
  uint32_t row_count;
  const uint8_t* const* streams;  // kStreams pointers; null where empty
  const uint64_t* offsets;  // (row_count, kStreams): where each row's part of every stream begins
};

// Turns the bases of the table into what was encoded.
cudaError_t apply(const ApplyArguments& arguments, cudaStream_t stream);

// Of encode: digests[i] = xxh3_128 (high, low) of the current content of chunk rows[i].chunk of the
// table, for i < *count. REQUIRES: *count <= most.
cudaError_t enqueue_digests(const Chunk* table, const Row* rows, const uint64_t* count,
                            uint32_t most, uint64_t* digests, cudaStream_t stream);

// digests[i] = xxh3_128 (high, low) of the base of the table's entry i; its current where there is
// no base.
cudaError_t digest(const Chunk* table, uint32_t chunks, uint64_t* digests, cudaStream_t stream);

// results[i]: of the table's entry i, whose words are elements[i]. The bits are those of the host.
// REQUIRES: every entry has a base.
cudaError_t statistics(const Chunk* table, const Elements* elements, uint32_t chunks,
                       Statistics* results, cudaStream_t stream);

// The same numbers in columns: counts (chunks, 2), and the other three as (chunks, 3) doubles, or
// floats where not `wide`.
cudaError_t separate(const Statistics* statistics, uint32_t chunks, uint32_t* counts, void* values,
                     bool wide, cudaStream_t stream);

}  // namespace device
}  // namespace deltacheck
