#include "delta.h"

#ifdef __linux__
#  include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <type_traits>

#include "kernels.h"
#include "order.h"
#include "thread_pool.h"

namespace deltacheck {
namespace {

// --- selection of the kernels --------------------------------------------------------------------

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> usable;
#ifdef DELTACHECK_X86_LEVELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v4")) usable.push_back(&kKernelsX86V4);
  if (__builtin_cpu_supports("x86-64-v3")) usable.push_back(&kKernelsX86V3);
  if (__builtin_cpu_supports("x86-64-v2")) usable.push_back(&kKernelsX86V2);
#endif
  usable.push_back(&kKernelsPlain);
  return usable;
}

const Kernels* kernels_named(const std::string& name) {
  for (const Kernels* kernels : usable_kernels()) {
    if (name == kernels->instruction_set) return kernels;
  }
  throw std::invalid_argument("no kernels for the instruction set '" + name +
                              "' on this processor");
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels{[] {
    const char* name = std::getenv("DELTACHECK_ISA");
    return name != nullptr ? kernels_named(name) : usable_kernels().front();
  }()};
  return kernels;
}

std::atomic<int>& thread_count() {
  static std::atomic<int> count{std::min(8, usable_processors())};
  return count;
}

// --- arithmetic ----------------------------------------------------------------------------------

// Sets IEEE arithmetic on this thread during its lifetime: frameworks enable flushing of subnormals
// to zero, which would change codes.
class PlainArithmetic {
 public:
  PlainArithmetic() {
    (void)fegetenv(&before_);
    (void)fesetenv(FE_DFL_ENV);
  }
  ~PlainArithmetic() { (void)fesetenv(&before_); }
  PlainArithmetic(const PlainArithmetic&) = delete;
  PlainArithmetic& operator=(const PlainArithmetic&) = delete;

 private:
  fenv_t before_;
};

// --- encode --------------------------------------------------------------------------------------

// Requests huge pages from `start` on, because mapping small pages costs more than filling them.
// The first byte written to a huge page maps all of it, so `start` excludes the part that may
// remain nearly empty.
void advise_large_pages(const Bytes& bytes, size_t start) {
#ifdef __linux__
  constexpr uintptr_t kLargePage = uintptr_t{2} << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(bytes.data.get());
  const uintptr_t from = (begin + start + kLargePage - 1) / kLargePage * kLargePage,
                  to = (begin + bytes.size) / kLargePage * kLargePage;
  if (from < to) (void)madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
  (void)bytes, (void)start;
#endif
}

// The memory of one thread. It has room for the positions of the largest chunk; pages that are
// never written are never mapped.
class Worker {
 public:
  Worker(uint64_t most_words, int word_bytes) {
    const uint64_t tiles = tiles_of(most_words, word_bytes),
                   most = most_words * word_bytes + kMostTileBytes;
    const uint64_t room[kStreams] = {kTileEntryBytes * tiles, most, most_words / 8 + 8, most, most};
    for (int stream = kTiles; stream <= kWide; ++stream) buffers_[stream] = allocate(room[stream]);
  }

  // Returns room for the prediction of a chunk, and for its gradients behind it.
  uint8_t* prediction(uint64_t words) {
    const uint64_t bytes = (kLawWordBytes + 2) * words;
    if (prediction_.size < bytes) prediction_ = allocate(bytes);
    return prediction_.data.get();
  }
  PositionStreams out(Method method) {
    return {at(kTiles), at(method == kSparse ? kGaps : kBits), at(kValues), at(kWide)};
  }
  // Returns room for the differences of a chunk in the order of its words, and for as many zeros.
  uint8_t* ordered(uint64_t bytes) {
    if (ordered_.size < 2 * bytes) ordered_ = allocate(2 * bytes);
    return ordered_.data.get();
  }
  uint8_t* at(int stream) { return buffers_[stream].data.get(); }

  // Aligned to a cache line inside a kept block, so that it is likely in the cache already.
  Scratch* scratch() {
    const uintptr_t start = reinterpret_cast<uintptr_t>(scratch_.data.get());
    return reinterpret_cast<Scratch*>((start + alignof(Scratch) - 1) / alignof(Scratch) *
                                      alignof(Scratch));
  }

