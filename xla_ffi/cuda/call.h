// One call of the device encoder from a table that lies in host memory.

#pragma once

#include "cuda/device.h"

namespace deltacheck {
namespace device {

// Device memory that a call needs beside its results: the table and the encoder's scratch.
struct Workspace {
  Workspace(uint32_t chunks, uint64_t bytes)
      : table_bytes((chunks * sizeof(Chunk) + 255) / 256 * 256),
        all_bytes(table_bytes + scratch_bytes(chunks, bytes)) {}

  size_t table_bytes, all_bytes;
};

// Copies `host_table` to the workspace and encodes. `arguments` needs no table and no scratch. The
// table may change when this returns if it lies in pageable memory, else when the stream has come
// to the end of the copy.
inline cudaError_t encode_from_host(const Chunk* host_table, uint8_t* workspace,
                                    const Workspace& sizes, EncodeArguments arguments,
                                    cudaStream_t stream) {
  const cudaError_t error = cudaMemcpyAsync(workspace, host_table, arguments.chunks * sizeof(Chunk),
                                            cudaMemcpyHostToDevice, stream);
  if (error != cudaSuccess) return error;
  arguments.table = reinterpret_cast<const Chunk*>(workspace);
  arguments.scratch = workspace + sizes.table_bytes;
  return encode(arguments, stream);
}

}  // namespace device
}  // namespace deltacheck
