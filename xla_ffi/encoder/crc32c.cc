#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#  include <nmmintrin.h>
#endif

namespace deltacheck {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // bit-reversed, like all values in this file

// table[k][b] is the effect of byte b, followed by k zero bytes, on the register: the slicing-by-8
// method (Kounavis & Berry, "A systematic approach to building high performance software-based CRC
// generators", 2005).
constexpr std::array<std::array<uint32_t, 256>, 8> make_tables() {
  std::array<std::array<uint32_t, 256>, 8> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0);
    table[0][byte] = value;
  }
  for (int zeros = 1; zeros < 8; ++zeros) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t value = table[zeros - 1][byte];
      table[zeros][byte] = (value >> 8) ^ table[0][value & 255];
    }
  }
  return table;
}

constexpr auto kTables = make_tables();

#if defined(__x86_64__)
// The instruction takes three cycles and can start every cycle, so three streams run in parallel
// (Gopal et al., "Fast CRC computation for iSCSI polynomial using CRC32 instruction", 2011). Their
// registers are combined with a table of the effect of kStretch zero bytes on the register.
constexpr size_t kStretch = 4096;

constexpr uint32_t after_zeros(uint32_t value, size_t zeros) {
  for (size_t i = 0; i < zeros; ++i) value = (value >> 8) ^ kTables[0][value & 255];
  return value;
}

using ShiftTable = std::array<std::array<uint32_t, 256>, 4>;

ShiftTable make_shift_table() {
  ShiftTable table{};
  for (int byte = 0; byte < 4; ++byte) {
    // The operation is linear, so the results of eight single bits give all 256 values.
    for (int bit = 0; bit < 8; ++bit)
      table[byte][1 << bit] = after_zeros(uint32_t{1} << (8 * byte + bit), kStretch);
    for (uint32_t value = 1; value < 256; ++value) {
      const uint32_t lowest = value & (0 - value);
      table[byte][value] = table[byte][lowest] ^ table[byte][value ^ lowest];
    }
  }
  return table;
}

uint32_t after_stretch(const ShiftTable& table, uint32_t value) {
  return table[0][value & 255] ^ table[1][value >> 8 & 255] ^ table[2][value >> 16 & 255] ^
         table[3][value >> 24];
}

inline uint64_t word_at(const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

__attribute__((target("sse4.2"))) uint32_t crc32c_by_instruction(const uint8_t* data, size_t size,
                                                                 uint32_t before) {
  static const ShiftTable shift = make_shift_table();
  uint64_t crc = ~before;
  for (; size >= 3 * kStretch; data += 3 * kStretch, size -= 3 * kStretch) {
    uint64_t second = 0, third = 0;
    for (size_t at = 0; at < kStretch; at += 8) {
      crc = _mm_crc32_u64(crc, word_at(data + at));
      second = _mm_crc32_u64(second, word_at(data + kStretch + at));
      third = _mm_crc32_u64(third, word_at(data + 2 * kStretch + at));
    }
    crc = after_stretch(shift, static_cast<uint32_t>(crc)) ^ second;
    crc = after_stretch(shift, static_cast<uint32_t>(crc)) ^ third;
  }
  for (; size >= 8; data += 8, size -= 8) crc = _mm_crc32_u64(crc, word_at(data));
  for (; size > 0; ++data, --size) crc = _mm_crc32_u8(static_cast<uint32_t>(crc), *data);
  return ~static_cast<uint32_t>(crc);
}
#endif

}  // namespace

uint32_t crc32c(const uint8_t* data, size_t size, uint32_t before) {
#if defined(__x86_64__)
  static const bool instruction = [] {
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2");
  }();
  if (instruction) return crc32c_by_instruction(data, size, before);
#endif
  return crc32c_by_table(data, size, before);
}

uint32_t crc32c_by_table(const uint8_t* data, size_t size, uint32_t before) {
  uint32_t crc = ~before;
  for (; size >= 8; data += 8, size -= 8) {
    crc ^= uint32_t{data[0]} | uint32_t{data[1]} << 8 | uint32_t{data[2]} << 16 |
           uint32_t{data[3]} << 24;
    crc = kTables[7][crc & 255] ^ kTables[6][crc >> 8 & 255] ^ kTables[5][crc >> 16 & 255] ^
          kTables[4][crc >> 24] ^ kTables[3][data[4]] ^ kTables[2][data[5]] ^ kTables[1][data[6]] ^
          kTables[0][data[7]];
  }
  for (; size > 0; ++data, --size) crc = (crc >> 8) ^ kTables[0][(crc ^ *data) & 255];
  return ~crc;
}

}  // namespace deltacheck
