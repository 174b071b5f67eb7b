// deltacheck._native: the encoder for NumPy memory, and the XLA handlers for jax.ffi. A thin layer:
// deltacheck/codec/memory.py checks the arguments once, in Python, and this file repeats only the
// checks that keep memory accesses in bounds. It loads without jax or torch.
// docs/reference/format.md, section 4, defines rows and streams.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "encoder/canonical.h"
#include "encoder/changes.h"
#include "encoder/crc32c.h"
#include "encoder/delta.h"
#include "encoder/entropy.h"
#include "encoder/entropy_read.h"
#include "encoder/fingerprint.h"
#include "handlers/registrations.h"
#include "objects.h"

namespace nb = nanobind;

namespace deltacheck {
namespace {

// Incremented together with INTERFACE in deltacheck/codec/extension.py whenever a function here
// changes, so that a stale build is detected.
constexpr int kInterface = 16;

template <typename T>
// Contiguous, one-dimensional, in host memory. nanobind refuses every other array.
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Makes a run. Throws std::invalid_argument, which nanobind turns into ValueError.
Run run_of(const Array<const uint64_t>& bounds, uint64_t bytes, int word_bytes) {
  if (bounds.size() == 0) throw std::invalid_argument("bounds must have at least one entry");
  const Run run{bounds.data(), bounds.size() - 1, word_bytes};
  const std::string problem = problem_with(run, bytes);
  if (!problem.empty()) throw std::invalid_argument(problem);
  return run;
}

// Returns the memory as a NumPy array without a copy. The capsule releases it together with the
// array.
nb::object array_of(Bytes&& bytes) {
  if (bytes.size == 0) return nb::none();
  uint8_t* data = bytes.data.release();
  nb::capsule owner(data, [](void* memory) noexcept { Free()(static_cast<uint8_t*>(memory)); });
  return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {bytes.size}, owner));
}

// Returns rows as a uint32 array (rows, kRowWidth) without a copy.
nb::object array_of(std::vector<Row>&& rows) {
  auto* storage = new std::vector<Row>(std::move(rows));
  nb::capsule owner(storage,
                    [](void* memory) noexcept { delete static_cast<std::vector<Row>*>(memory); });
  static_assert(sizeof(Row) == kRowWidth * sizeof(uint32_t));
  uint32_t* data = reinterpret_cast<uint32_t*>(storage->data());
  return nb::cast(
      nb::ndarray<nb::numpy, uint32_t, nb::ndim<2>>(data, {storage->size(), kRowWidth}, owner));
}

nb::tuple encode_arrays(const Array<const uint8_t>& current,
                        const std::optional<Array<uint8_t>>& base,
                        const Array<const uint64_t>& bounds, int word_bytes, uint32_t method,
                        bool ordered, const std::optional<nb::bytes>& law) {
  const Run run = run_of(bounds, current.size(), word_bytes);
  if (base && base->size() != current.size())
    throw std::invalid_argument("base and current must have the same size");
  AdamLaw known{};
  if (law) {
    if (law->size() != sizeof known)
      throw std::invalid_argument("a law must have " + std::to_string(sizeof known) + " bytes");
    std::memcpy(&known, law->c_str(), sizeof known);
  }
  if (is_law(method) ? !law || !base || word_bytes != kLawWordBytes || !is_known(known)
                     : method > kRaw || (!base && method != kUnchanged && method < kPlanes))
    throw std::invalid_argument("method " + std::to_string(method) + " cannot be asked for");
  // Pointers are taken before the lock is released, because nanobind objects must not be used
  // without it.
  uint8_t* shadow = base ? base->data() : nullptr;
  const uint8_t* now = current.data();
  Encoded encoded;
  {
    nb::gil_scoped_release released;
    encoded = encode(run, now, shadow, static_cast<Method>(method), ordered, &known);
  }
  nb::list streams;
  for (Bytes& stream : encoded.streams) streams.append(array_of(std::move(stream)));
  return nb::make_tuple(array_of(std::move(encoded.rows)), streams);
}

// Appends the results of several calls, in order, and numbers their chunks from 0 on.
Encoded joined(std::vector<Encoded>&& parts, const std::vector<Run>& runs) {
  Encoded whole;
  uint64_t first_chunk = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    for (Row row : parts[i].rows) {
      row.chunk += static_cast<uint32_t>(first_chunk);
      whole.rows.push_back(row);
    }
    first_chunk += runs[i].chunks;
  }
  for (int k = 0; k < kStreams; ++k) {
    size_t size = 0;
    for (const Encoded& part : parts) size += part.streams[k].size;
    if (size == 0) continue;
    whole.streams[k] = allocate(size);
    uint8_t* end = whole.streams[k].data.get();
    for (Encoded& part : parts) {
      const Bytes piece = std::move(part.streams[k]);
      if (piece.size == 0) continue;
      std::memcpy(end, piece.data.get(), piece.size);
      end += piece.size;
    }
  }
  return whole;
}

