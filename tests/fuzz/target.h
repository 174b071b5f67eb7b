// The parts that all fuzz targets share: reading an input, memory of exact size, and the report of
// a broken promise.
//
// A target is one file with the function that libFuzzer calls and with its seeds. driver.cc
// replaces libFuzzer for compilers without it.

#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "encoder/delta.h"
#include "encoder/kernels.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

using Input = std::vector<uint8_t>;

// Returns valid inputs, from which mutation starts.
std::vector<Input> seeds();

// Reads an input from front to back; returns zeros after its end.
class Reader {
 public:
  Reader(const uint8_t* data, size_t size) : data_(data), left_(size) {}

  template <typename T>
  T take() {
    T value{};
    const size_t some = left_ < sizeof value ? left_ : sizeof value;
    if (some > 0) std::memcpy(&value, data_, some);
    data_ += some;
    left_ -= some;
    return value;
  }

  size_t left() const { return left_; }

 private:
  const uint8_t* data_;
  size_t left_;
};

template <typename T>
inline void put(Input* input, T value) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(&value);
  input->insert(input->end(), bytes, bytes + sizeof value);
}

// Memory of exactly this size, `offset` bytes after an aligned address, so that a sanitizer detects
// every access next to it.
class Exact {
 public:
  explicit Exact(size_t size, size_t offset = 0)
      : memory_(new uint8_t[size + offset]), offset_(offset), size_(size) {}

  uint8_t* data() { return memory_.get() + offset_; }
  size_t size() const { return size_; }

 private:
  std::unique_ptr<uint8_t[]> memory_;
  size_t offset_, size_;
};

inline void promise(bool kept, const char* what) {
  if (kept) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

inline void use_some_kernels(uint8_t number) {
  static const std::vector<std::string> names = deltacheck::instruction_sets();
  deltacheck::use_instruction_set(names[number % names.size()]);
}

inline int some_word_bytes(uint8_t number) { return 1 << (number & 3); }

// Returns true if two encodings have the same rows and streams.
inline bool same(const deltacheck::Encoded& one, const deltacheck::Encoded& other) {
  if (one.rows.size() != other.rows.size()) return false;
  if (!one.rows.empty() && std::memcmp(one.rows.data(), other.rows.data(),
                                       one.rows.size() * sizeof(deltacheck::Row)) != 0)
    return false;
  for (int stream = 0; stream < deltacheck::kStreams; ++stream) {
    const deltacheck::Bytes &a = one.streams[stream], &b = other.streams[stream];
    if (a.size != b.size || (a.size > 0 && std::memcmp(a.data.get(), b.data.get(), a.size) != 0))
      return false;
  }
  return true;
}
