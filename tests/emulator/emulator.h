// Executes CUDA kernels on the host, with one fiber per thread, to find errors that a GPU shows
// only now and then.
//
// A few dozen blocks are resident at once, in an order that no kernel can rely on. The next fiber
// is drawn at random (from `settings().seed`) at barriers, warp functions and atomics. The shared
// memory of a block starts as garbage and ends at the end of its type. A launch with a definite
// error throws Error: threads of a block at different barriers or at none, lanes at different warp
// functions, a shuffle from a lane that does not take part, threads that wait for ever. A missing
// barrier cannot be detected directly; it shows as wrong results for some seeds.
//
// Only the functions that our kernels use are implemented. Launches have one dimension and execute
// at once, on any stream. The emulator is not thread safe.

#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#ifndef __x86_64__
#  include <ucontext.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#  include <sanitizer/asan_interface.h>
#  include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __noinline__

// --- the CUDA runtime on the host ----------------------------------------------------------------

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum cudaMemcpyKind {
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3
};
using cudaStream_t = struct CUstream_st*;

namespace emulator {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Settings {
  uint64_t seed = 1;
  uint32_t resident_blocks = 48;
  uint32_t shared_bytes = 48 << 10;  // limit of a block
  uint64_t patience =
      uint64_t{1} << 22;  // switches without progress of any thread, then it is a deadlock
};

inline Settings& settings() {
  static Settings settings;
  return settings;
}

inline cudaError_t& last_error() {
  static cudaError_t error = cudaSuccess;
  return error;
}

}  // namespace emulator

inline cudaError_t cudaGetLastError() {
  const cudaError_t error = emulator::last_error();
  emulator::last_error() = cudaSuccess;
  return error;
}

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess             ? "no error"
         : error == cudaErrorInvalidValue ? "invalid argument"
                                          : "invalid configuration";
}

inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

// --- built-in types and variables ----------------------------------------------------------------

struct Dimension {
  uint32_t x;
};
inline Dimension threadIdx, blockIdx, blockDim, gridDim;

struct __attribute__((may_alias, aligned(8))) uint2 {
  uint32_t x, y;
};
struct __attribute__((may_alias, aligned(16))) uint4 {
  uint32_t x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

// --- the machine ---------------------------------------------------------------------------------

namespace emulator {

constexpr uint32_t kWarp = 32;
constexpr size_t kStackBytes = 64 << 10;

enum class Wait : uint8_t { kNothing, kBarrier, kShuffle, kVote, kWarpBarrier };

inline const char* name_of(Wait wait) {
  constexpr const char* kNames[] = {"nothing", "a barrier", "a shuffle", "a vote",
                                    "a warp's barrier"};
  return kNames[static_cast<int>(wait)];
}

// Stacks with an inaccessible page before each. They are kept for later launches.
class Stacks {
 public:
  uint8_t* at(size_t index) {
    while (stacks_.size() <= index) {
      const size_t guard = static_cast<size_t>(sysconf(_SC_PAGESIZE));
      void* memory = mmap(nullptr, guard + kStackBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED || mprotect(memory, guard, PROT_NONE) != 0) throw std::bad_alloc();
      stacks_.push_back(static_cast<uint8_t*>(memory) + guard);
    }
    return stacks_[index];
  }

  // Unpoisons the frames of fibers that were abandoned in the middle of a function, on the first
  // stacks.
  void clean(size_t count) {
#ifdef __SANITIZE_ADDRESS__
    for (size_t i = 0; i < count; ++i) __asan_unpoison_memory_region(stacks_[i], kStackBytes);
#else
    (void)count;
#endif
  }