nb::tuple encode_many_arrays(const std::vector<Array<const uint8_t>>& currents,
                             const std::vector<Array<uint8_t>>& bases,
                             const std::vector<Array<const uint64_t>>& bounds,
                             const std::vector<int>& word_bytes, const std::vector<bool>& ordered) {
  const size_t count = currents.size();
  if (bases.size() != count || bounds.size() != count || word_bytes.size() != count ||
      ordered.size() != count)
    throw std::invalid_argument("all lists must have the same length");
  std::vector<Run> runs;
  std::vector<const uint8_t*> now;
  std::vector<uint8_t*> shadows;
  uint64_t chunks = 0;
  for (size_t i = 0; i < count; ++i) {
    runs.push_back(run_of(bounds[i], currents[i].size(), word_bytes[i]));
    if (bases[i].size() != currents[i].size())
      throw std::invalid_argument("base and current must have the same size");
    now.push_back(currents[i].data());
    shadows.push_back(bases[i].data());
    chunks += runs.back().chunks;
  }
  if (chunks > std::numeric_limits<uint32_t>::max())
    throw std::invalid_argument("the arrays have too many chunks");
  Encoded encoded;
  {
    nb::gil_scoped_release released;
    std::vector<Encoded> parts;
    for (size_t i = 0; i < count; ++i)
      parts.push_back(encode(runs[i], now[i], shadows[i], kUnchanged, ordered[i]));
    encoded = joined(std::move(parts), runs);
  }
  nb::list streams;
  for (Bytes& stream : encoded.streams) streams.append(array_of(std::move(stream)));
  return nb::make_tuple(array_of(std::move(encoded.rows)), streams);
}

template <typename T>
nb::object array_of(std::vector<T>&& numbers) {
  auto* storage = new std::vector<T>(std::move(numbers));
  nb::capsule owner(storage,
                    [](void* memory) noexcept { delete static_cast<std::vector<T>*>(memory); });
  return nb::cast(
      nb::ndarray<nb::numpy, T, nb::ndim<1>>(storage->data(), {storage->size()}, owner));
}

using Rows = nb::ndarray<const uint32_t, nb::shape<-1, kRowWidth>, nb::c_contig, nb::device::cpu>;
using Streams = std::vector<std::optional<Array<const uint8_t>>>;

// Returns pointers to the streams; None stands for an empty stream.
std::vector<StreamView> views_of(const Streams& streams) {
  if (streams.size() != kStreams)
    throw std::invalid_argument("streams must have one entry for each name");
  std::vector<StreamView> views;
  for (const auto& stream : streams) {
    views.push_back(stream ? StreamView{stream->data(), stream->size()} : StreamView{nullptr, 0});
  }
  return views;
}

std::optional<std::string> apply_arrays(const Rows& rows, const Streams& streams,
                                        const Array<uint8_t>& base,
                                        const Array<const uint64_t>& bounds, int word_bytes) {
  const Run run = run_of(bounds, base.size(), word_bytes);
  const std::vector<StreamView> views = views_of(streams);
  const Row* first = reinterpret_cast<const Row*>(rows.data());
  const uint64_t row_count = rows.shape(0);
  uint8_t* shadow = base.data();
  std::string refusal;
  {
    nb::gil_scoped_release released;
    refusal = apply(run, first, row_count, views.data(), shadow);
  }
  if (refusal.empty()) return std::nullopt;
  return refusal;
}

using Targets = nb::ndarray<const uint64_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;
using Offsets = nb::ndarray<const uint64_t, nb::shape<-1, kStreams>, nb::c_contig, nb::device::cpu>;

