// XLA FFI handlers for the CPU: they check every buffer, then call the encoder (encoder/delta.h).
// Results have static shapes, so the streams lie one after the other in one payload, and head holds
// their lengths. A payload as large as the arrays always suffices, because a chunk is never stored
// in more bytes than its own. deltacheck/backends/orbax/capture/ffi.py calls the handlers.

#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "encoder/delta.h"
#include "handlers/buffers.h"
#include "handlers/handlers.h"
#include "xla/ffi/api/ffi.h"

namespace deltacheck {
namespace {

namespace ffi = xla::ffi;

ffi::Error encode_on_cpu(ffi::RemainingArgs arguments, ffi::Span<const int64_t> word_bytes,
                         ffi::Span<const int64_t> chunks, ffi::Span<const int64_t> bounds,
                         ffi::Span<const int64_t> ordered, ffi::RemainingRets results) {
  constexpr const char* kName = "deltacheck_encode_cpu";
  std::vector<Leaf> leaves;
  const std::string problem =
      leaves_of(arguments, results, 0, word_bytes, chunks, bounds, ordered, &leaves);
  if (!problem.empty()) return wrong(kName, problem);
  const auto result = [&](size_t i) { return *results.get<ffi::AnyBuffer>(leaves.size() + i); };
  Row* row = static_cast<Row*>(result(0)->untyped_data());
  uint32_t* head = result(1)->typed_data<uint32_t>();
  uint8_t* at = result(2)->typed_data<uint8_t>();
  try {
    std::vector<Encoded> encoded;
    uint64_t rows = 0, bytes = 0;
    // Chunk numbers continue from leaf to leaf: the rows of a call form one table.
    uint32_t first_chunk = 0;
    for (const Leaf& leaf : leaves) {
      encoded.push_back(
          encode(leaf.run, leaf.current, leaf.base, kUnchanged, ordered[encoded.size()] != 0));
      rows += encoded.back().rows.size();
      for (Row leaf_row : encoded.back().rows) {
        leaf_row.chunk += first_chunk;
        *row++ = leaf_row;
      }
      first_chunk += static_cast<uint32_t>(leaf.run.chunks);
      for (const Bytes& content : encoded.back().streams) bytes += content.size;
    }
    // If the payload is too small, head still holds the sizes, so that the caller can repeat the
    // call.
    const bool fits = bytes <= result(2)->size_bytes();
    set_number(head, kHeadRows, rows);
    set_number(head, kHeadOverflow, !fits);
    for (int stream = 0; stream < kStreams; ++stream) {
      uint64_t size = 0;
      for (const Encoded& leaf : encoded) {
        const Bytes& content = leaf.streams[stream];
        if (fits && content.size > 0) std::memcpy(at, content.data.get(), content.size);
        if (fits) at += content.size;
        size += content.size;
      }
      set_number(head, kHeadStreams + stream, size);
    }
    // No exception may leave a handler: XLA is a C interface.
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      std::string(kName) + ": out of host memory");
  } catch (const std::exception& error) {
    return wrong(kName, error.what());
  }
  return ffi::Error::Success();
}

// The order of operands and results below is an interface: deltacheck/backends/orbax relies on it.
XLA_FFI_DEFINE_HANDLER(kEncodeOnCpu, encode_on_cpu,
                       ffi::Ffi::Bind()
                           .RemainingArgs()
                           .Attr<ffi::Span<const int64_t>>("word_bytes")
                           .Attr<ffi::Span<const int64_t>>("chunks")
                           .Attr<ffi::Span<const int64_t>>("bounds")
                           .Attr<ffi::Span<const int64_t>>("ordered")
                           .RemainingRets());

}  // namespace

const Handler* handlers(int* count) {
  static const Handler all[] = {
      {"deltacheck_encode_cpu", "cpu", reinterpret_cast<void*>(kEncodeOnCpu)},
  };
  *count = static_cast<int>(sizeof all / sizeof all[0]);
  return all;
}

}  // namespace deltacheck
