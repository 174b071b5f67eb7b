// CRC-32C (Castagnoli; RFC 3720, appendix B.4), the checksum at the end of every zarr chunk and
// shard index (docs/reference/format.md, "Arrays"). Called by entropy.cc and entropy_read.cc.

#pragma once

#include <cstddef>
#include <cstdint>

namespace deltacheck {

// Returns the checksum of `size` bytes that follow bytes with the checksum `before` (0: no bytes
// precede).
uint32_t crc32c(const uint8_t* data, size_t size, uint32_t before = 0);

// Computes the same checksum with tables, for processors without the instruction.
uint32_t crc32c_by_table(const uint8_t* data, size_t size, uint32_t before = 0);

}  // namespace deltacheck