 private:
  static_assert(std::is_trivially_default_constructible_v<Scratch>);
  Bytes scratch_ = allocate(sizeof(Scratch) + alignof(Scratch));
  Bytes buffers_[kWide + 1];
  Bytes ordered_, prediction_;
};

class Encoder {
 public:
  Encoder(const Run& run, const uint8_t* current, uint8_t* base, Method requested, bool ordered,
          const AdamLaw* law)
      : run_(run),
        current_(current),
        base_(base),
        requested_(requested),
        ordered_(ordered && run.word_bytes == kOrderedWordBytes),
        law_(law),
        kernels_(*chosen().load()) {
    for (uint64_t chunk = 0; chunk < run.chunks; ++chunk) {
      const uint64_t words = run.bounds[chunk + 1] - run.bounds[chunk];
      most_words_ = std::max(most_words_, words);
      tiles_ += tiles_of(words, run.word_bytes);
    }
  }

  Encoded encode() {
    const int useful =
        static_cast<int>(std::min<uint64_t>(run_.chunks, static_cast<uint64_t>(threads())));
    run_on_threads(useful, [this] { work(); });
    if (failed_) throw std::bad_alloc();
    for (Bytes& stream : result_.streams) settle(&stream);
    return std::move(result_);
  }

 private:
  void work() {
    try {
      Worker worker(most_words_, run_.word_bytes);
      for (;;) {
        const uint64_t chunk = next_chunk_.fetch_add(1);
        if (chunk >= run_.chunks) return;
        encode_chunk(chunk, &worker);
      }
    } catch (const std::bad_alloc&) {
      std::lock_guard lock(mutex_);
      failed_ = true;
      turn_.notify_all();
    }
  }

  void encode_chunk(uint64_t chunk, Worker* worker) {
    const uint64_t start = run_.bounds[chunk] * run_.word_bytes,
                   words = run_.bounds[chunk + 1] - run_.bounds[chunk];
    const uint8_t* current = current_ + start;
    uint8_t* base = base_ != nullptr ? base_ + start : nullptr;
    Row row{static_cast<uint32_t>(chunk), kUnchanged, 0, 0, 0};
    uint8_t* at[kStreams] = {};
    const uint64_t first_tile =
        base != nullptr ? kernels_.first_difference(run_.word_bytes, current, base, words) : 0;
    // Unchanged chunks take their turn as well, so that `placed_` counts every chunk.
    if (first_tile == tiles_of(words, run_.word_bytes)) {
      reserve(row, words, at);
      return;
    }
    Method method = requested_;
    if (is_law(method)) {
      if (base != nullptr && encode_by_law(current, base, words, worker, &row)) return;
      method = kUnchanged;
    }
    if (method == kUnchanged)
      method =
          kernels_.choose(run_.word_bytes, current, base, words, first_tile, worker->scratch());
    bool base_done = false;
    if (method == kSparse || method == kBitmap) {
      const PositionStreams out = worker->out(method);
      const bool fits =
          ordered_ ? encode_ordered(method, current, base, words, worker, &row)
                   : kernels_.encode_positions(run_.word_bytes, method, current, base, words,
                                               first_tile, worker->scratch(), out, &row);
      if (fits) {
        row.method = ordered_ ? (method == kSparse ? kOrderedSparse : kOrderedBitmap) : method;
        reserve(row, words, at);
        for (int stream = kTiles; stream <= kWide; ++stream) {
          const uint64_t size = stream_bytes(row, stream, words, run_.word_bytes);
          if (size > 0) std::memcpy(at[stream], worker->at(stream), size);
        }
        return;
      }
      // The streams became larger than the chunk. The base is already updated, so raw only copies.
      method = kRaw;
      base_done = true;
    }
    // The sizes follow from the method alone, so the streams are written in their final place. Only
    // `changed` is known later.
    row.method = method;
    Row* const stored = reserve(row, words, at);
    if (base_done) {
      // Not from `current`, to which another thread of the program may have written since.
      std::memcpy(at[kWords], base, words * run_.word_bytes);
      return;
    }
    const int place = method == kDiff ? kDiff0 : method == kPlanes ? kPlane0 : kWords;
    stored->changed = kernels_.encode_dense(run_.word_bytes, method, current, base, words,
                                            worker->scratch(), at + place);
  }

  // Encodes a chunk in the order of its words. Returns false if the streams became larger than it.
  bool encode_ordered(Method method, const uint8_t* current, uint8_t* base, uint64_t words,
                      Worker* worker, Row* row) {
    const uint64_t bytes = words * kOrderedWordBytes;
    uint8_t* const differences = worker->ordered(bytes);
    uint8_t* const zeros = differences + bytes;
    take_differences(current, base, words, differences);
    std::memset(zeros, 0, bytes);
    return kernels_.encode_positions(kOrderedWordBytes, method, differences, zeros, words, 0,
                                     worker->scratch(), worker->out(method), row);
  }

