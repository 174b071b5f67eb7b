// The inverse of the entropy stage: reads the bytes of an array from its zarr files, and verifies
// every checksum. Called by module.cc. docs/reference/format.md, "Arrays", defines the files.

#pragma once

#include <cstdint>
#include <string>

#include "entropy.h"

namespace deltacheck {

enum class ChunkCodec { kStore, kZstd, kBlosc };  // the encoding of a chunk's bytes

bool can_read(ChunkCodec codec);  // true if the build has its library

// Fills `out` with bytes `begin` to `end` of the content of one file, counted from the file's first
// chunk. Returns "", or a description of the damage, for any content of the file; `out` is then
// undefined. Reads nothing behind the end that the file's index implies, and decodes only chunks
// that hold requested bytes. Throws std::bad_alloc.
//
// REQUIRES: begin < end <= cut.chunk_bytes * cut.chunks_per_file; can_read(codec). Memory: two
// chunks for each of threads(), kept until the thread ends.
std::string read_array_file(int descriptor, const FileCut& cut, ChunkCodec codec, uint64_t begin,
                            uint64_t end, uint8_t* out);

}  // namespace deltacheck
