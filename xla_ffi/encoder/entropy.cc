#include "entropy.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <new>

#include "crc32c.h"
#include "thread_pool.h"

#define ZSTD_STATIC_LINKING_ONLY  // ZSTD_compressSequences
#include <zstd.h>

namespace deltacheck {
namespace {

// Bytes of a block, which has Huffman codes of its own. Smaller: codes fit bytes whose distribution
// changes within a stream, as from leaf to leaf; larger: fewer tables of codes.
constexpr uint64_t kBlock = 32 << 10;

// Bytes of a run that is left out of the literals. A run is found if it covers an aligned window.
constexpr uint64_t kLeastRun = 16, kWindow = 16;

// A chunk is judged by a sample: kPieces pieces of it, together a fraction 1 / kSampleShare of its
// bytes within these bounds.
constexpr uint64_t kSampleShare = 32, kLeastSample = 4096, kMostSample = 16384, kPieces = 4;
// zstd is tried if it may find a match at more than a fraction 1 / kRepeatShare of the positions.
constexpr uint64_t kRepeatShare = 16;
// Matches take time. At the lowest level they must save a fraction 1 / kLeastGain of a frame, and
// more of a sample, in which short matches cost less than in a whole chunk: of differences,
// samples whose gain was smaller had larger frames than without matches.
constexpr uint64_t kLeastGain = 64, kLeastGainOfSample = 8;

void put_little_endian(uint64_t value, int bytes, uint8_t* out) {
  for (int k = 0; k < bytes; ++k) out[k] = static_cast<uint8_t>(value >> (8 * k));
}

void put_crc(uint8_t* data, uint64_t size) {
  put_little_endian(crc32c(data, size), kCrcBytes, data + size);
}

// Writes all bytes. Returns 0 or an errno.
int write_at(int descriptor, const uint8_t* data, uint64_t size, uint64_t at) {
  while (size > 0) {
    const ssize_t written = pwrite(descriptor, data, size, static_cast<off_t>(at));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    data += written;
    at += static_cast<uint64_t>(written);
    size -= static_cast<uint64_t>(written);
  }
  return 0;
}

// Compresses frames. Each thread has its own, because a zstd context is not thread safe.
class Compressor {
 public:
  Compressor() : context_(ZSTD_createCCtx()) {
    if (context_ == nullptr) throw std::bad_alloc();
    ZSTD_CCtx_setParameter(context_, ZSTD_c_blockDelimiters, ZSTD_sf_explicitBlockDelimiters);
  }
  ~Compressor() { ZSTD_freeCCtx(context_); }
  Compressor(const Compressor&) = delete;
  Compressor& operator=(const Compressor&) = delete;

  // Writes one frame of `size` bytes to `out`, which has room for ZSTD_compressBound(max(size,
  // kMostSample)). Returns its size.
  uint64_t frame(int level, const uint8_t* data, uint64_t size, uint8_t* out, uint64_t room) {
    ZSTD_CCtx_setParameter(context_, ZSTD_c_compressionLevel, level);
    const uint64_t piece = std::clamp(size / kSampleShare, kLeastSample, kMostSample) / kPieces;
    if (size <= kPieces * piece) {
      return matches_pay(level, kLeastGain, data, size, out, room)
                 ? with_matches(data, size, out, room)
                 : with_runs(data, size, out, room);
    }
    uint8_t sample[kMostSample];
    for (uint64_t k = 0; k < kPieces; ++k) {
      std::memcpy(sample + k * piece, data + (size - piece) * k / (kPieces - 1), piece);
    }
    const bool matches = (level > 1 || repeats(sample, kPieces * piece)) &&
                         matches_pay(level, kLeastGainOfSample, sample, kPieces * piece, out, room);
    return matches ? with_matches(data, size, out, room) : with_runs(data, size, out, room);
  }

 private:
  // Returns true if matches make a frame smaller by more than their time is worth: at the lowest
  // level, by a fraction 1 / least_gain.
  bool matches_pay(int level, uint64_t least_gain, const uint8_t* data, uint64_t size, uint8_t* out,
                   uint64_t room) {
    const uint64_t without = with_runs(data, size, out, room);
    return with_matches(data, size, out, room) < without - (level > 1 ? 0 : without / least_gain);
  }

