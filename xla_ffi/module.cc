// deltacheck._native: the encoder for NumPy memory, and the XLA handlers for jax.ffi. Thin: arguments are checked in
// Python (deltacheck/codec/memory.py), once; what would write out of bounds is checked here again. Loads without jax or
// torch.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "encoder/delta.h"
#ifdef DELTACHECK_HANDLERS
#  include "handlers/handlers.h"
#endif

namespace nb = nanobind;

namespace deltacheck {
namespace {

// Raised with INTERFACE in deltacheck/codec/native.py whenever a function here changes, so that a stale build is
// noticed.
constexpr int kInterface = 2;

template <typename T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Run run_of(const Array<const uint64_t>& bounds, uint64_t bytes, int word_bytes) {
  if (bounds.size() == 0) throw std::invalid_argument("bounds must have at least one entry");
  const Run run{bounds.data(), bounds.size() - 1, word_bytes};
  const std::string problem = problem_with(run, bytes);
  if (!problem.empty()) throw std::invalid_argument(problem);
  return run;
}

nb::object array_of(Bytes&& bytes) {
  if (bytes.size == 0) return nb::none();
  uint8_t* data = bytes.data.release();
  nb::capsule owner(data, [](void* memory) noexcept { Free()(static_cast<uint8_t*>(memory)); });
  return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {bytes.size}, owner));
}

nb::object array_of(std::vector<Row>&& rows) {
  auto* kept = new std::vector<Row>(std::move(rows));
  nb::capsule owner(kept, [](void* memory) noexcept { delete static_cast<std::vector<Row>*>(memory); });
  static_assert(sizeof(Row) == kRowWidth * sizeof(uint32_t));
  uint32_t* data = reinterpret_cast<uint32_t*>(kept->data());
  return nb::cast(nb::ndarray<nb::numpy, uint32_t, nb::ndim<2>>(data, {kept->size(), kRowWidth}, owner));
}

nb::tuple encode_arrays(const Array<const uint8_t>& current, const std::optional<Array<uint8_t>>& base,
                        const Array<const uint64_t>& bounds, int word_bytes, uint32_t method) {
  const Run run = run_of(bounds, current.size(), word_bytes);
  if (base && base->size() != current.size()) throw std::invalid_argument("base and current must have the same size");
  if (method >= kMethods || (!base && method != kUnchanged && method < kPlanes))
    throw std::invalid_argument("method " + std::to_string(method) + " cannot be asked for");
  uint8_t* shadow = base ? base->data() : nullptr;
  const uint8_t* now = current.data();
  Encoded encoded;
  {
    nb::gil_scoped_release released;
    encoded = encode(run, now, shadow, static_cast<Method>(method));
  }
  nb::list streams;
  for (Bytes& stream : encoded.streams) streams.append(array_of(std::move(stream)));
  return nb::make_tuple(array_of(std::move(encoded.rows)), streams);
}

std::optional<std::string> apply_arrays(
    const nb::ndarray<const uint32_t, nb::shape<-1, kRowWidth>, nb::c_contig, nb::device::cpu>& rows,
    const std::vector<std::optional<Array<const uint8_t>>>& streams, const Array<uint8_t>& base,
    const Array<const uint64_t>& bounds, int word_bytes) {
  if (streams.size() != kStreams) throw std::invalid_argument("streams must have one entry for each name");
  const Run run = run_of(bounds, base.size(), word_bytes);
  StreamView views[kStreams];
  for (int stream = 0; stream < kStreams; ++stream) {
    const auto& given = streams[stream];
    views[stream] = given ? StreamView{given->data(), given->size()} : StreamView{nullptr, 0};
  }
  const Row* first = reinterpret_cast<const Row*>(rows.data());
  const uint64_t row_count = rows.shape(0);
  uint8_t* shadow = base.data();
  std::string refusal;
  {
    nb::gil_scoped_release released;
    refusal = apply(run, first, row_count, views, shadow);
  }
  if (refusal.empty()) return std::nullopt;
  return refusal;
}

nb::list registrations() {
  nb::list all;
#ifdef DELTACHECK_HANDLERS
  int count = 0;
  const Handler* found = handlers(&count);
  for (int i = 0; i < count; ++i) {
    all.append(
        nb::make_tuple(found[i].name, nb::capsule(found[i].function, "xla._CUSTOM_CALL_TARGET"), found[i].platform));
  }
#endif
  return all;
}

}  // namespace
}  // namespace deltacheck

NB_MODULE(_native, m) {
  using namespace deltacheck;
  m.attr("INTERFACE") = kInterface;
  m.def("encode", encode_arrays, nb::arg("current").noconvert(), nb::arg("base").noconvert().none(),
        nb::arg("bounds").noconvert(), nb::arg("word_bytes"), nb::arg("method") = static_cast<uint32_t>(kUnchanged),
        "(rows, streams): uint32 (stored, 5), and for every stream its bytes or None. base becomes current, in place. "
        "method: for tests and measurements; 0 chooses.");
  m.def("apply", apply_arrays, nb::arg("rows").noconvert(), nb::arg("streams").noconvert(), nb::arg("base").noconvert(),
        nb::arg("bounds").noconvert(), nb::arg("word_bytes"), "None, or why the first bad chunk was refused.");
  m.def("registrations", registrations,
        "[(target name, capsule, platform)] for jax.ffi.register_ffi_target; empty if built without.");
  m.def("threads", threads);
  m.def("set_threads", set_threads, nb::arg("count"));
  m.def("instruction_sets", instruction_sets);
  m.def("instruction_set", instruction_set);
  m.def("use_instruction_set", use_instruction_set, nb::arg("name"));
}
