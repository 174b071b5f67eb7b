// Checks of XLA buffers, and the representation of numbers in them. Shared by the handlers for the
// CPU (cpu.cc) and for CUDA (cuda.cc). docs/reference/format.md, section 4, defines rows and
// streams.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "encoder/format.h"
#include "encoder/run.h"
#include "xla/ffi/api/ffi.h"

namespace deltacheck {
namespace {

namespace ffi = xla::ffi;

inline ffi::Error wrong(const char* handler, const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string(handler) + ": " + what);
}

inline std::string shape_of(const ffi::AnyBuffer& buffer) {
  std::string text = "(";
  for (int64_t size : buffer.dimensions())
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + ")";
}

// Returns the bytes of a buffer. Returns false for element types of less than a byte, which XLA
// packs, and for types that are newer than these headers.
inline bool bytes_of(const ffi::AnyBuffer& buffer, uint64_t* bytes) {
  switch (const ffi::DataType type = buffer.element_type()) {
    case ffi::DataType::S1:
    case ffi::DataType::S2:
    case ffi::DataType::S4:
    case ffi::DataType::U1:
    case ffi::DataType::U2:
    case ffi::DataType::U4:
    case ffi::DataType::F4E2M1FN:
      return false;
    default:
      if (type > ffi::DataType::F8E8M0FNU || ffi::ByteWidth(type) == 0) return false;
      *bytes = buffer.size_bytes();
      return true;
  }
}

// Returns an empty string if `buffer` has the type and the shape. A negative size matches any size.
inline std::string mismatch(const char* operand, const ffi::AnyBuffer& buffer, ffi::DataType type,
                            const char* type_name, int64_t rows, int64_t columns = 0) {
  const auto sizes = buffer.dimensions();
  const bool fits = buffer.element_type() == type && sizes.size() == (columns > 0 ? 2 : 1) &&
                    (rows < 0 || sizes[0] == rows) && (columns == 0 || sizes[1] == columns);
  if (fits) return "";
  std::string expected = "(" + (rows < 0 ? std::string("*") : std::to_string(rows));
  if (columns > 0) expected += ", " + std::to_string(columns);
  return std::string(operand) + " must be " + type_name + " of shape " + expected +
         "), not element type " + std::to_string(static_cast<int>(buffer.element_type())) +
         " of shape " + shape_of(buffer);
}

// 64-bit numbers are passed as pairs of uint32, low half first, because JAX has no uint64 unless
// jax_enable_x64 is set.
inline void set_number(uint32_t* pairs, int64_t i, uint64_t number) {
  pairs[2 * i] = static_cast<uint32_t>(number);
  pairs[2 * i + 1] = static_cast<uint32_t>(number >> 32);
}

// A leaf of a call. The operands are n current arrays followed by their n bases. The first n
// results are the new bases, which must be aliases of the bases.
struct Leaf {
  Run run;
  const uint8_t* current;
  uint8_t* base;
};

// Checks the leaves, and the results that exist on every platform. `word_bytes`, `chunks`,
// `ordered`: one number per leaf; `bounds`: the chunks + 1 bounds of every leaf, one leaf after the
// other. Returns the first problem, or an empty string.
inline std::string leaves_of(ffi::RemainingArgs& arguments, ffi::RemainingRets& results,
                             size_t more_results, ffi::Span<const int64_t> word_bytes,
                             ffi::Span<const int64_t> chunks, ffi::Span<const int64_t> bounds,
                             ffi::Span<const int64_t> ordered, std::vector<Leaf>* leaves) {
  static_assert(sizeof(int64_t) == sizeof(uint64_t));
  const size_t count = word_bytes.size();
  if (chunks.size() != count || arguments.size() != 2 * count ||
      results.size() != count + 3 + more_results) {
    return "there must be a number of chunks, a current array, a base and a new base for each of "
           "the " +
           std::to_string(count) + " word sizes, and " + std::to_string(3 + more_results) +
           " more results";
  }
  if (ordered.size() != count) return "ordered must have one entry for each leaf";
  uint64_t at = 0, all_chunks = 0;
  for (size_t i = 0; i < count; ++i) {
    const std::string leaf = "leaf " + std::to_string(i) + ": ";
    const auto current = *arguments.get<ffi::AnyBuffer>(i),
               base = *arguments.get<ffi::AnyBuffer>(count + i);
    auto new_base = *results.get<ffi::AnyBuffer>(i);
    uint64_t bytes = 0;
    if (!bytes_of(current, &bytes))
      return leaf + "current has an element type that the encoder cannot take";
    if (base.element_type() != current.element_type() || shape_of(base) != shape_of(current)) {
      return leaf + "base has shape " + shape_of(base) + ", current has " + shape_of(current) +
             "; they must agree in shape and element type";
    }
    if (new_base->untyped_data() != base.untyped_data() ||
        new_base->element_type() != base.element_type() ||
        new_base->element_count() != base.element_count()) {
      return leaf + "new_base must be an alias of base";
    }
    if (chunks[i] < 0 || static_cast<uint64_t>(chunks[i]) >= bounds.size() - at)
      return leaf + "bounds end before it";
    const Run run{reinterpret_cast<const uint64_t*>(bounds.begin()) + at,
                  static_cast<uint64_t>(chunks[i]), static_cast<int>(word_bytes[i])};
    const std::string problem = problem_with(run, bytes);
    if (!problem.empty()) return leaf + problem;
    leaves->push_back({run, static_cast<const uint8_t*>(current.untyped_data()),
                       static_cast<uint8_t*>(new_base->untyped_data())});
    at += run.chunks + 1;
    all_chunks += run.chunks;
  }
  if (at != bounds.size()) return "bounds go on after the last leaf";
  std::string problem = mismatch("rows", **results.get<ffi::AnyBuffer>(count), ffi::DataType::U32,
                                 "uint32", static_cast<int64_t>(all_chunks), kRowWidth);
  if (problem.empty()) {
    problem = mismatch("head", **results.get<ffi::AnyBuffer>(count + 1), ffi::DataType::U32,
                       "uint32", kHeadEntries, 2);
  }
  if (problem.empty()) {
    problem = mismatch("payload", **results.get<ffi::AnyBuffer>(count + 2), ffi::DataType::U8,
                       "uint8", -1);
  }
  return problem;
}

}  // namespace
}  // namespace deltacheck
