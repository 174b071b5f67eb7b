// The memory of streams. `delta.cc` and `module.cc` allocate streams here. Released blocks are kept
// for a while: the system provides new memory page by page and clears it, which takes about as long
// as filling it.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace deltacheck {

struct Free {
  void operator()(uint8_t* memory) const;
};

// A block of memory. `size` is the number of bytes in use; the block may have room for more.
struct Bytes {
  std::unique_ptr<uint8_t, Free> data;
  size_t size = 0;
};

// Returns a block with room for `size` bytes. Its content is undefined. Throws std::bad_alloc.
Bytes allocate(size_t size);

// Shrinks a block to its final `size`. Nothing was ever written behind it. If the block is mostly
// empty, its bytes move to a smaller block and the large one is kept for the next call. Otherwise a
// large remainder is returned to the system.
void settle(Bytes* block);

// The largest number of unused bytes that this process keeps, not counting memory that was never
// written. Larger: more calls find memory that is already mapped; smaller: more memory is left for
// everything else.
constexpr size_t kKeptBytes = size_t{16} << 20;

}  // namespace deltacheck