  // Returns false if few groups of 8 bytes, other than runs, occur twice. The trial of zstd would
  // then find no gain, and it takes many times as long.
  bool repeats(const uint8_t* data, uint64_t size) {
    constexpr int kBits = 12;
    uint16_t last[1 << kBits] = {};  // the position after the last group of each hash
    static_assert(kMostSample <= UINT16_MAX);
    uint64_t count = 0;
    for (uint64_t at = 0; at + 8 <= size; ++at) {
      const uint64_t group = word_at(data + at);
      if (is_run(group)) continue;
      uint16_t& before = last[group * 0x9e3779b97f4a7c15u >> (64 - kBits)];
      count += before != 0 && word_at(data + before - 1) == group;
      before = static_cast<uint16_t>(at + 1);
    }
    return count > size / kRepeatShare;
  }

  uint64_t with_matches(const uint8_t* data, uint64_t size, uint8_t* out, uint64_t room) {
    return checked(ZSTD_compress2(context_, out, room, data, size));
  }

  // Writes blocks whose only matches are runs of a byte. zstd encodes the other bytes with Huffman
  // codes, without a search for matches. Differences are mostly noise and runs of zeros.
  uint64_t with_runs(const uint8_t* data, uint64_t size, uint8_t* out, uint64_t room) {
    sequences_.clear();
    for (uint64_t at = 0; at < size || at == 0; at += kBlock)
      add_block(data, data + at, data + std::min(size, at + kBlock));
    return checked(ZSTD_compressSequences(context_, out, room, sequences_.data(), sequences_.size(),
                                          data, size));
  }

  // Adds the runs of one block, and its end. `start`: of the frame.
  void add_block(const uint8_t* start, const uint8_t* begin, const uint8_t* end) {
    const uint8_t* literals = begin;  // the first byte behind the run before
    for (const uint8_t* at = begin; end - at >= static_cast<ptrdiff_t>(kWindow);) {
      const uint64_t word = word_at(at);
      if (word != word_at(at + 8) || !is_run(word)) {
        at += kWindow;
        continue;
      }
      const uint8_t* first = at;
      while (first > literals && first[-1] == *at) --first;
      // A match repeats the byte before it.
      if (first > literals || first == start || first[-1] != *at) ++first;
      at = end_of_run(at + kWindow, end, word);
      if (at - first < static_cast<ptrdiff_t>(kLeastRun)) continue;
      sequences_.push_back(
          {1, static_cast<unsigned>(first - literals), static_cast<unsigned>(at - first), 0});
      literals = at;
    }
    sequences_.push_back({0, static_cast<unsigned>(end - literals), 0, 0});
  }

  // Returns the first position at which the bytes differ from `word`, a run.
  static const uint8_t* end_of_run(const uint8_t* at, const uint8_t* end, uint64_t word) {
    while (end - at >= 8 && word_at(at) == word) at += 8;
    while (at < end && *at == static_cast<uint8_t>(word)) ++at;
    return at;
  }

  static uint64_t word_at(const uint8_t* at) {
    uint64_t word;
    std::memcpy(&word, at, sizeof word);
    return word;
  }

  // Returns true if all bytes of a word are equal.
  static bool is_run(uint64_t word) { return word == (word << 8 | word >> 56); }

  // With sufficient room, zstd can only fail for lack of memory.
  static uint64_t checked(size_t result) {
    if (ZSTD_isError(result)) throw std::bad_alloc();
    return result;
  }

  ZSTD_CCtx* const context_;
  std::vector<ZSTD_Sequence> sequences_;
};

class File {
 public:
  File(int descriptor, const std::vector<StreamView>& pieces, const FileCut& cut, int level,
       uint64_t number)
      : descriptor_(descriptor),
        pieces_(pieces),
        cut_(cut),
        level_(level),
        first_(number * cut.chunks_per_file) {
    starts_.reserve(pieces.size() + 1);
    starts_.push_back(0);
    for (const StreamView& piece : pieces) starts_.push_back(starts_.back() + piece.size);
    const uint64_t chunks = (starts_.back() + cut.chunk_bytes - 1) / cut.chunk_bytes;
    chunks_ = std::min(cut.chunks_per_file, chunks - first_);
    // In the index of a shard, absent chunks are all ones (zarr v3, sharding codec).
    if (cut.sharded) index_.assign(cut.chunks_per_file * kIndexEntryBytes + kCrcBytes, 0xff);
  }

  int write() {
    const int useful =
        static_cast<int>(std::min<uint64_t>(chunks_, static_cast<uint64_t>(threads())));
    run_on_threads(useful, [this] { work(); });
    if (no_memory_) throw std::bad_alloc();
    if (error_ != 0 || !cut_.sharded) return error_;
    put_crc(index_.data(), index_.size() - kCrcBytes);
    return write_at(descriptor_, index_.data(), index_.size(), end_);
  }