std::optional<std::pair<uint64_t, std::string>> apply_rows_arrays(
    const Rows& rows, const Targets& targets, const Offsets& offsets,
    const Array<const uint8_t>& streams, const std::vector<Array<uint8_t>>& blocks) {
  const uint64_t count = rows.shape(0);
  if (targets.shape(0) != count || offsets.shape(0) != count)
    throw std::invalid_argument("rows, targets and offsets must have one entry for each row");
  std::vector<PlacedRow> placed;
  placed.reserve(count);
  uint64_t block_before = 0, end_before = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t *target = targets.data() + 4 * i, block = target[0], at = target[1],
                   words = target[2], width = target[3];
    if (block >= blocks.size() || (width != 1 && width != 2 && width != 4 && width != 8) ||
        words >> 32 || at > blocks[block].size() || words * width > blocks[block].size() - at) {
      throw std::invalid_argument("a target does not lie in its block");
    }
    PlacedRow row{reinterpret_cast<const Row*>(rows.data())[i], words, static_cast<int>(width),
                  blocks[block].data() + at, offsets.data() + i * kStreams};
    const bool same = !placed.empty() && block == block_before &&
                      placed.back().chunk == row.chunk && placed.back().words == words &&
                      placed.back().word_bytes == row.word_bytes;
    // Rows of different chunks are applied at the same time, so their memory must be disjoint.
    if (!same && !placed.empty() &&
        (block < block_before || (block == block_before && at < end_before)))
      throw std::invalid_argument("targets must ascend");
    block_before = block;
    end_before = at + words * width;
    placed.push_back(row);
  }
  const StreamView all{streams.data(), streams.size()};
  std::string refusal;
  uint64_t bad_row = 0;
  {
    nb::gil_scoped_release released;
    refusal = apply_rows(placed, all, &bad_row);
  }
  if (refusal.empty()) return std::nullopt;
  return std::make_pair(bad_row, refusal);
}

int write_file(int descriptor, const std::vector<Array<const uint8_t>>& pieces,
               uint64_t chunk_bytes, uint64_t chunks_per_file, bool sharded, int level,
               uint64_t number) {
  uint64_t length = 0;
  std::vector<StreamView> views;
  views.reserve(pieces.size());
  for (const auto& piece : pieces) {
    views.push_back({piece.data(), piece.size()});
    length += piece.size();
  }
  if (level < 0 || level > 19)
    throw std::invalid_argument("the level must be from 0 (stored) to 19");
  if (chunk_bytes == 0 || chunk_bytes > uint64_t{1} << 30 || chunks_per_file == 0 ||
      (!sharded && chunks_per_file != 1)) {
    throw std::invalid_argument(
        "a chunk must have 1 to 2^30 bytes, and a file that is no zarr shard one chunk");
  }
  // Written without length + chunk_bytes - 1, which could overflow.
  const uint64_t chunks = length / chunk_bytes + (length % chunk_bytes != 0);
  if (chunks == 0 || number > (chunks - 1) / chunks_per_file) {
    throw std::invalid_argument("the stream does not reach into that file");
  }
  nb::gil_scoped_release released;
  return write_stream_file(descriptor, views, {chunk_bytes, chunks_per_file, sharded}, level,
                           number);
}

// The names of codecs in deltacheck/store/files/arrays.py.
constexpr std::pair<const char*, ChunkCodec> kChunkCodecs[] = {
    {"store", ChunkCodec::kStore}, {"stream", ChunkCodec::kZstd}, {"values", ChunkCodec::kBlosc}};

// A file as Python passes it: descriptor, chunk bytes, chunks per file, sharded, codec.
using FileArguments = std::tuple<int, uint64_t, uint64_t, bool, std::string>;

SourceFile source_of(const FileArguments& arguments) {
  const auto& [descriptor, chunk_bytes, chunks_per_file, sharded, codec] = arguments;
  // Bounds the memory for the index of a shard, whose length comes from metadata.
  constexpr uint64_t kMostChunks = uint64_t{1} << 20;
  if (chunk_bytes == 0 || chunk_bytes > uint64_t{1} << 30 || chunks_per_file == 0 ||
      chunks_per_file > kMostChunks || (!sharded && chunks_per_file != 1)) {
    throw std::invalid_argument(
        "a chunk must have 1 to 2^30 bytes, and a file that is no zarr shard one chunk");
  }
  const auto* entry =
      std::find_if(std::begin(kChunkCodecs), std::end(kChunkCodecs),
                   [&codec = codec](const auto& item) { return codec == item.first; });
  if (entry == std::end(kChunkCodecs))
    throw std::invalid_argument("this build reads no codec '" + codec + "'");
  return {descriptor, {chunk_bytes, chunks_per_file, sharded}, entry->second};
}

void check_piece(const SourceFile& file, uint64_t begin, uint64_t size) {
  const uint64_t bytes = file.cut.chunk_bytes * file.cut.chunks_per_file;
  if (size == 0 || begin > bytes || size > bytes - begin)
    throw std::invalid_argument("the file does not hold as many bytes from there on");
}

using PieceRows = nb::ndarray<const uint64_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;

