// XLA FFI handlers for CUDA: they check every buffer, then enqueue the device encoder
// (cuda/device.h) on the stream of XLA. No handler waits for the device. In addition to the results
// of the CPU handlers there are digests and a workspace.

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

#ifdef DELTACHECK_EMULATOR
// The emulator has no streams, so its handlers bind no stream of XLA and pass a default one.
constexpr const char* kPlatform = "cpu";
#  define DELTACHECK_HANDLER(name, function, operands)                                  \
    XLA_FFI_DEFINE_HANDLER(                                                             \
        name, [](auto... arguments) { return function(cudaStream_t{}, arguments...); }, \
        ffi::Ffi::Bind() operands)
#else
constexpr const char* kPlatform = "CUDA";
#  define DELTACHECK_HANDLER(name, function, operands) \
    XLA_FFI_DEFINE_HANDLER(name, function,             \
                           ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>() operands)
#endif

// Adds the chunks of a leaf to the table of a call.
void add_chunks(const Leaf& leaf, bool ordered, std::vector<device::Chunk>* table) {
  const Run& run = leaf.run;
  const uint64_t width = static_cast<uint64_t>(run.word_bytes);
  for (uint64_t number = 0; number < run.chunks; ++number) {
    const uint64_t start = run.bounds[number], words = run.bounds[number + 1] - start;
    device::Chunk chunk{};
    chunk.current = leaf.current + start * width;
    chunk.base = leaf.base + start * width;
    chunk.words = static_cast<uint32_t>(words);
    chunk.word_bytes = static_cast<uint16_t>(width);
    chunk.ordered = ordered;
    table->push_back(chunk);
  }
}

ffi::Error failed(const char* handler, cudaError_t error) {
  return ffi::Error(ffi::ErrorCode::kInternal,
                    std::string(handler) + ": " + cudaGetErrorString(error));
}

ffi::Error encode_on_cuda(cudaStream_t stream, ffi::RemainingArgs arguments,
                          ffi::Span<const int64_t> word_bytes, ffi::Span<const int64_t> chunks,
                          ffi::Span<const int64_t> bounds, ffi::Span<const int64_t> ordered,
                          ffi::RemainingRets results) {
  constexpr const char* kName = "deltacheck_encode_cuda";
  std::vector<Leaf> leaves;
  std::string problem =
      leaves_of(arguments, results, 2, word_bytes, chunks, bounds, ordered, &leaves);
  if (!problem.empty()) return wrong(kName, problem);
  std::vector<device::Chunk> table;
  uint64_t bytes = 0;
  for (size_t i = 0; i < leaves.size(); ++i) {
    add_chunks(leaves[i], ordered[i] != 0, &table);
    bytes += leaves[i].run.bytes() * (ordered[i] != 0 ? device::kMorePieces : 1);
  }
  // XLA allocates the workspace as a result, since a handler must not allocate device memory
  // itself.
  const device::Workspace sizes(static_cast<uint32_t>(table.size()), bytes);
  const auto result = [&](size_t i) { return *results.get<ffi::AnyBuffer>(leaves.size() + i); };
  problem = mismatch("digests", *result(3), ffi::DataType::U32, "uint32",
                     static_cast<int64_t>(table.size()), 4);
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
  const cudaError_t error = device::encode_from_host(
      table.data(), static_cast<uint8_t*>(result(4)->untyped_data()), sizes, call, stream);
  return error == cudaSuccess ? ffi::Error::Success() : failed(kName, error);
}

// The order of operands and results below is an interface: deltacheck/backends/orbax relies on it.
DELTACHECK_HANDLER(kEncodeOnCuda, encode_on_cuda,
                   .RemainingArgs()
                       .Attr<ffi::Span<const int64_t>>("word_bytes")
                       .Attr<ffi::Span<const int64_t>>("chunks")
                       .Attr<ffi::Span<const int64_t>>("bounds")
                       .Attr<ffi::Span<const int64_t>>("ordered")
                       .RemainingRets());

}  // namespace

const Handler* handlers(int* count) {
  static const Handler all[] = {
      {"deltacheck_encode_cuda", kPlatform, reinterpret_cast<void*>(kEncodeOnCuda)},
  };
  *count = static_cast<int>(sizeof all / sizeof all[0]);
  return all;
}

}  // namespace deltacheck
