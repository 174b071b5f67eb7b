// CRC-32C (Castagnoli; RFC 3720, appendix B.4), the checksum that ends every zarr chunk.

#pragma once

#include <cstddef>
#include <cstdint>

namespace deltacheck {

// The checksum of `size` bytes that follow bytes whose checksum is `before` (0: none do).
uint32_t crc32c(const uint8_t* data, size_t size, uint32_t before = 0);

// The same by tables, for processors without the instruction.
uint32_t crc32c_by_table(const uint8_t* data, size_t size, uint32_t before = 0);

}  // namespace deltacheck
