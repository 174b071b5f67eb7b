#include "entropy_read.h"

#include <sys/stat.h>
#include <unistd.h>
#include <zstd.h>
#ifdef DELTACHECK_BLOSC
#  include <blosc.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#include "crc32c.h"
#include "delta.h"
#include "thread_pool.h"

namespace deltacheck {
namespace {

// The index entry of an absent chunk (zarr v3, sharding codec).
constexpr uint64_t kNoChunk = ~uint64_t{0};

// Byte by byte, because entries of an index have no alignment.
uint64_t little_endian(const uint8_t* from, int bytes) {
  uint64_t value = 0;
  for (int k = 0; k < bytes; ++k) value |= uint64_t{from[k]} << (8 * k);
  return value;
}

bool crc_fits(const uint8_t* data, uint64_t size, const uint8_t* stored) {
  return crc32c(data, size) == little_endian(stored, kCrcBytes);
}

// A zstd context for decompression. Each thread has its own.
class Decompressor {
 public:
  Decompressor() : context_(ZSTD_createDCtx()) {
    if (context_ == nullptr) throw std::bad_alloc();
  }
  ~Decompressor() { ZSTD_freeDCtx(context_); }
  Decompressor(const Decompressor&) = delete;
  Decompressor& operator=(const Decompressor&) = delete;

  // Decodes in one call. zstd then needs no window, whose size a damaged header could set to any
  // value. Returns "", or the reason why `size` bytes are not frames of exactly `expected` bytes.
  std::string decode(const uint8_t* data, uint64_t size, uint8_t* out, uint64_t expected) {
    const size_t decoded = ZSTD_decompressDCtx(context_, out, expected, data, size);
    if (ZSTD_isError(decoded)) return ZSTD_getErrorName(decoded);
    if (decoded != expected)
      return "it decodes to " + std::to_string(decoded) + " bytes and not to " +
             std::to_string(expected);
    return "";
  }

 private:
  ZSTD_DCtx* const context_;
};

// Returns "", or the reason why `size` bytes are no blosc frame of exactly `expected` bytes.
std::string decode_blosc(const uint8_t* data, uint64_t size, uint8_t* out, uint64_t expected) {
#ifdef DELTACHECK_BLOSC
  size_t declared = 0;
  // blosc itself trusts the sizes in its header, so they are validated first.
  if (blosc_cbuffer_validate(data, size, &declared) != 0) return "it is no blosc frame";
  if (declared != expected) {
    return "its frame says that it has " + std::to_string(declared) + " bytes and not " +
           std::to_string(expected);
  }
  const int decoded = blosc_decompress_ctx(data, out, expected, 1);
  return decoded >= 0 && static_cast<uint64_t>(decoded) == expected
             ? ""
             : "its blosc frame cannot be decoded";
#else
  (void)data, (void)size, (void)out, (void)expected;
  return "this build has no blosc";
#endif
}

// Reads a range of one file. Threads take chunks from `next_chunk_`; the first refusal stops them
// all.
class File {
 public:
  File(int descriptor, const FileCut& cut, ChunkCodec codec, uint64_t begin, uint64_t end,
       uint8_t* out)
      : descriptor_(descriptor),
        cut_(cut),
        codec_(codec),
        begin_(begin),
        end_(end),
        out_(out),
        next_chunk_(begin / cut.chunk_bytes),
        stop_((end - 1) / cut.chunk_bytes + 1) {}

  std::string read() {
    struct stat status;
    if (fstat(descriptor_, &status) != 0) return std::strerror(errno);
    chunks_end_ = static_cast<uint64_t>(status.st_size);
    if (cut_.sharded) {
      std::string refusal = read_index();
      if (!refusal.empty()) return refusal;
    }
    const int useful =
        static_cast<int>(std::min<uint64_t>(stop_ - next_chunk_, static_cast<uint64_t>(threads())));
    run_on_threads(useful, [this] { work(); });
    if (no_memory_) throw std::bad_alloc();
    return refusal_;
  }

 private:
  // The index is at the end of the file (index_location "end"), followed by its checksum.
  std::string read_index() {
    index_.resize(cut_.chunks_per_file * kIndexEntryBytes + kCrcBytes);
    if (chunks_end_ < index_.size()) return "it is too short for the index of its chunks";
    chunks_end_ -= index_.size();
    std::string refusal = read_at(index_.data(), index_.size(), chunks_end_);
    if (!refusal.empty()) return refusal;
    const uint64_t size = index_.size() - kCrcBytes;
    return crc_fits(index_.data(), size, index_.data() + size)
               ? ""
               : "the checksum of its index does not fit";
  }

