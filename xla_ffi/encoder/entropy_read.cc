#include "entropy_read.h"

#include <sys/stat.h>
#include <unistd.h>
// For frames that are decoded block by block. The library is built with this module.
#define ZSTD_STATIC_LINKING_ONLY
#define ZSTD_DISABLE_DEPRECATE_WARNINGS
#include <blosc.h>
#include <zstd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>
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

  // Decodes the blocks of the first `until` bytes, or a few more, of frames that have `expected`
  // bytes at most. Returns "", or the reason why it cannot.
  std::string decode_until(const uint8_t* data, uint64_t size, uint8_t* out, uint64_t expected,
                           uint64_t until) {
    uint64_t decoded = 0;
    size_t needed = 0;
    while (decoded < until) {
      // Zero at the beginning, and at the end of a frame.
      if (needed == 0) ZSTD_decompressBegin(context_);
      needed = ZSTD_nextSrcSizeToDecompress(context_);
      if (needed > size) return "its frame ends too early";
      const size_t added =
          ZSTD_decompressContinue(context_, out + decoded, expected - decoded, data, needed);
      if (ZSTD_isError(added)) return ZSTD_getErrorName(added);
      data += needed;
      size -= needed;
      decoded += added;
      needed = ZSTD_nextSrcSizeToDecompress(context_);
    }
    return "";
  }

 private:
  ZSTD_DCtx* const context_;
};

// Returns "", or the reason why `size` bytes are no blosc frame of exactly `expected` bytes.
std::string decode_blosc(const uint8_t* data, uint64_t size, uint8_t* out, uint64_t expected) {
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
}

// An open file of an array, whose chunks can be decoded in any order.
class File {
 public:
  explicit File(const SourceFile& source) : source_(source) {}

  // Reads the index. Returns "", or the reason why there is none. REQUIRED before the others.
  std::string open() {
    struct stat status;
    if (fstat(source_.descriptor, &status) != 0) return std::strerror(errno);
    chunks_end_ = static_cast<uint64_t>(status.st_size);
    return source_.cut.sharded ? read_index() : "";
  }

  // Decodes the first `until` bytes of a chunk, or more. Its checksum is compared in any case.
  // Returns "", or the damage.
  std::string decode(uint64_t chunk, uint64_t until, uint8_t* whole) const {
    uint64_t at = 0, size = chunks_end_;
    if (source_.cut.sharded) {
      at = little_endian(index_.data() + chunk * kIndexEntryBytes, 8);
      size = little_endian(index_.data() + chunk * kIndexEntryBytes + 8, 8);
      if (at == kNoChunk && size == kNoChunk) return "it is not there";
      // Written as a subtraction, because at + size may overflow.
      if (at > chunks_end_ || size > chunks_end_ - at) return "the index leads out of the file";
    }
    if (size < kCrcBytes) return "it has no room for a checksum";
    const uint64_t content = size - kCrcBytes;
    return source_.codec == ChunkCodec::kStore ? stored(at, content, whole)
                                               : compressed(at, content, until, whole);
  }

 private:
  // The index is at the end of the file (index_location "end"), followed by its checksum.
  std::string read_index() {
    index_.resize(source_.cut.chunks_per_file * kIndexEntryBytes + kCrcBytes);
    if (chunks_end_ < index_.size()) return "it is too short for the index of its chunks";
    chunks_end_ -= index_.size();
    std::string refusal = read_at(index_.data(), index_.size(), chunks_end_);
    if (!refusal.empty()) return refusal;
    const uint64_t size = index_.size() - kCrcBytes;
    return crc_fits(index_.data(), size, index_.data() + size)
               ? ""
               : "the checksum of its index does not fit";
  }

  std::string stored(uint64_t at, uint64_t content, uint8_t* whole) const {
    if (content != source_.cut.chunk_bytes) {
      return "it has " + std::to_string(content) + " bytes and not " +
             std::to_string(source_.cut.chunk_bytes);
    }
    uint8_t crc[kCrcBytes];
    std::string refusal = read_at(whole, content, at);
    if (refusal.empty()) refusal = read_at(crc, kCrcBytes, at + content);
    if (refusal.empty() && !crc_fits(whole, content, crc)) refusal = "its checksum does not fit";
    return refusal;
  }

  std::string compressed(uint64_t at, uint64_t content, uint64_t until, uint8_t* whole) const {
    const uint64_t chunk_bytes = source_.cut.chunk_bytes;
    // Every frame of this many bytes is shorter, except for frames with empty blocks.
    if (content > ZSTD_compressBound(chunk_bytes) + 64)
      return "it is longer than any encoding of it";
    // Kept until the thread ends: the next chunk needs the same memory.
    thread_local std::vector<uint8_t> framed;
    if (framed.size() < content + kCrcBytes) framed.resize(content + kCrcBytes);
    std::string refusal = read_at(framed.data(), content + kCrcBytes, at);
    if (!refusal.empty()) return refusal;
    if (!crc_fits(framed.data(), content, framed.data() + content))
      return "its checksum does not fit";
    if (source_.codec == ChunkCodec::kBlosc)
      return decode_blosc(framed.data(), content, whole, chunk_bytes);
    thread_local Decompressor decompressor;
    if (until < chunk_bytes)
      return decompressor.decode_until(framed.data(), content, whole, chunk_bytes, until);
    return decompressor.decode(framed.data(), content, whole, chunk_bytes);
  }

