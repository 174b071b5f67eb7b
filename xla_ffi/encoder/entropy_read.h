// The entropy stage backwards: bytes of a stream from the files of its zarr array, every checksum compared.

#pragma once

#include <cstdint>
#include <string>

#include "entropy.h"

namespace deltacheck {

// Fills `out` with bytes `begin` to `end` of what one file holds, counted from the file's first chunk. Returns "", or
// what is wrong with the file, whatever it holds; `out` is then undefined. Reads nothing behind what the file's index
// says, and decodes only chunks that hold wanted bytes. Throws std::bad_alloc.
//
// REQUIRES: begin < end <= cut.chunk_bytes * cut.chunks_per_file. Of `cut.level` counts only whether it is 0.
// Memory: two chunks for each of threads(), kept until the thread ends.
std::string read_stream_file(int descriptor, const StreamCut& cut, uint64_t begin, uint64_t end, uint8_t* out);

}  // namespace deltacheck