 private:
  std::vector<uint8_t*> stacks_;
};

inline Stacks& stacks() {
  static Stacks stacks;
  return stacks;
}

#ifdef __x86_64__
using Context = void*;
// Switches to another stack and returns when that one switches back. Registers that a called
// function must preserve are saved on the stack.
__attribute__((naked, noinline, no_sanitize("address", "undefined"))) inline void switch_context(
    Context* /*from*/, Context* /*to*/) {
  __asm__(
      "pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n\t"
      "movq %rsp, (%rdi); movq (%rsi), %rsp\n\t"
      "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
}
inline void make_context(Context* context, uint8_t* stack, void (*entry)()) {
  constexpr int kSaved = 6;
  uint64_t* top = reinterpret_cast<uint64_t*>(stack + kStackBytes) - 2 - kSaved;
  std::memset(top, 0, (2 + kSaved) * sizeof *top);
  top[kSaved] = reinterpret_cast<uint64_t>(entry);
  *context = top;
}
#else
using Context = ucontext_t;
inline void switch_context(Context* from, Context* to) { swapcontext(from, to); }
inline void make_context(Context* context, uint8_t* stack, void (*entry)()) {
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = kStackBytes;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
}
#endif

struct Block;

struct Fiber {
  Context context;
  void* fake_stack;  // of the address sanitizer
  uint8_t* stack;
  Block* block;
  uint32_t thread;
  bool exited;
  Wait wait;
  // State at a warp function.
  uint32_t lanes, source;
  uint64_t value, result;
};

struct Block {
  uint32_t index;
  std::vector<Fiber> fibers;
  std::vector<Fiber*> ready;
  uint32_t at_barrier, exited;
  const char* barrier_file;
  int barrier_line;
  uint32_t votes, result;  // of __syncthreads_or and the like
  std::unique_ptr<uint8_t[]> shared;
  size_t shared_bytes;
};

class Machine {
 public:
  Machine(const char* kernel, uint32_t blocks, uint32_t threads, void (*body)(const void*),
          const void* closure)
      : kernel_(kernel),
        threads_(threads),
        body_(body),
        closure_(closure),
        state_(settings().seed) {
    gridDim.x = blocks;
    blockDim.x = threads;
    for (uint32_t i = 0; i < blocks; ++i) {
      order_.push_back(i);
      std::swap(order_.back(), order_[random(i + 1)]);
    }
  }

  static Machine*& running() {
    static Machine* machine = nullptr;
    return machine;
  }

  void run() {
    const size_t resident = std::min<size_t>(order_.size(), settings().resident_blocks);
    blocks_.resize(resident);
    for (size_t slot = 0; slot < resident; ++slot) {
      blocks_[slot].reset(new Block);
      blocks_[slot]->fibers.resize(threads_);
      for (uint32_t thread = 0; thread < threads_; ++thread)
        blocks_[slot]->fibers[thread].stack = stacks().at(slot * threads_ + thread);
      begin(blocks_[slot].get());
    }
    while (!blocks_.empty()) {
      Fiber* const fiber = next(blocks_[random(blocks_.size())].get());
      if (fiber != nullptr) enter(fiber);
      if (error_[0] != 0) {
        stacks().clean(resident * threads_);
        throw Error(error_);
      }
      for (size_t slot = 0; slot < blocks_.size(); ++slot) {
        if (blocks_[slot]->exited < threads_) continue;
        if (!order_.empty()) {
          begin(blocks_[slot].get());
        } else {
          std::swap(blocks_[slot], blocks_.back());
          blocks_.pop_back();
          --slot;
        }
      }
    }
  }

  // --- functions that run on a fiber -------------------------------------------------------------

  uint32_t barrier(bool vote, const char* file, int line) {
    Block& block = *fiber_->block;
    if (block.exited > 0)
      fail("waits at a barrier that some threads of its block never reach: they have exited");
    if (block.at_barrier == 0) {
      block.barrier_file = file;
      block.barrier_line = line;
      block.votes = 0;
    } else if (block.barrier_line != line || std::strcmp(block.barrier_file, file) != 0) {
      fail("waits at the barrier of line %d, other threads of its block at that of line %d", line,
           block.barrier_line);
    }
    block.votes += vote;
    if (++block.at_barrier == threads_) {
      block.at_barrier = 0;
      block.result = block.votes;
      progress();
      for (Fiber& fiber : block.fibers) {
        fiber.wait = Wait::kNothing;
        block.ready.push_back(&fiber);
      }
      leave();
    } else {
      fiber_->wait = Wait::kBarrier;
      leave();
    }
    return block.result;
  }

  // `source`: the lane whose value a shuffle returns. A vote returns the lanes whose value is not
  // 0.
  uint64_t warp(Wait kind, uint32_t lanes, uint64_t value, uint32_t source) {
    Fiber* const warp = &fiber_->block->fibers[fiber_->thread / kWarp * kWarp];
    const uint32_t lane = fiber_->thread % kWarp;
    if ((lanes >> lane & 1) == 0) fail("calls a warp function with a mask that leaves it out");
    if (kind == Wait::kShuffle && (lanes >> source & 1) == 0)
      fail("shuffles from lane %u, which its mask leaves out", source);
    fiber_->wait = kind;
    fiber_->lanes = lanes;
    fiber_->source = source;
    fiber_->value = value;
    uint64_t votes = 0;
    bool complete = true;
    for (uint32_t i = 0; i < kWarp; ++i) {
      if ((lanes >> i & 1) == 0) continue;
      if (fiber_->thread - lane + i >= threads_ || warp[i].exited) {
        fail("waits at %s for lane %u, which has exited", name_of(kind), i);
      }
      const Wait other = warp[i].wait;
      if (other == Wait::kNothing || other == Wait::kBarrier ||
          warp[i].lanes != lanes) {  // has not arrived yet
        complete = false;
        break;
      }
      if (other != kind) {
        fail("waits at %s, lane %u of its warp at %s", name_of(kind), i, name_of(other));
      }
      votes |= uint64_t{warp[i].value != 0} << i;
    }
    if (complete) {
      progress();
      for (uint32_t i = 0; i < kWarp; ++i) {
        if ((lanes >> i & 1) == 0) continue;
        warp[i].result = kind == Wait::kVote ? votes : warp[warp[i].source].value;
      }
      for (uint32_t i = 0; i < kWarp; ++i) {
        if ((lanes >> i & 1) == 0) continue;
        warp[i].wait = Wait::kNothing;
        fiber_->block->ready.push_back(&warp[i]);
      }
    }
    leave();
    return fiber_->result;
  }

  // Switches to another fiber now and then.
  void pause() {
    if (random(8) != 0) return;
    if (++pauses_ > settings().patience)
      fail("spins: no thread of the launch has got anywhere for very long");
    fiber_->block->ready.push_back(fiber_);
    leave();
  }

  void* shared(size_t bytes, size_t alignment) {
    Block& block = *fiber_->block;
    if (bytes > settings().shared_bytes) fail("has %zu bytes of shared memory", bytes);
    if (alignment > 16) fail("has shared memory with an alignment above 16");
    if (block.shared == nullptr) {
      block.shared.reset(new uint8_t[bytes]);
      block.shared_bytes = bytes;
      for (size_t i = 0; i < bytes; ++i)
        block.shared[i] = static_cast<uint8_t>(i % 8 == 0 ? random() : state_ >> i % 8 * 8);
    }
    if (block.shared_bytes != bytes) fail("has shared memory of two types");
    return block.shared.get();
  }

 private:
  uint64_t random() {  // splitmix64
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  uint64_t random(uint64_t below) { return (random() >> 32) * below >> 32; }

  void begin(Block* block) {
    block->index = order_.back();
    order_.pop_back();
    block->at_barrier = block->exited = 0;
    block->shared.reset();
    block->ready.clear();
    for (uint32_t thread = 0; thread < threads_; ++thread) {
      Fiber& fiber = block->fibers[thread];
      fiber.fake_stack = nullptr;
      fiber.block = block;
      fiber.thread = thread;
      fiber.exited = false;
      fiber.wait = Wait::kNothing;
#ifdef __SANITIZE_ADDRESS__
      // The frames in which the last fiber on this stack ended: those of `live` and `change`.
      __asan_unpoison_memory_region(fiber.stack + kStackBytes - 1024, 1024);
#endif
      make_context(&fiber.context, fiber.stack, live_current);
      block->ready.push_back(&fiber);
    }
  }

  // Returns a fiber that can run, mostly of `block`, or null if there is none, which is then the
  // error of the launch.
  Fiber* next(Block* block) {
    if (block->ready.empty() || random(256) == 0) {
      const size_t start = random(blocks_.size());
      for (size_t i = 0; i < blocks_.size(); ++i) {
        Block* const other = blocks_[(start + i) % blocks_.size()].get();
        if (other->ready.empty()) continue;
        block = other;
        break;
      }
    }
    if (block->ready.empty()) {
      for (const std::unique_ptr<Block>& stuck : blocks_) {
        for (const Fiber& fiber : stuck->fibers) {
          if (fiber.wait == Wait::kNothing) continue;
          report(fiber, "waits at %s and nobody can run: dead-lock", name_of(fiber.wait));
          return nullptr;
        }
      }
      return nullptr;
    }
    std::swap(block->ready[random(block->ready.size())], block->ready.back());
    Fiber* const fiber = block->ready.back();
    block->ready.pop_back();
    return fiber;
  }

  void leave() {
    Fiber* const fiber = next(fiber_->block);
    if (fiber == fiber_) return;
    change(fiber_, fiber, false);
  }

  // Not sanitized: before a call that never returns, the sanitizer looks for the end of the stack,
  // which it does not know yet.
  __attribute__((no_sanitize("address"))) static void live_current() { running()->live(); }

  void live() {
    arrived(nullptr);
    body_(closure_);
    Block& block = *fiber_->block;
    if (block.at_barrier > 0)
      fail("has exited while threads of its block wait at a barrier for it");
    fiber_->exited = true;
    progress();
    change(fiber_, ++block.exited == threads_ ? nullptr : next(&block), true);
    std::abort();
  }

  void progress() { pauses_ = 0; }

  // The frames of a failing fiber are abandoned, so they own no memory: no std::string.
  template <typename... Arguments>
  [[noreturn]] void fail(const char* why, Arguments... arguments) {
    report(*fiber_, why, arguments...);
    change(fiber_, nullptr, true);
    std::abort();
  }

  template <typename... Arguments>
  void report(const Fiber& fiber, const char* why, Arguments... arguments) {
    const int length =
        std::snprintf(error_, sizeof error_, "kernel %s, block %u, thread %u: ", kernel_,
                      fiber.block->index, fiber.thread);
    std::snprintf(error_ + length, sizeof error_ - static_cast<size_t>(length), why, arguments...);
  }

  void enter(Fiber* fiber) {
    set_current(fiber);
#ifdef __SANITIZE_ADDRESS__
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, fiber->stack, kStackBytes);
    switch_context(&host_, &fiber->context);
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#else
    switch_context(&host_, &fiber->context);
#endif
  }

  // Switches from a fiber to another one, or to the host if `to` is null. `for_ever`: it will not
  // be resumed.
  void change(Fiber* from, Fiber* to, bool for_ever) {
    if (to != nullptr) set_current(to);
#ifdef __SANITIZE_ADDRESS__
    const void* const stack = to != nullptr ? to->stack : host_stack_;
    __sanitizer_start_switch_fiber(for_ever ? nullptr : &from->fake_stack, stack,
                                   to != nullptr ? kStackBytes : host_stack_bytes_);
#else
    (void)for_ever;
#endif
    switch_context(&from->context, to != nullptr ? &to->context : &host_);
    arrived(from->fake_stack);
  }

  // Called on a fiber that has just started or resumed.
  void arrived(void* fake_stack) {
#ifdef __SANITIZE_ADDRESS__
    const void* stack;
    size_t bytes;
    __sanitizer_finish_switch_fiber(fake_stack, &stack, &bytes);
    if (host_stack_ == nullptr) {  // the host switches to the first fiber of a launch
      host_stack_ = stack;
      host_stack_bytes_ = bytes;
    }
#else
    (void)fake_stack;
#endif
  }

  void set_current(Fiber* fiber) {
    fiber_ = fiber;
    threadIdx.x = fiber->thread;
    blockIdx.x = fiber->block->index;
  }

  const char* const kernel_;
  const uint32_t threads_;
  void (*const body_)(const void*);
  const void* const closure_;
  uint64_t state_;
  std::vector<uint32_t> order_;  // blocks to start, the next one last
  std::vector<std::unique_ptr<Block>> blocks_;
  Fiber* fiber_ = nullptr;
  uint64_t pauses_ = 0;
  char error_[512] = "";
  Context host_;
  const void* host_stack_ = nullptr;
  size_t host_stack_bytes_ = 0;
};

template <typename Body>
void launch(const char* kernel, uint32_t blocks, uint32_t threads, cudaStream_t, const Body& body) {
  if (blocks == 0 || threads == 0 || threads > 1024) {
    last_error() = cudaErrorInvalidConfiguration;
    return;
  }
  Machine machine(
      kernel, blocks, threads, [](const void* closure) { (*static_cast<const Body*>(closure))(); },
      &body);
  struct Running {
    explicit Running(Machine* machine) { Machine::running() = machine; }
    ~Running() { Machine::running() = nullptr; }
  } running(&machine);
  machine.run();
}

template <typename T>
T& shared() {
  static_assert(std::is_trivially_default_constructible<T>::value,
                "shared memory is not initialized");
  return *static_cast<T*>(Machine::running()->shared(sizeof(T), alignof(T)));
}

template <typename T>
T shuffle(uint32_t lanes, T value, uint32_t source) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = Machine::running()->warp(Wait::kShuffle, lanes, bits, source);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t lane() { return threadIdx.x % kWarp; }

}  // namespace emulator

// --- built-in functions of kernels ---------------------------------------------------------------

#define DELTACHECK_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(DELTACHECK_HERE) {
  emulator::Machine::running()->barrier(false, file, line);
}
inline int __syncthreads_or(int vote, DELTACHECK_HERE) {
  return emulator::Machine::running()->barrier(vote != 0, file, line) != 0;
}
inline int __syncthreads_and(int vote, DELTACHECK_HERE) {
  return emulator::Machine::running()->barrier(vote != 0, file, line) == blockDim.x;
}
inline int __syncthreads_count(int vote, DELTACHECK_HERE) {
  return static_cast<int>(emulator::Machine::running()->barrier(vote != 0, file, line));
}

#undef DELTACHECK_HERE

inline void __syncwarp(uint32_t lanes = 0xffffffffu) {
  emulator::Machine::running()->warp(emulator::Wait::kWarpBarrier, lanes, 0, 0);
}
inline uint32_t __ballot_sync(uint32_t lanes, int vote) {
  return static_cast<uint32_t>(
      emulator::Machine::running()->warp(emulator::Wait::kVote, lanes, vote != 0, 0));
}
// Returns the lanes that have the same value.
inline uint32_t __match_any_sync(uint32_t lanes, uint32_t value) {
  uint32_t same = lanes;
  for (uint32_t bit = 0; bit < 32; ++bit) {
    const uint32_t with = __ballot_sync(lanes, value >> bit & 1);
    same &= (value >> bit & 1) != 0 ? with : ~with;
  }
  return same;
}
inline int __any_sync(uint32_t lanes, int vote) { return __ballot_sync(lanes, vote) != 0; }
inline int __all_sync(uint32_t lanes, int vote) { return __ballot_sync(lanes, vote) == lanes; }

// A shuffle from beyond the warp gives a lane its own value.
template <typename T>
T __shfl_sync(uint32_t lanes, T value, uint32_t source) {
  return emulator::shuffle(lanes, value, source % emulator::kWarp);
}
template <typename T>
T __shfl_up_sync(uint32_t lanes, T value, uint32_t by) {
  return emulator::shuffle(lanes, value,
                           emulator::lane() < by ? emulator::lane() : emulator::lane() - by);
}
template <typename T>
T __shfl_down_sync(uint32_t lanes, T value, uint32_t by) {
  return emulator::shuffle(
      lanes, value,
      emulator::lane() + by < emulator::kWarp ? emulator::lane() + by : emulator::lane());
}
template <typename T>
T __shfl_xor_sync(uint32_t lanes, T value, uint32_t with) {
  return emulator::shuffle(lanes, value, emulator::lane() ^ with);
}

inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __popcll(uint64_t x) { return __builtin_popcountll(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __ffsll(uint64_t x) { return __builtin_ffsll(static_cast<long long>(x)); }
inline int __clz(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __clzll(uint64_t x) { return x == 0 ? 64 : __builtin_clzll(x); }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}

template <typename T>
T __ldg(const T* from) {
  return *from;
}

inline void __threadfence() { emulator::Machine::running()->pause(); }

namespace emulator {

// Fibers switch only at calls of the emulator. Nothing interferes between two calls, so this is
// atomic.
template <typename T, typename Change>
T atomic(T* at, Change change) {
  Machine::running()->pause();
  const T before = *at;
  *at = change(before);
  return before;
}

template <typename T>
struct Same {
  using type = T;
};

}  // namespace emulator

template <typename T>
T atomicAdd(T* at, typename emulator::Same<T>::type value) {
  return emulator::atomic(at, [&](T before) { return static_cast<T>(before + value); });
}
template <typename T>
T atomicOr(T* at, typename emulator::Same<T>::type value) {
  return emulator::atomic(at, [&](T before) { return static_cast<T>(before | value); });
}
template <typename T>
T atomicMax(T* at, typename emulator::Same<T>::type value) {
  return emulator::atomic(
      at, [&](T before) { return before > value ? before : static_cast<T>(value); });
}
template <typename T>
T atomicMin(T* at, typename emulator::Same<T>::type value) {
  return emulator::atomic(
      at, [&](T before) { return before < value ? before : static_cast<T>(value); });
}
template <typename T>
T atomicExch(T* at, typename emulator::Same<T>::type value) {
  return emulator::atomic(at, [&](T) { return static_cast<T>(value); });
}
template <typename T>
T atomicCAS(T* at, typename emulator::Same<T>::type expected,
            typename emulator::Same<T>::type value) {
  return emulator::atomic(
      at, [&](T before) { return before == expected ? static_cast<T>(value) : before; });
}
