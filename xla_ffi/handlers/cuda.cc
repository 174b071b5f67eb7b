// XLA FFI handlers for CUDA: check every buffer, then enqueue the device encoder on XLA's stream. Nothing here waits
// for the device. Beside the results of the CPU's handler there are digests and a workspace.

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/call.h"
#include "handlers/buffers.h"
#include "handlers/handlers.h"
#include "xla/ffi/api/ffi.h"

namespace deltacheck {
namespace {

namespace ffi = xla::ffi;

ffi::Error encode_on_cuda(cudaStream_t stream, ffi::RemainingArgs arguments, ffi::Span<const int64_t> word_bytes,
                          ffi::Span<const int64_t> chunks, ffi::Span<const int64_t> bounds,
                          ffi::RemainingRets results) {
  constexpr const char* kName = "deltacheck_encode";
  std::vector<Leaf> leaves;
  std::string problem = leaves_of(arguments, results, 2, word_bytes, chunks, bounds, &leaves);
  if (!problem.empty()) return wrong(kName, problem);
  std::vector<device::Chunk> table;
  uint64_t bytes = 0;
  for (const Leaf& leaf : leaves) {
    const uint64_t width = static_cast<uint64_t>(leaf.run.word_bytes);
    for (uint64_t chunk = 0; chunk < leaf.run.chunks; ++chunk) {
      const uint64_t start = leaf.run.bounds[chunk], words = leaf.run.bounds[chunk + 1] - start;
      table.push_back({leaf.current + start * width, leaf.base + start * width, static_cast<uint32_t>(words),
                       static_cast<uint32_t>(width)});
    }
    bytes += leaf.run.bytes();
  }
  const device::Workspace sizes(static_cast<uint32_t>(table.size()), bytes);
  const auto result = [&](size_t i) { return *results.get<ffi::AnyBuffer>(leaves.size() + i); };
  problem = mismatch("digests", *result(3), ffi::DataType::U32, "uint32", static_cast<int64_t>(table.size()), 4);
  if (problem.empty()) problem = mismatch("workspace", *result(4), ffi::DataType::U8, "uint8", -1);
  if (problem.empty() && result(4)->size_bytes() < sizes.all_bytes) {
    problem = "workspace must have at least " + std::to_string(sizes.all_bytes) + " bytes";
  }
  if (!problem.empty()) return wrong(kName, problem);
  device::EncodeArguments call{};
  call.chunks = static_cast<uint32_t>(table.size());
  call.rows = static_cast<Row*>(result(0)->untyped_data());
  call.head = static_cast<uint64_t*>(result(1)->untyped_data());
  call.payload = static_cast<uint8_t*>(result(2)->untyped_data());
  call.payload_bytes = result(2)->size_bytes();
  call.digests = static_cast<uint64_t*>(result(3)->untyped_data());
  const cudaError_t error =
      device::encode_from_host(table.data(), static_cast<uint8_t*>(result(4)->untyped_data()), sizes, call, stream);
  if (error != cudaSuccess) {
    return ffi::Error(ffi::ErrorCode::kInternal, std::string(kName) + ": " + cudaGetErrorString(error));
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kEncodeOnCuda, encode_on_cuda,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .RemainingArgs()
                           .Attr<ffi::Span<const int64_t>>("word_bytes")
                           .Attr<ffi::Span<const int64_t>>("chunks")
                           .Attr<ffi::Span<const int64_t>>("bounds")
                           .RemainingRets());

}  // namespace

const Handler* handlers(int* count) {
  static const Handler all[] = {{"deltacheck_encode", "CUDA", reinterpret_cast<void*>(kEncodeOnCuda)}};
  *count = static_cast<int>(sizeof all / sizeof all[0]);
  return all;
}

}  // namespace deltacheck
