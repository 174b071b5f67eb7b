// The entropy stage: a stream's bytes as the files of its zarr array, written as they are made.

#pragma once

#include <cstdint>
#include <vector>

#include "delta.h"

namespace deltacheck {

constexpr uint64_t kCrcBytes = 4,
                   kIndexEntryBytes =
                       16;  // behind every chunk and index; of a chunk in a shard's index

// How an array is cut into files (docs/reference/format.md, "Arrays").
struct FileCut {
  uint64_t chunk_bytes;  // >= 1
  uint64_t
      chunks_per_file;  // of a zarr shard; 1 where the file is one chunk and has no shard index
  bool sharded;
};

// Writes file `number` of the stream that `pieces` are, in order, from the start of an empty file.
// Every chunk ends in its crc32c, and so does the shard index; the last chunk is filled up with
// zeros. Returns 0, or the `errno` of the write that failed. Throws std::bad_alloc; the file is
// then of no use, too.
//
// `level`: one zstd frame a chunk, of this level, >= 1 (codec `stream`); 0: the bytes as they are
// (codec `store`). REQUIRES: the stream reaches into file `number`. The bytes do not depend on how
// many threads work on them. Memory: about 4 MiB for each of threads(), kept until the thread ends.
int write_stream_file(int descriptor, const std::vector<StreamView>& pieces, const FileCut& cut,
                      int level, uint64_t number);

}  // namespace deltacheck
