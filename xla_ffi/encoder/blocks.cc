#include "blocks.h"

#ifdef __linux__
#  include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <utility>

namespace deltacheck {
namespace {

constexpr size_t kLeastKept = size_t{128} << 10;  // malloc itself keeps smaller ones
constexpr size_t kMostBlocks = 64;                // limits the address space in use
// Larger blocks come directly from the system and return to it. malloc may keep freed memory for
// ever, and for one of its threads alone.
constexpr size_t kLeastMapped = size_t{1} << 20;
constexpr size_t kLead = 16;  // before the header of a mapped block

// Precedes every block. Its size shifts the bytes of large blocks, which begin kLead bytes after
// the start of a page, to the start of a cache line.
struct alignas(16) Header {
  size_t room;
  size_t filled;         // highest byte that may have been written: no page exists behind it
  size_t filled_before;  // the same before its present use
  size_t mapped;         // mapped bytes, with lead and header; 0 for memory of malloc
  uint8_t unused[48 - 4 * sizeof(size_t)];
};
static_assert(sizeof(Header) == 48);

Header* header_of(uint8_t* data) { return reinterpret_cast<Header*>(data) - 1; }
uint8_t* data_of(Header* header) { return reinterpret_cast<uint8_t*>(header + 1); }

// Returns a block with room for `size`, or null if there is no memory.
Header* obtain(size_t size) {
  void* memory;
  size_t mapped = 0;
#ifdef __linux__
  if (size >= kLeastMapped) {
    mapped = kLead + sizeof(Header) + size;
    memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memory = memory == MAP_FAILED ? nullptr : static_cast<uint8_t*>(memory) + kLead;
  } else
#endif
  {
    memory = std::malloc(sizeof(Header) + size);
  }
  return memory == nullptr ? nullptr : new (memory) Header{size, 0, 0, mapped, {}};
}

void release(Header* block) {
#ifdef __linux__
  if (block->mapped != 0) {
    munmap(reinterpret_cast<uint8_t*>(block) - kLead, block->mapped);
    return;
  }
#endif
  std::free(block);
}

// Returns the block with less room, possibly at another address. Returns null on failure; the block
// is then unchanged.
Header* shrink(Header* block, size_t size) {
#ifdef __linux__
  if (block->mapped != 0) {
    const size_t bytes = kLead + sizeof(Header) + size;
    if (mremap(reinterpret_cast<uint8_t*>(block) - kLead, block->mapped, bytes, 0) == MAP_FAILED)
      return nullptr;
    block->mapped = bytes;
    block->room = size;
    return block;
  }
#endif
  auto* const smaller = static_cast<Header*>(std::realloc(block, sizeof(Header) + size));
  if (smaller != nullptr) smaller->room = size;
  return smaller;
}

struct Kept {
  std::mutex mutex;            // only try_lock: after a fork it may be locked for ever
  std::deque<Header*> blocks;  // oldest first
  size_t bytes = 0;
};

// Never destroyed, because blocks are released until the process ends.
Kept& kept_blocks() {
  static Kept* const all = new Kept;
  return *all;
}

// Returns a kept block with room for `size` but not much more, or null.
Header* take(size_t size) {
  std::unique_lock lock(kept_blocks().mutex, std::try_to_lock);
  if (!lock.owns_lock()) return nullptr;
  auto& blocks = kept_blocks().blocks;
  const auto fits = std::find_if(blocks.rbegin(), blocks.rend(), [&](const Header* block) {
    return block->room >= size && block->room - size <= size / 8;
  });
  if (fits == blocks.rend()) return nullptr;
  Header* const block = *fits;
  blocks.erase(std::next(fits).base());
  kept_blocks().bytes -= block->filled;
  return block;
}

// Keeps a block and releases older ones in its place. Returns false if the caller must free it.
bool keep(Header* block) {
  if (block->room < kLeastKept || block->filled > kKeptBytes) return false;
  std::deque<Header*> old;
  {
    std::unique_lock lock(kept_blocks().mutex, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    auto& blocks = kept_blocks().blocks;
    for (; kept_blocks().bytes + block->filled > kKeptBytes || blocks.size() == kMostBlocks;
         blocks.pop_front()) {
      kept_blocks().bytes -= blocks.front()->filled;
      old.push_back(blocks.front());
    }
    blocks.push_back(block);
    kept_blocks().bytes += block->filled;
  }
  for (Header* each : old) release(each);
  return true;
}

}  // namespace

void Free::operator()(uint8_t* memory) const {
  if (!keep(header_of(memory))) release(header_of(memory));
}

Bytes allocate(size_t size) {
  Header* block = size < kLeastKept ? nullptr : take(size);
  if (block == nullptr) {
    block = obtain(size);
    if (block == nullptr) throw std::bad_alloc();
  }
  block->filled_before = block->filled;
  block->filled = block->room;
  return {std::unique_ptr<uint8_t, Free>(data_of(block)), size};
}

void settle(Bytes* block) {
  if (block->data == nullptr) return;
  Header* const before = header_of(block->data.get());
  before->filled = std::max(before->filled_before, block->size);
  if (before->room >= kLeastKept && block->size <= before->room / 4) {
    Bytes small = allocate(block->size);
    std::memcpy(small.data.get(), block->data.get(), block->size);
    *block = std::move(small);
  } else if (before->room - block->size > before->room / 8) {
    if (Header* const after = shrink(before, block->size)) {
      (void)block->data.release();
      after->filled = block->size;
      block->data.reset(data_of(after));
    }
  }
}

}  // namespace deltacheck
