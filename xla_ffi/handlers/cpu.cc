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

// Checks `bounds` and makes a run. `offsets` owns the memory that the run points to.
std::string make_run(const ffi::AnyBuffer& bounds, uint64_t bytes, int64_t word_bytes,
                     std::vector<uint64_t>* offsets, Run* run) {
  std::string problem = mismatch("bounds", bounds, ffi::DataType::U32, "uint32", -1, 2);
  if (!problem.empty()) return problem;
  const int64_t entries = bounds.dimensions()[0];
  if (entries < 1) return "bounds must have at least one entry";
  offsets->resize(static_cast<size_t>(entries));
  for (int64_t i = 0; i < entries; ++i) (*offsets)[i] = number_at(bounds.typed_data<uint32_t>(), i);
  *run = Run{offsets->data(), static_cast<uint64_t>(entries - 1), static_cast<int>(word_bytes)};
  return problem_with(*run, bytes);
}

ffi::Error encode_on_cpu(ffi::RemainingArgs arguments, ffi::Span<const int64_t> word_bytes,
                         ffi::Span<const int64_t> chunks, ffi::Span<const int64_t> bounds,
                         ffi::Span<const int64_t> ordered, ffi::RemainingRets results) {
  constexpr const char* kName = "deltacheck_encode_cpu";
  std::vector<Leaf> leaves;
  const std::string problem = leaves_of(arguments, results, 0, word_bytes, chunks, bounds, &leaves);
  if (!problem.empty()) return wrong(kName, problem);
  if (ordered.size() != leaves.size())
    return wrong(kName, "ordered must have one entry for each leaf");
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

ffi::Error apply_on_cpu(ffi::AnyBuffer base, ffi::AnyBuffer rows, ffi::AnyBuffer head,
                        ffi::AnyBuffer payload, ffi::AnyBuffer bounds, int64_t word_bytes,
                        ffi::Result<ffi::AnyBuffer> new_base) {
  constexpr const char* kName = "deltacheck_apply_cpu";
  uint64_t bytes = 0;
  if (!bytes_of(base, &bytes))
    return wrong(kName, "base has an element type that the encoder cannot take");
  if (new_base->untyped_data() != base.untyped_data() ||
      new_base->element_type() != base.element_type() ||
      new_base->element_count() != base.element_count()) {
    return wrong(kName, "new_base must be an alias of base");
  }
  std::vector<uint64_t> offsets;
  Run run{};
  std::string problem = make_run(bounds, bytes, word_bytes, &offsets, &run);
  if (problem.empty())
    problem = mismatch("rows", rows, ffi::DataType::U32, "uint32", -1, kRowWidth);
  if (problem.empty())
    problem = mismatch("head", head, ffi::DataType::U32, "uint32", kHeadEntries, 2);
  if (problem.empty()) problem = mismatch("payload", payload, ffi::DataType::U8, "uint8", -1);
  if (!problem.empty()) return wrong(kName, problem);
  const uint32_t* numbers = head.typed_data<uint32_t>();
  const uint64_t row_count = number_at(numbers, kHeadRows);
  // head is data that was read from storage, so none of its numbers is trusted.
  if (row_count > static_cast<uint64_t>(rows.dimensions()[0]))
    return wrong(kName, "head names more rows than there are");
  StreamView streams[kStreams];
  const uint8_t* at = payload.typed_data<uint8_t>();
  uint64_t rest = payload.size_bytes();
  for (int stream = 0; stream < kStreams; ++stream) {
    const uint64_t size = number_at(numbers, kHeadStreams + stream);
    if (size > rest) return wrong(kName, "head names more bytes than payload has");
    streams[stream] = StreamView{size > 0 ? at : nullptr, size};
    at += size;
    rest -= size;
  }
  try {
    problem = apply(run, static_cast<const Row*>(rows.untyped_data()), row_count, streams,
                    static_cast<uint8_t*>(new_base->untyped_data()));
  } catch (const std::exception& error) {
    return wrong(kName, error.what());
  }
  // The Python side uses DATA_LOSS to distinguish damage from misuse.
  if (!problem.empty()) return ffi::Error(ffi::ErrorCode::kDataLoss, problem);
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

XLA_FFI_DEFINE_HANDLER(kApplyOnCpu, apply_on_cpu,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Attr<int64_t>("word_bytes")
                           .Ret<ffi::AnyBuffer>());

}  // namespace

const Handler* handlers(int* count) {
  static const Handler all[] = {
      {"deltacheck_encode_cpu", "cpu", reinterpret_cast<void*>(kEncodeOnCpu)},
      {"deltacheck_apply_cpu", "cpu", reinterpret_cast<void*>(kApplyOnCpu)},
  };
  *count = static_cast<int>(sizeof all / sizeof all[0]);
  return all;
}

}  // namespace deltacheck
