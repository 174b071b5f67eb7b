// Memory for streams. Blocks that were given back are kept for a while: the system hands out new
// memory page by page and clears it, which takes about as long as filling it.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace deltacheck {

struct Free {
  void operator()(uint8_t* memory) const;
};

// A block; may hold less than it has room for.
struct Bytes {
  std::unique_ptr<uint8_t, Free> data;
  size_t size = 0;
};

// Throws std::bad_alloc. What it holds is not defined.
Bytes allocate(size_t size);

// Brings a block to its `size`, which is now known: nothing was ever written behind it. A block
// that is mostly empty is left to the next call, and the bytes move; else what is behind them is
// given back, if it is much.
void settle(Bytes* block);

// Most bytes that this process keeps in blocks that nobody uses, not counting what was never
// filled. Larger: more calls find warm memory; it is taken from everything else.
constexpr size_t kKeptBytes = size_t{64} << 20;

}  // namespace deltacheck