  // Encodes a chunk against its prediction. Returns false, and changes nothing, if that takes too
  // many bytes, or the chunk has not three equal parts.
  bool encode_by_law(const uint8_t* current, uint8_t* base, uint64_t words, Worker* worker,
                     Row* row) {
    if (words % kLawParts != 0) return false;
    const PlainArithmetic plain;
    const uint64_t count = words / kLawParts, part = kLawWordBytes * count;
    uint8_t* const prediction = worker->prediction(words);
    uint8_t* const gradients = prediction + kLawWordBytes * words;
    uint8_t* at[kStreams] = {};
    row->method = requested_;
    if (requested_ == kStepsLaw) {
      kernels_.law_weights_part(*law_, count, base, current, prediction);
      std::memcpy(prediction + part, base + part, part);
      kernels_.law_squares_part(*law_, count, base + 2 * part, prediction + 2 * part);
      Row* const stored = reserve(*row, words, at);
      std::memcpy(at[kLaw], law_, kLawBytes);
      stored->changed = kernels_.encode_dense(kLawWordBytes, kDiff, current, prediction, words,
                                              worker->scratch(), at + kDiff0);
      std::memcpy(base, prediction, kLawWordBytes * words);
      return true;
    }
    if (requested_ == kGradientLaw)
      kernels_.law_gradients_part(*law_, count, base + part, current + part, gradients);
    else
      std::memcpy(prediction + part, current + part, part);
    kernels_.law_step_part(*law_, count, base, requested_ == kGradientLaw ? gradients : nullptr,
                           prediction);
    // The exceptions, as sparse words.
    const PositionStreams out = worker->out(kSparse);
    const uint64_t tiles = tiles_of(words, kLawWordBytes),
                   first = kernels_.first_difference(kLawWordBytes, current, prediction, words);
    if (first == tiles) {
      std::memset(out.tiles, 0, kTileEntryBytes * tiles);
    } else if (!kernels_.encode_positions(kLawWordBytes, kSparse, current, prediction, words, first,
                                          worker->scratch(), out, row)) {
      return false;
    }
    // A law that misses so much is none.
    if (row->gap_bytes + row->changed + kLawWordBytes * uint64_t{row->wide_count} > words) {
      *row = {row->chunk, kUnchanged, 0, 0, 0};
      return false;
    }
    reserve(*row, words, at);
    for (int stream = kTiles; stream <= kWide; ++stream) {
      const uint64_t size = stream_bytes(*row, stream, words, kLawWordBytes);
      if (size > 0) std::memcpy(at[stream], worker->at(stream), size);
    }
    std::memcpy(at[kLaw], law_, kLawBytes);
    // Planes of the gradients, or of m, which the prediction has by now.
    if (requested_ == kGradientLaw) {
      (void)kernels_.encode_dense(2, kPlanes, gradients, nullptr, count, worker->scratch(),
                                  at + kPlane0);
      std::memcpy(base, prediction, kLawWordBytes * words);
    } else {
      (void)kernels_.encode_dense(kLawWordBytes, kDiff, prediction + part, base + part, count,
                                  worker->scratch(), at + kDiff0);
      std::memcpy(base, prediction, part);
      std::memcpy(base + 2 * part, prediction + 2 * part, part);
    }
    return true;
  }

  // Waits until all earlier chunks have their places, then reserves the place of this one. The
  // thread with the lowest chunk never waits, so there is progress with any number of threads.
  // Returns the stored row.
  Row* reserve(const Row& row, uint64_t words, uint8_t** at) {
    std::unique_lock lock(mutex_);
    turn_.wait(lock, [&] { return failed_ || placed_ == row.chunk; });
    if (failed_) throw std::bad_alloc();
    Row* stored = nullptr;
    if (row.method != kUnchanged) {
      if (result_.rows.capacity() == 0)
        result_.rows.reserve(run_.chunks);  // rows must not move: threads write to them later
      result_.rows.push_back(row);
      stored = &result_.rows.back();
      for (int stream = 0; stream < kStreams; ++stream) {
        const uint64_t size = stream_bytes(row, stream, words, run_.word_bytes);
        if (size == 0) continue;
        Bytes& whole = result_.streams[stream];
        if (whole.data == nullptr) {
          whole = allocate(most_bytes(stream));
          advise_large_pages(whole, stream <= kWide ? size_t{2} << 20 : 0);
          whole.size = 0;
        }
        at[stream] = whole.data.get() + whole.size;
        whole.size += size;
      }
    }
    ++placed_;
    lock.unlock();
    turn_.notify_all();
    return stored;
  }

