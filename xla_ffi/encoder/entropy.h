// The entropy stage: writes the bytes of a stream as the files of its zarr array, as they are
// produced. Called by module.cc. docs/reference/format.md, "Arrays", defines the files.

#pragma once

#include <cstdint>
#include <vector>

#include "delta.h"

namespace deltacheck {

constexpr uint64_t kCrcBytes = 4,
                   kIndexEntryBytes =
                       16;  // behind every chunk and index; of a chunk in a shard's index

// The division of an array into files (docs/reference/format.md, "Arrays").
struct FileCut {
  uint64_t chunk_bytes;  // >= 1
  uint64_t
      chunks_per_file;  // of a zarr shard; 1 where the file is one chunk and has no shard index
  bool sharded;
};

// Writes file `number` of the stream that consists of `pieces`, in order, from the start of an
// empty file. Every chunk and the shard index end in a crc32c. The last chunk is padded with zeros.
// Returns 0, or the `errno` of the write that failed. Throws std::bad_alloc; the file is then
// unusable, too.
//
// `level`: the zstd level of a frame per chunk, >= 1 (codec `stream`); 0 stores the bytes as they
// are (codec `store`). Higher: smaller files, more time; lower: the opposite. REQUIRES: the stream
// extends into file `number`. The bytes do not depend on the number of threads. Memory: about 4 MiB
// for each of threads(), kept until the thread ends.
int write_stream_file(int descriptor, const std::vector<StreamView>& pieces, const FileCut& cut,
                      int level, uint64_t number);

}  // namespace deltacheck