std::optional<std::pair<uint64_t, std::string>> read_files(
    const std::vector<FileArguments>& files, const PieceRows& rows,
    const std::vector<Array<uint8_t>>& blocks) {
  std::vector<SourceFile> sources;
  for (const FileArguments& file : files) sources.push_back(source_of(file));
  std::vector<Piece> pieces;
  uint64_t block_before = 0, filled = 0;
  for (size_t i = 0; i < rows.shape(0); ++i) {
    const uint64_t *row = rows.data() + 5 * i, file = row[0], size = row[2], block = row[3],
                   at = row[4];
    if (file >= sources.size()) throw std::invalid_argument("a piece names no file");
    check_piece(sources[file], row[1], size);
    if (block != block_before) filled = 0;
    // Ascending, so that no two threads write to the same memory.
    if (block < block_before || block >= blocks.size() || at < filled ||
        at > blocks[block].size() || size > blocks[block].size() - at)
      throw std::invalid_argument("pieces must ascend in the memory, and end inside it");
    block_before = block;
    filled = at + size;
    pieces.push_back({file, row[1], size, blocks[block].data() + at});
  }
  ReadRefusal refusal;
  {
    nb::gil_scoped_release released;
    refusal = read_pieces(sources, pieces);
  }
  if (refusal.why.empty()) return std::nullopt;
  return std::make_pair(refusal.file, refusal.why);
}

// Returns the address of the weights, or null without any.
const uint8_t* weights_of(const std::optional<Array<const uint16_t>>& weights, uint64_t count) {
  if (!weights) return nullptr;
  if (weights->size() != count)
    throw std::invalid_argument("weights must have as many elements as there are codes");
  return reinterpret_cast<const uint8_t*>(weights->data());
}

// Checks the number of times that a lattice was halved, and of bits for more.
void check_halvings(uint32_t halvings, uint32_t spare_bits) {
  if (halvings > 31) throw std::invalid_argument("halvings must be at most 31");
  if (spare_bits > 7) throw std::invalid_argument("spare_bits must be at most 7");
}

nb::tuple lattice_codes_arrays(const Array<const float>& values,
                               const std::optional<Array<const uint16_t>>& weights, double step,
                               uint64_t seed, const Array<int32_t>& out, uint32_t halvings,
                               uint32_t spare_bits) {
  check_halvings(halvings, spare_bits);
  const uint64_t count = values.size();
  const uint8_t* cells = weights_of(weights, count);
  if (out.size() != count) throw std::invalid_argument("out must have the size of values");
  const auto* from = reinterpret_cast<const uint8_t*>(values.data());
  auto* to = reinterpret_cast<uint8_t*>(out.data());
  LatticeErrors errors{};
  {
    nb::gil_scoped_release released;
    errors = lattice_codes(from, cells, count, step, seed, halvings, spare_bits, to);
  }
  return nb::make_tuple(errors.refused, errors.largest);
}

uint64_t lattice_values_arrays(const Array<const int32_t>& codes,
                               const std::optional<Array<const uint16_t>>& weights, double step,
                               uint64_t seed, const Array<float>& out, uint32_t halvings,
                               uint32_t spare_bits) {
  check_halvings(halvings, spare_bits);
  const uint64_t count = codes.size();
  const uint8_t* cells = weights_of(weights, count);
  if (out.size() != count) throw std::invalid_argument("out must have the size of codes");
  const auto* from = reinterpret_cast<const uint8_t*>(codes.data());
  auto* to = reinterpret_cast<uint8_t*>(out.data());
  nb::gil_scoped_release released;
  return lattice_values(from, cells, count, step, seed, halvings, spare_bits, to);
}

nb::tuple lattice_cast_errors_arrays(const Array<const float>& values,
                                     const Array<const uint16_t>& weights, double step,
                                     uint64_t seed, uint32_t halvings, uint32_t spare_bits) {
  check_halvings(halvings, spare_bits);
  const uint64_t count = values.size();
  if (weights.size() != count)
    throw std::invalid_argument("weights must have as many elements as values");
  const auto* from = reinterpret_cast<const uint8_t*>(values.data());
  const auto* beside = reinterpret_cast<const uint8_t*>(weights.data());
  CastErrors errors{};
  {
    nb::gil_scoped_release released;
    errors = lattice_cast_errors(from, beside, count, step, seed, halvings, spare_bits);
  }
  return nb::make_tuple(errors.refused, errors.largest, errors.differences, errors.weights);
}

// Returns the bytes of one code beside a weight after a check of the sizes. Codes are passed as
// bytes, because they are uint8 or uint16.
uint32_t nested_bytes(uint64_t code_bytes, uint64_t weights, uint64_t count) {
  if (weights != count)
    throw std::invalid_argument("weights must have as many elements as there are codes");
  if (code_bytes != count && code_bytes != 2 * count)
    throw std::invalid_argument("out must have a value a code, of one or two bytes");
  return code_bytes == count ? 1 : 2;
}