  // Returns the largest number of bytes that the run can have in a stream. All streams together
  // have at most the bytes of the run, because a chunk is never stored in more bytes than its own.
  size_t most_bytes(int stream) const {
    if (stream == kTiles) return kTileEntryBytes * tiles_;
    if (stream == kBits) return run_.words() / 8 + run_.chunks;
    if (stream == kLaw) return kLawBytes * run_.chunks;
    if (stream == kGaps || stream == kWide || stream == kWords) return run_.bytes();
    return run_.words();
  }

  const Run& run_;
  const uint8_t* const current_;
  uint8_t* const base_;
  const Method requested_;
  const bool ordered_;
  const AdamLaw* const law_;
  const Kernels& kernels_;
  uint64_t most_words_ = 0, tiles_ = 0;
  std::atomic<uint64_t> next_chunk_{0};

  std::mutex mutex_;  // guards the members below
  std::condition_variable turn_;
  uint64_t placed_ = 0;
  bool failed_ = false;
  Encoded result_;
};

// --- apply ---------------------------------------------------------------------------------------

std::string decimal(uint64_t number) { return std::to_string(number); }

std::string in_chunk(uint64_t chunk, const std::string& why) {
  return "chunk " + decimal(chunk) + ": " + why;
}

// Returns the defect of a row by itself, or an empty string.
std::string problem_with(const Row& row, uint64_t words, int word_bytes) {
  if (row.method == kUnchanged || row.method >= kMethods)
    return "method " + decimal(row.method) + " is not known";
  if (row.changed > words) {
    return decimal(row.changed) + " words are said to have changed, there are only " +
           decimal(words);
  }
  const std::string under = std::string(" must be 0 under ") + kMethodNames[row.method];
  const uint32_t method = unordered(row.method);
  if (method != row.method && word_bytes != kOrderedWordBytes) {
    return "words of " + decimal(word_bytes) + " bytes cannot be " + kMethodNames[row.method];
  }
  if (is_law(row.method) && (word_bytes != kLawWordBytes || words % kLawParts != 0)) {
    return decimal(words) + " words of " + decimal(word_bytes) + " bytes cannot be " +
           kMethodNames[row.method];
  }
  const bool sparse = method == kSparse || has_exceptions(method);
  if (row.gap_bytes != 0 && !sparse) return "gap_bytes" + under;
  if (row.wide_count != 0 && !sparse && method != kBitmap) return "wide_count" + under;
  return "";
}

// Computes the offset of each row in every stream. Returns the reason if that is impossible.
std::string place(const Run& run, const Row* rows, uint64_t row_count, const StreamView* streams,
                  std::vector<uint64_t>* offsets) {
  // All rows are checked first: sizes are only defined for a valid chunk number and method.
  uint64_t used[kStreams] = {};
  offsets->resize(row_count * kStreams);
  for (uint64_t i = 0; i < row_count; ++i) {
    const Row& row = rows[i];
    if (row.chunk >= run.chunks)
      return in_chunk(row.chunk, "there are only " + decimal(run.chunks) + " chunks");
    if (i > 0 && row.chunk <= rows[i - 1].chunk) {
      return in_chunk(row.chunk, "its row comes after that of chunk " + decimal(rows[i - 1].chunk));
    }
    const uint64_t words = run.bounds[row.chunk + 1] - run.bounds[row.chunk];
    const std::string problem = problem_with(row, words, run.word_bytes);
    if (!problem.empty()) return in_chunk(row.chunk, problem);
  }
  for (uint64_t i = 0; i < row_count; ++i) {
    const Row& row = rows[i];
    const uint64_t words = run.bounds[row.chunk + 1] - run.bounds[row.chunk];
    for (int stream = 0; stream < kStreams; ++stream) {
      const uint64_t size = stream_bytes(row, stream, words, run.word_bytes);
      if (size > streams[stream].size - used[stream]) {
        return in_chunk(row.chunk,
                        std::string("stream ") + kStreamNames[stream] + " ends inside it");
      }
      (*offsets)[i * kStreams + stream] = used[stream];
      used[stream] += size;
    }
  }
  for (int stream = 0; stream < kStreams; ++stream) {
    // Surplus bytes are refused as well: one delta has exactly one form.
    const uint64_t rest = streams[stream].size - used[stream];
    if (rest != 0)
      return std::string("stream ") + kStreamNames[stream] + " has " + decimal(rest) +
             " bytes that belong to no chunk";
  }
  return "";
}

// Returns the text of a refusal. tests/reference/codec.py has the same texts, which a test
// compares.
std::string text_of(const Row& row, const Refusal& refusal) {
  const std::string actual = decimal(refusal.actual), declared = decimal(refusal.declared);
  const std::string tile = "chunk " + decimal(row.chunk) + ", tile " + decimal(refusal.tile) + ": ";
  switch (refusal.check) {
    case Check::kPassed:
      return "";
    case Check::kChangedSum:
      return in_chunk(row.chunk,
                      "its tiles own " + actual + " changed words, its row says " + declared);
    case Check::kGapSum:
      return in_chunk(row.chunk,
                      "its tiles own " + actual + " gap bytes, its row says " + declared);
    case Check::kWideSum:
      return in_chunk(row.chunk,
                      "its tiles own " + actual + " wide differences, its row says " + declared);
    case Check::kUnusedBit:
      return in_chunk(row.chunk, "an unused bit of the bitmap is set");
    case Check::kTileBits:
      return tile + "its bitmap has " + actual + " bits, its entry says " + declared;
    case Check::kTileGaps:
      return tile + "its " + actual + " gap bytes do not make " + declared + " gaps";
    case Check::kTilePosition:
      return tile + "a position lies outside its " + declared + " words";
    case Check::kTileEscapes:
      return tile + actual + " of its values are wide, its entry says " + declared;
    case Check::kTileWide:
      return tile + "a wide difference fits a value";
    case Check::kUnknownLaw:
      return in_chunk(row.chunk, "its law is not known");
  }
  return "";
}

// Returns one row's parts of the streams. REQUIRES: place() succeeded.
ChunkStreams streams_of(const Row& row, uint64_t words, int word_bytes, const StreamView* streams,
                        const uint64_t* offsets) {
  ChunkStreams parts;
  for (int stream = 0; stream < kStreams; ++stream) {
    const bool present = stream_bytes(row, stream, words, word_bytes) != 0;
    parts.at[stream] = present ? streams[stream].data + offsets[stream] : nullptr;
  }
  return parts;
}

// The same for streams that lie in one memory. REQUIRES: problem_with() found nothing.
ChunkStreams streams_of(const Row& row, uint64_t words, int word_bytes, const uint8_t* streams,
                        const uint64_t* offsets) {
  ChunkStreams parts;
  for (int stream = 0; stream < kStreams; ++stream) {
    const bool present = stream_bytes(row, stream, words, word_bytes) != 0;
    parts.at[stream] = present ? streams + offsets[stream] : nullptr;
  }
  return parts;
}

// Turns a chunk into the one after it by a law. `memory` belongs to the calling thread.
void apply_law(const Kernels& kernels, const Row& row, const ChunkStreams& parts, uint8_t* base,
               uint64_t words, const AdamLaw& law, Bytes* memory) {
  const PlainArithmetic plain;
  const uint64_t count = words / kLawParts, part = kLawWordBytes * count;
  const uint64_t bytes = (kLawWordBytes + 2) * words;
  if (memory->size < bytes) *memory = allocate(bytes);
  uint8_t* const next = memory->data.get();
  // Applies the differences of `elements` words from the `from`-th difference on.
  const auto add = [&](uint8_t* to, uint64_t from, uint64_t elements) {
    ChunkStreams some = parts;
    for (uint32_t k = 0; k < kLawWordBytes; ++k) some.at[kDiff0 + k] += from;
    const Row dense{row.chunk, kDiff, static_cast<uint32_t>(elements), 0, 0};
    kernels.apply_chunk(kLawWordBytes, dense, some, to, elements);
  };
  if (row.method == kStepsLaw) {
    std::memcpy(next + part, base + part, part);
    add(next + part, count, count);
    kernels.law_squares_part(law, count, base + 2 * part, next + 2 * part);
    add(next + 2 * part, 2 * count, count);
    kernels.law_weights_part(law, count, base, next, next);
    add(next, 0, count);
  } else {
    uint8_t* const gradients = next + kLawWordBytes * words;
    if (row.method == kGradientLaw) {
      const Row planes{row.chunk, kPlanes, static_cast<uint32_t>(count), 0, 0};
      kernels.apply_chunk(2, planes, parts, gradients, count);
    } else {
      std::memcpy(next + part, base + part, part);
      add(next + part, 0, count);
    }
    kernels.law_step_part(law, count, base, row.method == kGradientLaw ? gradients : nullptr, next);
    Row sparse = row;
    sparse.method = kSparse;
    kernels.apply_chunk(kLawWordBytes, sparse, parts, next, words);
  }
  std::memcpy(base, next, kLawWordBytes * words);
}

// Checks the streams of a chunk and, if they passed, applies them to it.
// `adder` belongs to the calling thread, and to the chunk.
Refusal check_and_apply(const Kernels& kernels, const Row& row, const ChunkStreams& parts,
                        uint8_t* base, uint64_t words, int word_bytes, OrderedAdder* adder,
                        Bytes* memory) {
  if (is_law(row.method)) {
    AdamLaw law;
    std::memcpy(&law, parts.at[kLaw], sizeof law);
    if (!is_known(law)) return {Check::kUnknownLaw, 0, 0, 0};
    if (has_exceptions(row.method)) {
      Row sparse = row;
      sparse.method = kSparse;
      const Refusal refusal = kernels.check_chunk(word_bytes, sparse, parts, words);
      if (refusal.check != Check::kPassed) return refusal;
    }
    apply_law(kernels, row, parts, base, words, law, memory);
    adder->forget();
    return {};
  }
  Row plain = row;
  plain.method = unordered(row.method);
  const Refusal result = kernels.check_chunk(word_bytes, plain, parts, words);
  if (result.check != Check::kPassed) return result;
  if (plain.method == row.method) {
    kernels.apply_chunk(word_bytes, plain, parts, base, words);
    adder->forget();
    return result;
  }
  // Differences from zeros are the differences.
  kernels.apply_chunk(word_bytes, plain, parts, adder->zeros(words), words);
  adder->add(base, words, row.changed);
  return result;
}

// Returns the defect of a row that is placed by itself, or an empty string.
std::string problem_with(const PlacedRow& placed, const StreamView& streams) {
  const Row& row = placed.row;
  const std::string problem = problem_with(row, placed.words, placed.word_bytes);
  if (!problem.empty()) return in_chunk(row.chunk, problem);
  for (int stream = 0; stream < kStreams; ++stream) {
    const uint64_t size = stream_bytes(row, stream, placed.words, placed.word_bytes);
    const uint64_t at = size == 0 ? 0 : placed.offsets[stream];
    if (at > streams.size || size > streams.size - at) {
      return in_chunk(row.chunk, std::string("stream ") + kStreamNames[stream] + " ends inside it");
    }
  }
  return "";
}

// --- parts of an array ---------------------------------------------------------------------------

// Calls `work` for 0 to `count` - 1, on as many threads as are useful.
template <typename Work>
void for_each(uint64_t count, const Work& work) {
  std::atomic<uint64_t> next{0};
  run_on_threads(static_cast<int>(std::min<uint64_t>(count, static_cast<uint64_t>(threads()))),
                 [&] {
                   const PlainArithmetic plain;
                   for (uint64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) work(i);
                 });
}

uint64_t parts_of(uint64_t count) { return (count + kPartValues - 1) / kPartValues; }

// Calls `work` with the number, the first element and the size of every part.
template <typename Work>
void for_each_part(uint64_t count, const Work& work) {
  for_each(parts_of(count), [&](uint64_t part) {
    const uint64_t first = part * kPartValues;
    work(part, first, std::min<uint64_t>(kPartValues, count - first));
  });
}

}  // namespace

