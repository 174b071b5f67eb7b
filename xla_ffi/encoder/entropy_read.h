// The inverse of the entropy stage: reads the bytes of an array from its zarr files, and verifies
// every checksum. Called by module.cc. docs/reference/format.md, "Arrays", defines the files.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "entropy.h"

namespace deltacheck {

enum class ChunkCodec { kStore, kZstd, kBlosc };  // the encoding of a chunk's bytes

// An open file of an array.
struct SourceFile {
  int descriptor;
  FileCut cut;
  ChunkCodec codec;
};

// A range of the content of file number `file`, counted from the file's first chunk, and the memory
// that receives it. REQUIRES: begin + size <= cut.chunk_bytes * cut.chunks_per_file.
struct Piece {
  uint64_t file, begin, size;
  uint8_t* out;
};

// The damage that ended a call, and the file; no damage if `why` is empty.
struct ReadRefusal {
  uint64_t file = 0;
  std::string why;
};

// Fills the memory of all pieces, or returns the damage, for any content of the files; the memory
// is then undefined. Reads nothing behind the end that a file's index implies, and decodes each
// chunk that holds requested bytes once. Throws std::bad_alloc.
//
// REQUIRES: pieces do not overlap in memory. Memory: two chunks for each of
// threads(), kept until the thread ends.
ReadRefusal read_pieces(const std::vector<SourceFile>& files, const std::vector<Piece>& pieces);

}  // namespace deltacheck
