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

// Adds the chunks of a run to the table of a call.
void add_chunks(const Run& run, const uint8_t* current, uint8_t* base,
                std::vector<device::Chunk>* table) {
  const uint64_t width = static_cast<uint64_t>(run.word_bytes);
  for (uint64_t chunk = 0; chunk < run.chunks; ++chunk) {
    const uint64_t start = run.bounds[chunk], words = run.bounds[chunk + 1] - start;
    table->push_back({current == nullptr ? nullptr : current + start * width, base + start * width,
                      static_cast<uint32_t>(words), static_cast<uint32_t>(width)});
  }
}

ffi::Error failed(const char* handler, cudaError_t error) {
  return ffi::Error(ffi::ErrorCode::kInternal,
                    std::string(handler) + ": " + cudaGetErrorString(error));
}

ffi::Error encode_on_cuda(cudaStream_t stream, ffi::RemainingArgs arguments,
                          ffi::Span<const int64_t> word_bytes, ffi::Span<const int64_t> chunks,
                          ffi::Span<const int64_t> bounds, ffi::RemainingRets results) {
  constexpr const char* kName = "deltacheck_encode_cuda";
  std::vector<Leaf> leaves;
  std::string problem = leaves_of(arguments, results, 2, word_bytes, chunks, bounds, &leaves);
  if (!problem.empty()) return wrong(kName, problem);
  std::vector<device::Chunk> table;
  uint64_t bytes = 0;
  for (const Leaf& leaf : leaves) {
    add_chunks(leaf.run, leaf.current, leaf.base, &table);
    bytes += leaf.run.bytes();
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

// The host has already checked the rows and the offsets of their streams, with `check` of
// encoder/delta.h.
ffi::Error apply_on_cuda(cudaStream_t stream, ffi::AnyBuffer base, ffi::AnyBuffer rows,
                         ffi::AnyBuffer offsets, ffi::AnyBuffer payload, int64_t word_bytes,
                         ffi::Span<const int64_t> bounds, ffi::Result<ffi::AnyBuffer> new_base,
                         ffi::Result<ffi::AnyBuffer> workspace) {
  constexpr const char* kName = "deltacheck_apply_cuda";
  uint64_t bytes = 0;
  if (!bytes_of(base, &bytes))
    return wrong(kName, "base has an element type that the encoder cannot take");
  if (new_base->untyped_data() != base.untyped_data() ||
      new_base->element_count() != base.element_count()) {
    return wrong(kName, "new_base must be an alias of base");
  }
  if (bounds.size() == 0) return wrong(kName, "bounds must have at least one entry");
  const Run run{reinterpret_cast<const uint64_t*>(bounds.begin()), bounds.size() - 1,
                static_cast<int>(word_bytes)};
  std::string problem = problem_with(run, bytes);
  if (problem.empty())
    problem = mismatch("rows", rows, ffi::DataType::U32, "uint32", -1, kRowWidth);
  if (problem.empty()) {
    problem = mismatch("offsets", offsets, ffi::DataType::U32, "uint32", rows.dimensions()[0],
                       2 * kStreams);
  }
  if (problem.empty()) problem = mismatch("payload", payload, ffi::DataType::U8, "uint8", -1);
  if (!problem.empty()) return wrong(kName, problem);
  std::vector<device::Chunk> table;
  add_chunks(run, nullptr, static_cast<uint8_t*>(new_base->untyped_data()), &table);
  const size_t table_bytes = table.size() * sizeof(device::Chunk);
  // All streams lie in the payload, so every stream begins at its start and offsets count from
  // there.
  const std::vector<const uint8_t*> streams(kStreams, payload.typed_data<uint8_t>());
  problem = mismatch("workspace", *workspace, ffi::DataType::U8, "uint8",
                     static_cast<int64_t>(table_bytes + kStreams * sizeof(uint8_t*)));
  if (!problem.empty()) return wrong(kName, problem);
  // The table is in pageable memory. The runtime has copied it when cudaMemcpyAsync returns, so it
  // may go out of scope.
  uint8_t* const device_memory = static_cast<uint8_t*>(workspace->untyped_data());
  cudaError_t error =
      cudaMemcpyAsync(device_memory, table.data(), table_bytes, cudaMemcpyHostToDevice, stream);
  if (error == cudaSuccess) {
    error = cudaMemcpyAsync(device_memory + table_bytes, streams.data(),
                            kStreams * sizeof(uint8_t*), cudaMemcpyHostToDevice, stream);
  }
  if (error != cudaSuccess) return failed(kName, error);
  device::ApplyArguments call{};
  call.table = reinterpret_cast<const device::Chunk*>(device_memory);
  call.rows = static_cast<const Row*>(rows.untyped_data());
  call.row_count = static_cast<uint32_t>(rows.dimensions()[0]);
  call.streams = reinterpret_cast<const uint8_t* const*>(device_memory + table_bytes);
  call.offsets = static_cast<const uint64_t*>(offsets.untyped_data());
  error = device::apply(call, stream);
  return error == cudaSuccess ? ffi::Error::Success() : failed(kName, error);
}

// The order of operands and results below is an interface: deltacheck/backends/orbax relies on it.
DELTACHECK_HANDLER(kEncodeOnCuda, encode_on_cuda,
                   .RemainingArgs()
                       .Attr<ffi::Span<const int64_t>>("word_bytes")
                       .Attr<ffi::Span<const int64_t>>("chunks")
                       .Attr<ffi::Span<const int64_t>>("bounds")
                       .RemainingRets());

DELTACHECK_HANDLER(kApplyOnCuda, apply_on_cuda,
                   .Arg<ffi::AnyBuffer>()
                       .Arg<ffi::AnyBuffer>()
                       .Arg<ffi::AnyBuffer>()
                       .Arg<ffi::AnyBuffer>()
                       .Attr<int64_t>("word_bytes")
                       .Attr<ffi::Span<const int64_t>>("bounds")
                       .Ret<ffi::AnyBuffer>()
                       .Ret<ffi::AnyBuffer>());

}  // namespace

const Handler* handlers(int* count) {
  static const Handler all[] = {
      {"deltacheck_encode_cuda", kPlatform, reinterpret_cast<void*>(kEncodeOnCuda)},
      {"deltacheck_apply_cuda", kPlatform, reinterpret_cast<void*>(kApplyOnCuda)},
  };
  *count = static_cast<int>(sizeof all / sizeof all[0]);
  return all;
}

}  // namespace deltacheck