Encoded encode(const Run& run, const uint8_t* current, uint8_t* base, Method method, bool ordered,
               const AdamLaw* law) {
  return Encoder(run, current, base, method, ordered, law).encode();
}

std::string apply(const Run& run, const Row* rows, uint64_t row_count, const StreamView* streams,
                  uint8_t* base) {
  std::vector<uint64_t> offsets;
  const std::string problem = place(run, rows, row_count, streams, &offsets);
  if (!problem.empty()) return problem;
  const Kernels& kernels = *chosen().load();
  std::atomic<uint64_t> next_row{0}, bad_row{row_count};
  std::mutex mutex;
  Refusal refusal;  // of bad_row; guarded by the mutex
  const auto work = [&] {
    OrderedAdder adder;
    Bytes memory;
    for (;;) {
      const uint64_t i = next_row.fetch_add(1);
      // All rows before a bad one have been distributed by now, and each thread completes its own.
      // So the first bad row is found with any number of threads.
      if (i >= bad_row.load()) return;
      const Row& row = rows[i];
      const uint64_t words = run.bounds[row.chunk + 1] - run.bounds[row.chunk];
      const ChunkStreams parts =
          streams_of(row, words, run.word_bytes, streams, offsets.data() + i * kStreams);
      uint8_t* const chunk = base + run.bounds[row.chunk] * run.word_bytes;
      adder.forget();
      const Refusal result =
          check_and_apply(kernels, row, parts, chunk, words, run.word_bytes, &adder, &memory);
      if (result.check == Check::kPassed) continue;
      std::lock_guard lock(mutex);
      if (i < bad_row.load()) {
        bad_row = i;
        refusal = result;
      }
    }
  };
  run_on_threads(static_cast<int>(std::min<uint64_t>(row_count, static_cast<uint64_t>(threads()))),
                 work);
  return bad_row < row_count ? text_of(rows[bad_row], refusal) : "";
}

