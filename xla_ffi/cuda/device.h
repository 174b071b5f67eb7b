// The encoder on a device. It produces the same rows and streams as encoder/delta.h for the same
// chunks, bit for bit; docs/reference/format.md, section 4, defines them. Called by module_cuda.cc
// and handlers/cuda.cc.
//
// All functions only enqueue work on a stream and return the first CUDA error. None of them waits,
// allocates or copies to the host. All pointers are device memory unless the name says host. Sizes
// are bounded by the caller's allocations; no kernel writes past them.

#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/runtime.h"
#include "encoder/adam.h"
#include "encoder/format.h"

namespace deltacheck {
namespace device {

// A chunk of a group. A group holds the chunks of any number of leaves, so that small leaves share
// a kernel launch.
struct Chunk {
  const uint8_t* current;  // null if there is only a base (digest)
  uint8_t* base;           // null: the chunk is encoded by itself
  uint32_t words;
  uint16_t word_bytes;  // 1, 2, 4 or 8; both pointers are aligned to this
  uint8_t ordered;      // not 0: sparse and bitmap chunks are ordered (4.1), of words of 2 bytes
  uint8_t method;       // kUnchanged: the method is chosen; else the method of `law`
  AdamLaw law;
};

struct EncodeArguments {
  const Chunk* table;
  uint32_t chunks;
  uint8_t* scratch;  // scratch_bytes(..), 256-byte aligned
  // Room for `chunks` rows: those of the changed chunks, ascending. `Row::chunk` indexes the table.
  Row* rows;
  uint64_t* head;  // kHeadEntries numbers
  // The streams one after the other, each as encoder/delta.h has it. If the size does not suffice,
  // the content is undefined and head reports the overflow.
  uint8_t* payload;
  uint64_t payload_bytes;
  // Null, or room for (chunks, 2): xxh3_128 (high, low) of the new content of every row's chunk.
  uint64_t* digests;
};

// How often the bytes of a chunk that is ordered or has a law count in scratch. MORE_PIECES of
// deltacheck/codec/base.py is the same number.
constexpr uint64_t kMorePieces = 3;

// Returns the scratch bytes for a group of `chunks` chunks that have `bytes` bytes together, where
// those of an ordered chunk, and of one with a law, count kMorePieces times.
size_t scratch_bytes(uint32_t chunks, uint64_t bytes);

// Encodes every chunk against its base, which becomes equal to it even if the payload overflows.
cudaError_t encode(const EncodeArguments& arguments, cudaStream_t stream);

// A part of encode: writes digests[i] = xxh3_128 (high, low) of the current content of chunk
// rows[i].chunk of the table, for i < *count. REQUIRES: *count <= most.
cudaError_t enqueue_digests(const Chunk* table, const Row* rows, const uint64_t* count,
                            uint32_t most, uint64_t* digests, cudaStream_t stream);

// Writes digests[i] = xxh3_128 (high, low) of the base of the table's entry i, or of its current if
// it has no base.
cudaError_t digest(const Chunk* table, uint32_t chunks, uint64_t* digests, cudaStream_t stream);

}  // namespace device
}  // namespace deltacheck