 private:
  void work() {
    try {
      for (uint64_t chunk; (chunk = next_chunk_.fetch_add(1)) < chunks_;) {
        if (!write_chunk(chunk)) return;
      }
    } catch (const std::bad_alloc&) {
      std::lock_guard lock(mutex_);
      no_memory_ = true;
      turn_.notify_all();
    }
  }

  // Returns false if another chunk has failed.
  bool write_chunk(uint64_t chunk) {
    const uint64_t size = cut_.chunk_bytes;
    thread_local std::vector<uint8_t> gathered, framed;
    const uint8_t* data = contiguous(first_ + chunk, &gathered);
    if (level_ > 0) {
      thread_local Compressor compressor;
      const uint64_t room = ZSTD_compressBound(std::max(size, kMostSample));
      if (framed.size() < room + kCrcBytes) framed.resize(room + kCrcBytes);
      const uint64_t frame = compressor.frame(level_, data, size, framed.data(), room);
      put_crc(framed.data(), frame);
      const int64_t at = place(chunk, frame + kCrcBytes);
      return at >= 0 && noted(write_at(descriptor_, framed.data(), frame + kCrcBytes,
                                       static_cast<uint64_t>(at)));
    }
    const int64_t at = place(chunk, size + kCrcBytes);
    uint8_t crc[kCrcBytes];
    put_little_endian(crc32c(data, size), kCrcBytes, crc);
    return at >= 0 && noted(write_at(descriptor_, data, size, static_cast<uint64_t>(at))) &&
           noted(write_at(descriptor_, crc, kCrcBytes, static_cast<uint64_t>(at) + size));
  }

  // Returns the bytes of one chunk: in their place, or gathered from their pieces and padded.
  const uint8_t* contiguous(uint64_t chunk, std::vector<uint8_t>* gathered) const {
    const uint64_t begin = chunk * cut_.chunk_bytes,
                   end = std::min(begin + cut_.chunk_bytes, starts_.back());
    size_t piece = static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), begin) -
                                       starts_.begin() - 1);
    if (end - begin == cut_.chunk_bytes && end <= starts_[piece + 1])
      return pieces_[piece].data + (begin - starts_[piece]);
    if (gathered->size() < cut_.chunk_bytes) gathered->resize(cut_.chunk_bytes);
    for (uint64_t at = begin; at < end; ++piece) {
      const uint64_t part = std::min(end, starts_[piece + 1]) - at;
      if (part > 0)
        std::memcpy(gathered->data() + (at - begin), pieces_[piece].data + (at - starts_[piece]),
                    part);
      at += part;
    }
    std::memset(gathered->data() + (end - begin), 0, cut_.chunk_bytes - (end - begin));
    return gathered->data();
  }

  // Returns the offset of a chunk of `size` bytes behind the earlier chunks; waits for them. The
  // thread with the lowest chunk never waits, so there is progress with any number of threads.
  // Returns -1 if another chunk has failed.
  int64_t place(uint64_t chunk, uint64_t size) {
    std::unique_lock lock(mutex_);
    turn_.wait(lock, [&] { return no_memory_ || error_ != 0 || placed_ == chunk; });
    if (no_memory_ || error_ != 0) return -1;
    const uint64_t at = end_;
    end_ += size;
    if (cut_.sharded) {
      put_little_endian(at, 8, index_.data() + chunk * kIndexEntryBytes);
      put_little_endian(size, 8, index_.data() + chunk * kIndexEntryBytes + 8);
    }
    ++placed_;
    lock.unlock();
    turn_.notify_all();
    return static_cast<int64_t>(at);
  }

  bool noted(int error) {
    if (error == 0) return true;
    std::lock_guard lock(mutex_);
    error_ = error;
    turn_.notify_all();
    return false;
  }

  const int descriptor_;
  const std::vector<StreamView>& pieces_;
  const FileCut& cut_;
  const int level_;
  const uint64_t first_;
  uint64_t chunks_;
  std::vector<uint64_t> starts_;
  std::atomic<uint64_t> next_chunk_{0};

  std::mutex mutex_;  // guards the members below
  std::condition_variable turn_;
  uint64_t placed_ = 0, end_ = 0;
  bool no_memory_ = false;
  int error_ = 0;
  std::vector<uint8_t> index_;
};

}  // namespace

int write_stream_file(int descriptor, const std::vector<StreamView>& pieces, const FileCut& cut,
                      int level, uint64_t number) {
  return File(descriptor, pieces, cut, level, number).write();
}

}  // namespace deltacheck