std::string apply_rows(const std::vector<PlacedRow>& rows, const StreamView& streams,
                       uint64_t* bad_row) {
  std::vector<uint64_t> starts;  // of the rows of each chunk
  for (uint64_t i = 0; i < rows.size(); ++i) {
    if (i == 0 || rows[i].chunk != rows[i - 1].chunk) starts.push_back(i);
  }
  const uint64_t chunks = starts.size();
  starts.push_back(rows.size());
  const Kernels& kernels = *chosen().load();
  std::atomic<uint64_t> next_chunk{0}, bad{rows.size()};
  std::mutex mutex;
  std::string refusal;  // of bad; guarded by the mutex
  const auto refused = [&](const PlacedRow& placed, OrderedAdder* adder, Bytes* memory) {
    std::string problem = problem_with(placed, streams);
    if (!problem.empty()) return problem;
    const Row& row = placed.row;
    const ChunkStreams parts =
        streams_of(row, placed.words, placed.word_bytes, streams.data, placed.offsets);
    return text_of(row, check_and_apply(kernels, row, parts, placed.chunk, placed.words,
                                        placed.word_bytes, adder, memory));
  };
  const auto work = [&] {
    OrderedAdder adder;
    Bytes memory;
    for (uint64_t number; (number = next_chunk.fetch_add(1)) < chunks;) {
      adder.forget();
      for (uint64_t i = starts[number]; i < starts[number + 1] && i < bad.load(); ++i) {
        const std::string problem = refused(rows[i], &adder, &memory);
        if (problem.empty()) continue;
        std::lock_guard lock(mutex);
        if (i < bad.load()) {
          bad = i;
          refusal = problem;
        }
        break;
      }
    }
  };
  run_on_threads(static_cast<int>(std::min<uint64_t>(chunks, static_cast<uint64_t>(threads()))),
                 work);
  *bad_row = bad;
  return refusal;
}

