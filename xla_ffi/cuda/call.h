// One call of the device encoder with a table in host memory. Used by module_cuda.cc and
// handlers/cuda.cc.

#pragma once

#include "cuda/device.h"

namespace deltacheck {
namespace device {

// The device memory that a call needs in addition to its results: the table and the scratch of the
// encoder.
struct Workspace {
  Workspace(uint32_t chunks, uint64_t bytes)
      : table_bytes((chunks * sizeof(Chunk) + 255) / 256 * 256),
        all_bytes(table_bytes + scratch_bytes(chunks, bytes)) {}

  size_t table_bytes, all_bytes;
};

// Copies `host_table` to the workspace and encodes. `arguments` needs no table and no scratch. The
// caller may change a table in pageable memory when this returns. A table in pinned memory must
// stay unchanged until the stream has executed the copy.
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
