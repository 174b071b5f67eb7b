// The entropy stage backwards: bytes of an array from its zarr files, every checksum compared.

#pragma once

#include <cstdint>
#include <string>

#include "entropy.h"

namespace deltacheck {

enum class ChunkCodec {
  kStore,
  kZstd,
  kBlosc
};  // what is between a chunk's bytes and its checksum

bool can_read(ChunkCodec codec);  // whether the build has its library

// Fills `out` with bytes `begin` to `end` of what one file holds, counted from the file's first
// chunk. Returns "", or what is wrong with the file, whatever it holds; `out` is then undefined.
// Reads nothing behind what the file's index says, and decodes only chunks that hold wanted bytes.
// Throws std::bad_alloc.
//
// REQUIRES: begin < end <= cut.chunk_bytes * cut.chunks_per_file; can_read(codec).
// Memory: two chunks for each of threads(), kept until the thread ends.
std::string read_array_file(int descriptor, const FileCut& cut, ChunkCodec codec, uint64_t begin,
                            uint64_t end, uint8_t* out);

}  // namespace deltacheck