nb::tuple nested_codes_arrays(const Array<const float>& values,
                              const Array<const uint16_t>& weights, double step, uint64_t seed,
                              const Array<uint8_t>& out, uint32_t halvings, uint32_t spare_bits) {
  check_halvings(halvings, spare_bits);
  const uint64_t count = values.size();
  const uint32_t code_bytes = nested_bytes(out.size(), weights.size(), count);
  const auto* from = reinterpret_cast<const uint8_t*>(values.data());
  const auto* beside = reinterpret_cast<const uint8_t*>(weights.data());
  uint8_t* to = out.data();
  LatticeErrors errors{};
  {
    nb::gil_scoped_release released;
    errors = nested_codes(from, beside, count, step, seed, code_bytes, halvings, spare_bits, to);
  }
  return nb::make_tuple(errors.refused, errors.largest);
}

uint64_t nested_values_arrays(const Array<const uint8_t>& codes,
                              const Array<const uint16_t>& weights, double step, uint64_t seed,
                              const Array<float>& out, uint32_t halvings, uint32_t spare_bits) {
  check_halvings(halvings, spare_bits);
  const uint64_t count = out.size();
  const uint32_t code_bytes = nested_bytes(codes.size(), weights.size(), count);
  const uint8_t* from = codes.data();
  const auto* beside = reinterpret_cast<const uint8_t*>(weights.data());
  auto* to = reinterpret_cast<uint8_t*>(out.data());
  nb::gil_scoped_release released;
  return nested_values(from, beside, count, step, seed, code_bytes, halvings, spare_bits, to);
}

// Returns the form of codes after a check of its range.
OctaveForm form_of(uint32_t fraction_bits) {
  if (fraction_bits > 7) throw std::invalid_argument("fraction_bits must be at most 7");
  return octave_form(fraction_bits);
}

// Codes are passed as bytes, because their type (uint8 or uint16) depends on the fraction bits.
uint64_t octave_codes_arrays(const Array<const float>& values,
                             const std::optional<Array<const uint8_t>>& base,
                             uint32_t fraction_bits, uint32_t band, const Array<uint8_t>& out) {
  const OctaveForm form = form_of(fraction_bits);
  const uint64_t count = values.size();
  if (base && base->size() != count * form.code_bytes)
    throw std::invalid_argument("base must have a code a value");
  if (out.size() != count * form.code_bytes)
    throw std::invalid_argument("out must have a code a value");
  if (band > uint32_t{1} << 26) throw std::invalid_argument("band must be at most 2^26");
  const auto* from = reinterpret_cast<const uint8_t*>(values.data());
  const uint8_t* before = base ? base->data() : nullptr;
  uint8_t* to = out.data();
  nb::gil_scoped_release released;
  return octave_codes(from, before, count, form, band, to);
}

uint64_t octave_values_arrays(const Array<const uint8_t>& codes, uint32_t fraction_bits,
                              const Array<float>& out) {
  const OctaveForm form = form_of(fraction_bits);
  const uint64_t count = out.size();
  if (codes.size() != count * form.code_bytes)
    throw std::invalid_argument("out must have a value a code");
  const uint8_t* from = codes.data();
  auto* to = reinterpret_cast<uint8_t*>(out.data());
  nb::gil_scoped_release released;
  return octave_values(from, count, form, to);
}

// Returns the form of codes after a check of its range. `limit`: of the squares of the values over
// the second moments; 0: none.
RatioForm ratio_form_of(double step, double limit) {
  if (!(step >= 0x1p-32 && step <= 0x1p32))
    throw std::invalid_argument("step must be from 2^-32 to 2^32");
  if (!(limit >= 0)) throw std::invalid_argument("limit must be at least 0");
  return {step, limit > 0 ? std::sqrt(limit) : std::numeric_limits<double>::infinity()};
}

nb::tuple ratio_codes_arrays(const Array<const float>& values, const Array<const float>& variances,
                             double step, double limit, const Array<uint8_t>& out) {
  const RatioForm form = ratio_form_of(step, limit);
  const uint64_t count = values.size();
  if (variances.size() != count || out.size() != count)
    throw std::invalid_argument("variances and out must have an element a value");
  const auto* from = reinterpret_cast<const uint8_t*>(values.data());
  const auto* beside = reinterpret_cast<const uint8_t*>(variances.data());
  uint8_t* to = out.data();
  RatioErrors errors{};
  {
    nb::gil_scoped_release released;
    errors = ratio_codes(from, beside, count, form, to);
  }
  return nb::make_tuple(errors.refused, errors.largest);
}