  void work() {
    try {
      for (uint64_t chunk; (chunk = next_chunk_.fetch_add(1)) < stop_;) {
        std::string refusal = read_chunk(chunk);
        if (refusal.empty()) continue;
        std::lock_guard lock(mutex_);
        refusal_ = "chunk " + std::to_string(chunk) + ": " + refusal;
        // No other thread starts a chunk from here on.
        next_chunk_ = stop_;
      }
    } catch (const std::bad_alloc&) {
      std::lock_guard lock(mutex_);
      no_memory_ = true;
    }
  }

  std::string read_chunk(uint64_t chunk) {
    uint64_t at = 0, size = chunks_end_;
    if (cut_.sharded) {
      at = little_endian(index_.data() + chunk * kIndexEntryBytes, 8);
      size = little_endian(index_.data() + chunk * kIndexEntryBytes + 8, 8);
      if (at == kNoChunk && size == kNoChunk) return "it is not there";
      // Written as a subtraction, because at + size may overflow.
      if (at > chunks_end_ || size > chunks_end_ - at) return "the index leads out of the file";
    }
    if (size < kCrcBytes) return "it has no room for a checksum";
    const uint64_t content = size - kCrcBytes, start = chunk * cut_.chunk_bytes;
    const uint64_t from = std::max(begin_, start), to = std::min(end_, start + cut_.chunk_bytes);
    // Kept until the thread ends: the next chunk needs the same memory.
    thread_local std::vector<uint8_t> framed, decoded;
    uint8_t* whole = out_ + (from - begin_);
    // A chunk that is requested whole is decoded directly into the output.
    const bool in_place = to - from == cut_.chunk_bytes;
    if (!in_place) {
      if (decoded.size() < cut_.chunk_bytes) decoded.resize(cut_.chunk_bytes);
      whole = decoded.data();
    }
    std::string refusal = codec_ == ChunkCodec::kStore ? stored(at, content, whole)
                                                       : compressed(at, content, whole, &framed);
    if (refusal.empty() && !in_place)
      std::memcpy(out_ + (from - begin_), whole + (from - start), to - from);
    return refusal;
  }

  std::string stored(uint64_t at, uint64_t content, uint8_t* whole) const {
    if (content != cut_.chunk_bytes) {
      return "it has " + std::to_string(content) + " bytes and not " +
             std::to_string(cut_.chunk_bytes);
    }
    uint8_t crc[kCrcBytes];
    std::string refusal = read_at(whole, content, at);
    if (refusal.empty()) refusal = read_at(crc, kCrcBytes, at + content);
    if (refusal.empty() && !crc_fits(whole, content, crc)) refusal = "its checksum does not fit";
    return refusal;
  }

  std::string compressed(uint64_t at, uint64_t content, uint8_t* whole,
                         std::vector<uint8_t>* framed) const {
    // Every frame of this many bytes is shorter, except for frames with empty blocks.
    if (content > ZSTD_compressBound(cut_.chunk_bytes) + 64)
      return "it is longer than any encoding of it";
    if (framed->size() < content + kCrcBytes) framed->resize(content + kCrcBytes);
    std::string refusal = read_at(framed->data(), content + kCrcBytes, at);
    if (!refusal.empty()) return refusal;
    if (!crc_fits(framed->data(), content, framed->data() + content))
      return "its checksum does not fit";
    if (codec_ == ChunkCodec::kBlosc)
      return decode_blosc(framed->data(), content, whole, cut_.chunk_bytes);
    thread_local Decompressor decompressor;
    return decompressor.decode(framed->data(), content, whole, cut_.chunk_bytes);
  }

  std::string read_at(uint8_t* into, uint64_t size, uint64_t at) const {
    while (size > 0) {
      // pread has no shared file position, so threads may read at the same time.
      const ssize_t count = pread(descriptor_, into, size, static_cast<off_t>(at));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return std::strerror(errno);
      if (count == 0) return "the file ends before it";
      into += count;
      at += static_cast<uint64_t>(count);
      size -= static_cast<uint64_t>(count);
    }
    return "";
  }

  const int descriptor_;
  const FileCut& cut_;
  const ChunkCodec codec_;
  const uint64_t begin_, end_;
  uint8_t* const out_;
  std::atomic<uint64_t> next_chunk_;
  const uint64_t stop_;
  uint64_t chunks_end_ = 0;  // offset of the index, or the size of the file
  std::vector<uint8_t> index_;

  std::mutex mutex_;  // guards the members below
  std::string refusal_;
  bool no_memory_ = false;
};

}  // namespace

bool can_read(ChunkCodec codec) {
#ifdef DELTACHECK_BLOSC
  (void)codec;
  return true;
#else
  return codec != ChunkCodec::kBlosc;
#endif
}

std::string read_array_file(int descriptor, const FileCut& cut, ChunkCodec codec, uint64_t begin,
                            uint64_t end, uint8_t* out) {
  return File(descriptor, cut, codec, begin, end, out).read();
}

}  // namespace deltacheck
