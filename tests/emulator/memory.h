// Memory for the emulated tests. The address sanitizer watches the bytes around it.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace check {

// `size` bytes that begin `offset` bytes after a boundary of 256, as device memory may.
class Memory {
 public:
  explicit Memory(size_t size, size_t offset = 0) : offset_(offset), size_(size) {
    void* memory;
    if (posix_memalign(&memory, 256, offset + size) != 0) throw std::bad_alloc();
    start_.reset(static_cast<uint8_t*>(memory));
    std::memset(memory, kUntouched, offset + size);
  }
  Memory(const void* content, size_t size, size_t offset) : Memory(size, offset) {
    if (size > 0) std::memcpy(data(), content, size);
  }

  uint8_t* data() const { return start_.get() + offset_; }
  size_t size() const { return size_; }
  bool untouched_before() const {
    return std::all_of(start_.get(), data(), [](uint8_t byte) { return byte == kUntouched; });
  }

 private:
  static constexpr uint8_t kUntouched = 0xa5;
  struct Free {
    void operator()(uint8_t* memory) const { std::free(memory); }
  };
  std::unique_ptr<uint8_t, Free> start_;
  size_t offset_, size_;
};

}  // namespace check
