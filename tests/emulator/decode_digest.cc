// Prints the digests of parts of a file, computed by the emulated device. Usage: `decode_digest
// FILE`, with lines `start length offset` on the standard input; `offset` is the position of the
// part after a boundary of 256 bytes. Every part is digested as a base, and the odd ones of a table
// also as the chunk of a row.

#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

#include "check.h"
#include "cuda/device.h"
#include "memory.h"

using namespace deltacheck;
using check::Memory;

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  std::ifstream file(argv[1], std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)),
                                std::istreambuf_iterator<char>());
  std::vector<Memory> parts;
  std::vector<device::Chunk> bases, currents;
  std::vector<Row> rows;
  size_t start, length, offset;
  while (std::scanf("%zu %zu %zu", &start, &length, &offset) == 3) {
    if (start + length > bytes.size()) return 2;
    parts.emplace_back(bytes.data() + start, length, offset);
    uint8_t* const part = parts.back().data();
    const uint32_t number = static_cast<uint32_t>(bases.size());
    // Alternately with and without a base: without one, digest reads current.
    bases.push_back({part, number % 2 ? part : nullptr, static_cast<uint32_t>(length), 1});
    currents.push_back({part, nullptr, static_cast<uint32_t>(length), 1});
    if (number % 2) rows.push_back({number, kRaw, 0, 0, 0});
  }
  const uint32_t count = static_cast<uint32_t>(bases.size());
  std::vector<uint64_t> digests(2 * bases.size()), of_rows(2 * bases.size(), 1);
  CHECK(device::digest(bases.data(), count, digests.data(), nullptr) == cudaSuccess);
  const uint64_t row_count = rows.size();
  CHECK(device::enqueue_digests(currents.data(), rows.data(), &row_count, count, of_rows.data(),
                                nullptr) == cudaSuccess);
  for (size_t i = 0; i < rows.size(); ++i) {
    CHECK(of_rows[2 * i] == digests[2 * rows[i].chunk] &&
          of_rows[2 * i + 1] == digests[2 * rows[i].chunk + 1]);
  }
  for (size_t i = 2 * rows.size(); i < of_rows.size(); ++i) CHECK(of_rows[i] == 1);  // not written
  for (size_t i = 0; i < bases.size(); ++i)
    std::printf("%016" PRIx64 "%016" PRIx64 "\n", digests[2 * i], digests[2 * i + 1]);
  return check::result();
}