namespace {

// Returns the errors of all parts.
LatticeErrors added(const std::vector<LatticeErrors>& parts) {
  LatticeErrors whole{};
  for (const LatticeErrors& part : parts) {
    whole.refused += part.refused;
    whole.largest = std::max(whole.largest, part.largest);
  }
  return whole;
}

}  // namespace

LatticeErrors lattice_codes(const uint8_t* values, const uint8_t* weights, uint64_t count,
                            double step, uint64_t seed, uint32_t halvings, uint32_t spare_bits,
                            uint8_t* codes) {
  const Kernels& kernels = *chosen().load();
  std::vector<LatticeErrors> parts(parts_of(count));
  for_each_part(count, [&](uint64_t part, uint64_t first, uint64_t size) {
    const uint8_t* beside = weights != nullptr ? weights + 2 * first : nullptr;
    parts[part] = kernels.lattice_codes_part(values + 4 * first, beside, size, step, seed + first,
                                             halvings, spare_bits, codes + 4 * first);
  });
  return added(parts);
}

uint64_t lattice_values(const uint8_t* codes, const uint8_t* weights, uint64_t count, double step,
                        uint64_t seed, uint32_t halvings, uint32_t spare_bits, uint8_t* values) {
  const Kernels& kernels = *chosen().load();
  std::atomic<uint64_t> bad{0};
  for_each_part(count, [&](uint64_t, uint64_t first, uint64_t size) {
    const uint8_t* beside = weights != nullptr ? weights + 2 * first : nullptr;
    bad += kernels.lattice_values_part(codes + 4 * first, beside, size, step, seed + first,
                                       halvings, spare_bits, values + 4 * first);
  });
  return bad;
}