  std::string read_at(uint8_t* into, uint64_t size, uint64_t at) const {
    while (size > 0) {
      // pread has no shared file position, so threads may read at the same time.
      const ssize_t count = pread(source_.descriptor, into, size, static_cast<off_t>(at));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return std::strerror(errno);
      if (count == 0) return "the file ends before it";
      into += count;
      at += static_cast<uint64_t>(count);
      size -= static_cast<uint64_t>(count);
    }
    return "";
  }

  const SourceFile source_;
  uint64_t chunks_end_ = 0;  // offset of the index, or the size of the file
  std::vector<uint8_t> index_;
};

// A part of a piece: bytes `from` to `to` of one chunk.
struct Portion {
  uint64_t file, chunk, from, to;
  uint8_t* out;
};

// Reads pieces of files. Threads take chunks, and each chunk is decoded once, whatever number of
// pieces lie in it. The first refusal stops them all.
class PieceReader {
 public:
  PieceReader(const std::vector<SourceFile>& sources, const std::vector<Piece>& pieces)
      : files_(sources.begin(), sources.end()) {
    for (const Piece& piece : pieces) {
      const uint64_t chunk_bytes = sources[piece.file].cut.chunk_bytes;
      const uint64_t end = piece.begin + piece.size;
      for (uint64_t begin = piece.begin; begin < end;) {
        const uint64_t chunk = begin / chunk_bytes, start = chunk * chunk_bytes;
        const uint64_t to = std::min(end - start, chunk_bytes);
        portions_.push_back(
            {piece.file, chunk, begin - start, to, piece.out + (begin - piece.begin)});
        begin = start + to;
      }
    }
    const auto key = [](const Portion& portion) {
      return std::make_pair(portion.file, portion.chunk);
    };
    std::stable_sort(portions_.begin(), portions_.end(),
                     [&](const Portion& a, const Portion& b) { return key(a) < key(b); });
    for (uint64_t i = 0; i < portions_.size(); ++i) {
      if (i == 0 || key(portions_[i]) != key(portions_[i - 1])) starts_.push_back(i);
    }
    chunks_ = starts_.size();
    starts_.push_back(portions_.size());
    for (const SourceFile& source : sources) chunk_bytes_.push_back(source.cut.chunk_bytes);
  }

  ReadRefusal read() {
    run(files_.size(), [this](uint64_t file) { refuse(file, files_[file].open()); });
    if (refusal_.why.empty()) run(chunks_, [this](uint64_t number) { decode(number); });
    if (no_memory_) throw std::bad_alloc();
    return refusal_;
  }

 private:
  // Calls `work` for 0 to `count` - 1 on as many threads as are useful.
  template <typename Work>
  void run(uint64_t count, const Work& work) {
    next_ = 0;
    stop_ = count;
    const int useful =
        static_cast<int>(std::min<uint64_t>(count, static_cast<uint64_t>(threads())));
    run_on_threads(useful, [&] {
      try {
        for (uint64_t number; (number = next_.fetch_add(1)) < stop_;) work(number);
      } catch (const std::bad_alloc&) {
        std::lock_guard lock(mutex_);
        no_memory_ = true;
      }
    });
  }

  void decode(uint64_t number) {
    const uint64_t first = starts_[number], stop = starts_[number + 1];
    const Portion& portion = portions_[first];
    const uint64_t size = chunk_bytes_[portion.file];
    // A chunk that is requested whole is decoded directly into the output.
    const bool in_place = portion.from == 0 && portion.to == size;
    // Kept until the thread ends: the next chunk needs the same memory.
    thread_local std::vector<uint8_t> decoded;
    if (!in_place && decoded.size() < size) decoded.resize(size);
    uint8_t* whole = in_place ? portion.out : decoded.data();
    // Bytes behind the last portion need no decoding: a chunk holds the streams of many leaves.
    uint64_t until = 0;
    for (uint64_t i = first; i < stop; ++i) until = std::max(until, portions_[i].to);
    const std::string why = files_[portion.file].decode(portion.chunk, until, whole);
    if (!why.empty()) {
      refuse(portion.file, "chunk " + std::to_string(portion.chunk) + ": " + why);
      return;
    }
    for (uint64_t i = first + (in_place ? 1 : 0); i < stop; ++i) {
      const Portion& other = portions_[i];
      std::memcpy(other.out, whole + other.from, other.to - other.from);
    }
  }

  void refuse(uint64_t file, const std::string& why) {
    if (why.empty()) return;
    std::lock_guard lock(mutex_);
    refusal_ = {file, why};
    // No other thread starts a chunk from here on.
    next_ = stop_;
  }

  std::vector<File> files_;
  std::vector<uint64_t> chunk_bytes_;
  std::vector<Portion> portions_;  // by file and chunk
  std::vector<uint64_t> starts_;   // of each chunk's portions
  uint64_t chunks_ = 0;
  std::atomic<uint64_t> next_{0};
  uint64_t stop_ = 0;

  std::mutex mutex_;  // guards the members below
  ReadRefusal refusal_;
  bool no_memory_ = false;
};

}  // namespace

ReadRefusal read_pieces(const std::vector<SourceFile>& files, const std::vector<Piece>& pieces) {
  return PieceReader(files, pieces).read();
}

}  // namespace deltacheck
