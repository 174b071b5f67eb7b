// The encoder of one chunk (segment.h) as function pointers: one table for each instruction set
// that this build was compiled for.

#pragma once

#include <cstdint>

#include "elements.h"
#include "format.h"
#include "lattice.h"
#include "octaves.h"

namespace deltacheck {

// Most bytes that one tile adds to gaps, values and wide together: every word changed and wide; and
// where no word is near another.
constexpr uint32_t kMostTileBytes = 2 * kTileBytes + kTileBytes + kTileBytes / 255 + 64;

// Room for a tile's intermediate results, for any size of word. About 150 KiB: lives on the heap,
// one for each thread.
struct Scratch {
  alignas(64) uint64_t masks[kTileBytes / 64];
  alignas(64)
      uint16_t positions[kTileBytes + 64];  // the last block may store up to 64 more than there are
  alignas(64) uint8_t z[kTileBytes + 64];   // of the changed words; likewise
  alignas(64) uint32_t pairs[kTileBytes + 16];  // z and position in one
  // Histograms of the sample. Each in several ways, summed up in the end: adding to one counter
  // twice in a row costs the time of a store.
  alignas(64) uint32_t counts[16][256];
  alignas(64) uint32_t gap_counts[4][256], bit_counts[4][256], low_counts[4][512];
};

// Where the streams of a sparse or bitmap chunk go. REQUIRES: room for `words * W + kMostTileBytes`
// bytes in gaps, values and wide each: kernels write past what is used.
struct PositionStreams {
  uint8_t* tiles;
  uint8_t* positions;  // gaps or bitmap
  uint8_t* values;
  uint8_t* wide;
};

// One chunk's part of every stream; null where it owns nothing.
struct ChunkStreams {
  const uint8_t* at[kStreams];
};

enum class Check : uint32_t {
  kPassed,
  kChangedSum,
  kGapSum,
  kWideSum,
  kUnusedBit,
  kTileBits,
  kTileGaps,
  kTilePosition,
  kTileEscapes,
  kTileWide,
};

struct Refusal {
  Check check = Check::kPassed;
  uint32_t tile = 0;
  uint64_t found = 0, said = 0;
};

// Functions are described in segment.h, statistics.h, lattice.h and octaves.h, where they take
// `word_bytes` or `elements` as their template argument.
struct Kernels {
  const char* instruction_set;
  uint64_t (*first_difference)(int word_bytes, const uint8_t* current, const uint8_t* base,
                               uint64_t words);
  Method (*choose)(int word_bytes, const uint8_t* current, const uint8_t* base, uint64_t words,
                   uint64_t first, Scratch* scratch);
  bool (*encode_positions)(int word_bytes, Method method, const uint8_t* current, uint8_t* base,
                           uint64_t words, uint64_t first, Scratch* scratch,
                           const PositionStreams& out, Row* row);
  uint32_t (*encode_dense)(int word_bytes, Method method, const uint8_t* current, uint8_t* base,
                           uint64_t words, Scratch* scratch, uint8_t* const* out);
  Refusal (*check_chunk)(int word_bytes, const Row& row, const ChunkStreams& streams,
                         uint64_t words);
  void (*apply_chunk)(int word_bytes, const Row& row, const ChunkStreams& streams, uint8_t* base,
                      uint64_t words);
  Statistics (*span_statistics)(Elements elements, const uint8_t* current, const uint8_t* base,
                                uint32_t words);
  LatticeErrors (*lattice_codes_part)(const uint8_t* values, const uint8_t* weights, uint64_t count,
                                      double step, uint64_t seed, uint8_t* codes);
  void (*lattice_values_part)(const uint8_t* codes, const uint8_t* weights, uint64_t count,
                              double step, uint64_t seed, uint8_t* values);
  OctaveErrors (*octave_codes_part)(const uint8_t* values, const uint8_t* base, uint64_t count,
                                    const OctaveForm& form, uint32_t band, uint8_t* codes);
  uint64_t (*octave_values_part)(const uint8_t* codes, uint64_t count, const OctaveForm& form,
                                 uint8_t* values);
};

extern const Kernels kKernelsPlain;  // what the compiler makes for every processor of this kind
extern const Kernels kKernelsX86V2, kKernelsX86V3, kKernelsX86V4;

}  // namespace deltacheck