CastErrors lattice_cast_errors(const uint8_t* values, const uint8_t* weights, uint64_t count,
                               double step, uint64_t seed, uint32_t halvings, uint32_t spare_bits) {
  const Kernels& kernels = *chosen().load();
  std::vector<CastErrors> parts(parts_of(count));
  for_each_part(count, [&](uint64_t part, uint64_t first, uint64_t size) {
    parts[part] = kernels.lattice_cast_part(values + 4 * first, weights + 2 * first, size, step,
                                            seed + first, halvings, spare_bits);
  });
  CastErrors whole{};
  for (const CastErrors& part : parts) {
    whole.refused += part.refused;
    whole.largest = std::max(whole.largest, part.largest);
    whole.differences += part.differences;
    whole.weights += part.weights;
  }
  return whole;
}

LatticeErrors nested_codes(const uint8_t* values, const uint8_t* weights, uint64_t count,
                           double step, uint64_t seed, uint32_t code_bytes, uint32_t halvings,
                           uint32_t spare_bits, uint8_t* codes) {
  const Kernels& kernels = *chosen().load();
  std::vector<LatticeErrors> parts(parts_of(count));
  for_each_part(count, [&](uint64_t part, uint64_t first, uint64_t size) {
    parts[part] =
        kernels.nested_codes_part(values + 4 * first, weights + 2 * first, size, step, seed + first,
                                  code_bytes, halvings, spare_bits, codes + code_bytes * first);
  });
  return added(parts);
}

uint64_t nested_values(const uint8_t* codes, const uint8_t* weights, uint64_t count, double step,
                       uint64_t seed, uint32_t code_bytes, uint32_t halvings, uint32_t spare_bits,
                       uint8_t* values) {
  const Kernels& kernels = *chosen().load();
  std::atomic<uint64_t> bad{0};
  for_each_part(count, [&](uint64_t, uint64_t first, uint64_t size) {
    bad += kernels.nested_values_part(codes + code_bytes * first, weights + 2 * first, size, step,
                                      seed + first, code_bytes, halvings, spare_bits,
                                      values + 4 * first);
  });
  return bad;
}

uint64_t octave_codes(const uint8_t* values, const uint8_t* base, uint64_t count,
                      const OctaveForm& form, uint32_t band, uint8_t* codes) {
  const Kernels& kernels = *chosen().load();
  std::atomic<uint64_t> refused{0};
  for_each_part(count, [&](uint64_t, uint64_t first, uint64_t size) {
    const uint64_t at = first * form.code_bytes;
    refused += kernels.octave_codes_part(values + 4 * first, base != nullptr ? base + at : nullptr,
                                         size, form, band, codes + at);
  });
  return refused;
}

uint64_t octave_values(const uint8_t* codes, uint64_t count, const OctaveForm& form,
                       uint8_t* values) {
  const Kernels& kernels = *chosen().load();
  std::atomic<uint64_t> bad{0};
  for_each_part(count, [&](uint64_t, uint64_t first, uint64_t size) {
    bad +=
        kernels.octave_values_part(codes + first * form.code_bytes, size, form, values + 4 * first);
  });
  return bad;
}

RatioErrors ratio_codes(const uint8_t* values, const uint8_t* variances, uint64_t count,
                        const RatioForm& form, uint8_t* codes) {
  const Kernels& kernels = *chosen().load();
  std::vector<RatioErrors> parts(parts_of(count));
  for_each_part(count, [&](uint64_t part, uint64_t first, uint64_t size) {
    parts[part] = kernels.ratio_codes_part(values + 4 * first, variances + 4 * first, size, form,
                                           codes + first);
  });
  RatioErrors whole{};
  for (const RatioErrors& part : parts) {
    whole.refused += part.refused;
    whole.largest = std::max(whole.largest, part.largest);
  }
  return whole;
}

uint64_t ratio_values(const uint8_t* codes, const uint8_t* variances, uint64_t count,
                      const RatioForm& form, uint8_t* values) {
  const Kernels& kernels = *chosen().load();
  std::atomic<uint64_t> bad{0};
  for_each_part(count, [&](uint64_t, uint64_t first, uint64_t size) {
    bad += kernels.ratio_values_part(codes + first, variances + 4 * first, size, form,
                                     values + 4 * first);
  });
  return bad;
}

int threads() { return thread_count(); }

void set_threads(int count) { thread_count() = std::max(1, count); }

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : usable_kernels()) names.emplace_back(kernels->instruction_set);
  return names;
}

std::string instruction_set() { return chosen().load()->instruction_set; }

void use_instruction_set(const std::string& name) { chosen() = kernels_named(name); }

}  // namespace deltacheck