uint64_t ratio_values_arrays(const Array<const uint8_t>& codes, const Array<const float>& variances,
                             double step, double limit, const Array<float>& out) {
  const RatioForm form = ratio_form_of(step, limit);
  const uint64_t count = codes.size();
  if (variances.size() != count || out.size() != count)
    throw std::invalid_argument("variances and out must have an element a code");
  const uint8_t* from = codes.data();
  const auto* beside = reinterpret_cast<const uint8_t*>(variances.data());
  auto* to = reinterpret_cast<uint8_t*>(out.data());
  nb::gil_scoped_release released;
  return ratio_values(from, beside, count, form, to);
}

void fingerprint_arrays(const Array<const uint64_t>& addresses, const Array<const uint64_t>& sizes,
                        const std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>& sampling,
                        const Array<uint64_t>& out) {
  if (sizes.size() != addresses.size() || out.size() != addresses.size())
    throw std::invalid_argument("addresses, sizes and out must have one entry per leaf");
  const auto [whole_bytes, blocks, block_bytes, seed] = sampling;
  if (blocks == 0 || whole_bytes / blocks < block_bytes)
    throw std::invalid_argument("the blocks of a leaf must fit into it");
  const uint64_t* from = addresses.data();
  const uint64_t* bytes = sizes.data();
  const size_t leaves = addresses.size();
  uint64_t* to = out.data();
  nb::gil_scoped_release released;
  fingerprints(from, bytes, leaves, Sampling{whole_bytes, blocks, block_bytes, seed}, to);
}

// Up to so many bytes are copied while no other Python thread runs. To give the interpreter's lock
// away takes longer if another thread is busy: milliseconds until it comes back.
constexpr uint64_t kCopiedUnderLock = 1 << 20;

void copy_leaves(const Array<const uint64_t>& addresses, const Array<const uint64_t>& sizes,
                 const Array<const uint64_t>& offsets, const Array<uint8_t>& out) {
  const size_t leaves = addresses.size();
  if (sizes.size() != leaves || offsets.size() != leaves)
    throw std::invalid_argument("addresses, sizes and offsets must have one entry per leaf");
  const uint64_t *from = addresses.data(), *bytes = sizes.data(), *at = offsets.data();
  for (size_t i = 0; i < leaves; ++i) {
    if (at[i] > out.size() || bytes[i] > out.size() - at[i])
      throw std::invalid_argument("every leaf must fit into out");
  }
  uint8_t* to = out.data();
  std::optional<nb::gil_scoped_release> released;
  if (out.size() > kCopiedUnderLock) released.emplace();
  for (size_t i = 0; i < leaves; ++i) {
    // A leaf without elements may have no address.
    if (bytes[i] != 0) std::memcpy(to + at[i], reinterpret_cast<const void*>(from[i]), bytes[i]);
  }
}

void check_words(const char* name, uint64_t bytes, int word_bytes) {
  if ((word_bytes != 1 && word_bytes != 2) || bytes % static_cast<uint64_t>(word_bytes) != 0)
    throw std::invalid_argument(std::string(name) + " must hold whole words of 1 or 2 bytes");
}

nb::object encode_change_arrays(const Array<const uint8_t>& before, const Array<const uint8_t>& now,
                                int word_bytes) {
  check_words("before", before.size(), word_bytes);
  if (now.size() != before.size())
    throw std::invalid_argument("before and now must have the same size");
  const uint8_t *from = before.data(), *to = now.data();
  const uint64_t words = before.size() / static_cast<uint64_t>(word_bytes);
  Bytes changes;
  {
    nb::gil_scoped_release released;
    changes = encode_changes(from, to, words, word_bytes);
  }
  return array_of(std::move(changes));
}

std::optional<std::string> apply_change_arrays(const Array<const uint8_t>& changes,
                                               const Array<uint8_t>& words, int word_bytes) {
  check_words("words", words.size(), word_bytes);
  const StreamView from{changes.data(), changes.size()};
  uint8_t* const to = words.data();
  const uint64_t count = words.size() / static_cast<uint64_t>(word_bytes);
  std::string refusal;
  {
    nb::gil_scoped_release released;
    refusal = apply_changes(from.data, from.size, to, count, word_bytes);
  }
  if (refusal.empty()) return std::nullopt;
  return refusal;
}

void read_number_array(const nb::list& objects, nb::handle first, nb::handle second,
                       const Array<uint64_t>& out) {
  read_numbers(objects, first, second, out.data(), out.size());
}

// Returns true if Python spells the number like this, as its json module writes it.
bool is_float_spelled(std::string_view number) {
  const std::string text(number);
  char* end = nullptr;
  const double value = PyOS_string_to_double(text.c_str(), &end, nullptr);
  if (value == -1.0 && PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  char* spelled = PyOS_double_to_string(value, 'r', 0, Py_DTSF_ADD_DOT_0, nullptr);
  if (spelled == nullptr) throw std::bad_alloc();
  const bool is_equal = end == text.c_str() + text.size() && text == spelled;
  PyMem_Free(spelled);
  return is_equal;
}

std::optional<nb::bytes> canonical_json_bytes(const nb::bytes& text) {
  const std::optional<std::string> form =
      canonical_json({text.c_str(), text.size()}, is_float_spelled);
  if (!form) return std::nullopt;
  return nb::bytes(form->data(), form->size());
}

nb::object matching_children(const nb::list& containers, const nb::list& lengths,
                             const nb::list& keys, const nb::list& types) {
  return ChildMatcher(containers, lengths, keys, types).match();
}

}  // namespace
}  // namespace deltacheck

// noconvert() keeps nanobind from copying an array of another type: results would then be written
// to the copy.
NB_MODULE(_native, m) {
  using namespace deltacheck;
  m.attr("INTERFACE") = kInterface;
  m.def("encode", encode_arrays, nb::arg("current").noconvert(), nb::arg("base").noconvert().none(),
        nb::arg("bounds").noconvert(), nb::arg("word_bytes"),
        nb::arg("method") = static_cast<uint32_t>(kUnchanged), nb::arg("ordered") = false,
        nb::arg("law") = nb::none(),
        "Return (rows, streams): uint32 (stored chunks, 5), and the bytes of every stream or None. "
        "base becomes equal to current, in place. method: for tests and measurements; 0 selects "
        "the cheapest. ordered: of words of 2 bytes, sparse and bitmap chunks are ordered.");
  m.def("encode_many", encode_many_arrays, nb::arg("currents").noconvert(),
        nb::arg("bases").noconvert(), nb::arg("bounds").noconvert(), nb::arg("word_bytes"),
        nb::arg("ordered"),
        "Encode several arrays as encode does, in one call. Return (rows, streams) of all of them, "
        "one after the other, with chunks numbered from 0 on.");
  m.def("apply", apply_arrays, nb::arg("rows").noconvert(), nb::arg("streams").noconvert(),
        nb::arg("base").noconvert(), nb::arg("bounds").noconvert(), nb::arg("word_bytes"),
        "Apply a delta to base. Return None, or the reason why the first bad chunk was refused.");
  m.def("apply_rows", apply_rows_arrays, nb::arg("rows").noconvert(),
        nb::arg("targets").noconvert(), nb::arg("offsets").noconvert(),
        nb::arg("streams").noconvert(), nb::arg("blocks").noconvert(),
        "Apply rows of several deltas. targets: block, first byte, words and bytes of a word of "
        "each row, ascending; rows of one chunk are applied in order. offsets: of each row's parts "
        "in streams. Return None, or the number of a row and the reason why it was refused.");
  m.def("encode_changes", encode_change_arrays, nb::arg("before").noconvert(),
        nb::arg("now").noconvert(), nb::arg("word_bytes"),
        "Return the changes of words of 1 or 2 bytes, or None if there are no words.");
  m.def("apply_changes", apply_change_arrays, nb::arg("changes").noconvert(),
        nb::arg("words").noconvert(), nb::arg("word_bytes"),
        "Change words in place. Return None, or the reason why the changes were refused; the words "
        "are then a mixture.");
  m.def("lattice_codes", lattice_codes_arrays, nb::arg("values").noconvert(),
        nb::arg("weights").noconvert().none(), nb::arg("step"), nb::arg("seed"),
        nb::arg("out").noconvert(), nb::arg("halvings"), nb::arg("spare_bits"),
        "Return (refused, largest error).");
  m.def("lattice_values", lattice_values_arrays, nb::arg("codes").noconvert(),
        nb::arg("weights").noconvert().none(), nb::arg("step"), nb::arg("seed"),
        nb::arg("out").noconvert(), nb::arg("halvings"), nb::arg("spare_bits"),
        "Return the number of codes that no value has.");
  m.def("lattice_cast_errors", lattice_cast_errors_arrays, nb::arg("values").noconvert(),
        nb::arg("weights").noconvert(), nb::arg("step"), nb::arg("seed"), nb::arg("halvings"),
        nb::arg("spare_bits"),
        "Return (refused, largest error of a value, sum of squared errors of the weights, sum of "
        "squared weights).");
  m.def("nested_codes", nested_codes_arrays, nb::arg("values").noconvert(),
        nb::arg("weights").noconvert(), nb::arg("step"), nb::arg("seed"),
        nb::arg("out").noconvert(), nb::arg("halvings"), nb::arg("spare_bits"),
        "Return (refused, largest error). out: the bytes of codes.");
  m.def("nested_values", nested_values_arrays, nb::arg("codes").noconvert(),
        nb::arg("weights").noconvert(), nb::arg("step"), nb::arg("seed"),
        nb::arg("out").noconvert(), nb::arg("halvings"), nb::arg("spare_bits"),
        "Return the number of codes that no value has.");
  m.def("octave_codes", octave_codes_arrays, nb::arg("values").noconvert(),
        nb::arg("base").noconvert().none(), nb::arg("fraction_bits"), nb::arg("band"),
        nb::arg("out").noconvert(),
        "Return the number of values without a code. base, out: the bytes of codes.");
  m.def("octave_values", octave_values_arrays, nb::arg("codes").noconvert(),
        nb::arg("fraction_bits"), nb::arg("out").noconvert(),
        "Return the number of codes that no value has; they become 0.");
  m.def("ratio_codes", ratio_codes_arrays, nb::arg("values").noconvert(),
        nb::arg("variances").noconvert(), nb::arg("step"), nb::arg("limit"),
        nb::arg("out").noconvert(),
        "Return (refused, largest error in roots of the variance). out: the bytes of codes.");
  m.def("ratio_values", ratio_values_arrays, nb::arg("codes").noconvert(),
        nb::arg("variances").noconvert(), nb::arg("step"), nb::arg("limit"),
        nb::arg("out").noconvert(), "Return the number of codes that no value has; they become 0.");
  m.def("fingerprints", fingerprint_arrays, nb::arg("addresses").noconvert(),
        nb::arg("sizes").noconvert(), nb::arg("sampling"), nb::arg("out").noconvert(),
        "Write the fingerprint of each leaf of host memory to out. sampling: whole_bytes, blocks, "
        "block_bytes, seed. The caller keeps the memory alive.");
  m.def("copy_leaves", copy_leaves, nb::arg("addresses").noconvert(), nb::arg("sizes").noconvert(),
        nb::arg("offsets").noconvert(), nb::arg("out").noconvert(),
        "Copy the bytes of each leaf of host memory to its offset in out. The caller keeps the "
        "memory alive.");
  m.def("read_numbers", read_number_array, nb::arg("objects"), nb::arg("first"),
        nb::arg("second").none(), nb::arg("out").noconvert(),
        "Write an integer of at least 0 for each object to out: the result of first, or of second "
        "called with that.");
  m.def(
      "load_ahead",
      [](const Array<const uint64_t>& addresses) {
        load_ahead(addresses.data(), addresses.size());
      },
      nb::arg("addresses").noconvert(),
      "Start to load memory into the cache, a line at each address. Any address may be passed.");
  m.def("canonical_json", canonical_json_bytes, nb::arg("text"),
        "Return the canonical form of a JSON text, or None if more than its keys would change.");
  m.def("matching_children", matching_children, nb::arg("containers"), nb::arg("lengths"),
        nb::arg("keys"), nb::arg("types"),
        "Return the children of dictionaries, lists and tuples in order, or None if a length, a "
        "key of a dictionary or the type of a child is not the expected one.");
  m.def("write_stream_file", write_file, nb::arg("descriptor"), nb::arg("pieces").noconvert(),
        nb::arg("chunk_bytes"), nb::arg("chunks_per_file"), nb::arg("sharded"), nb::arg("level"),
        nb::arg("number"), "Return 0, or the errno of the write that failed.");
  m.def("read_array_files", read_files, nb::arg("files"), nb::arg("pieces").noconvert(),
        nb::arg("blocks").noconvert(),
        "Read pieces of several files. files: descriptor, bytes of a chunk, chunks of a file, "
        "whether an index ends it, codec. pieces: number of the file, first byte, size, block, "
        "offset in it; ascending by the last two. Return None, or the number of a damaged file "
        "and its damage.");
  m.def(
      "crc32c",
      [](const Array<const uint8_t>& data, bool by_table) {
        return by_table ? crc32c_by_table(data.data(), data.size())
                        : crc32c(data.data(), data.size());
      },
      nb::arg("data"), nb::arg("by_table"), "Return the checksum of data, for tests.");
  m.def("registrations", registrations,
        "Return [(target name, capsule, platform)] for jax.ffi.register_ffi_target; empty in "
        "builds without handlers.");
  m.def("threads", threads);
  m.def("set_threads", set_threads, nb::arg("count"));
  m.def("instruction_sets", instruction_sets);
  m.def("instruction_set", instruction_set);
  m.def("use_instruction_set", use_instruction_set, nb::arg("name"));
}
