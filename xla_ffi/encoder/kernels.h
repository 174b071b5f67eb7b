// Function pointers to the encoder of one chunk (segment.h): one table for each instruction set
// that this build was compiled for. delta.cc selects a table at run time; kernels.cc defines one.

#pragma once

#include <cstdint>

#include "adam.h"
#include "format.h"
#include "lattice.h"
#include "nested.h"
#include "octaves.h"
#include "ratios.h"

namespace deltacheck {

// The largest number of bytes that one tile adds to gaps, values and wide together: every word
// changed and wide, or no two changed words near each other.
constexpr uint32_t kMostTileBytes = 2 * kTileBytes + kTileBytes + kTileBytes / 255 + 64;

// The intermediate results of a tile, for words of any size. It has about 150 KiB, so it lives on
// the heap, one for each thread.
struct Scratch {
  alignas(64) uint64_t masks[kTileBytes / 64];
  // The last block may store up to 64 entries too many, here and in z.
  alignas(64) uint16_t positions[kTileBytes + 64];
  alignas(64) uint8_t z[kTileBytes + 64];       // differences of the changed words
  alignas(64) uint32_t pairs[kTileBytes + 16];  // position and difference in one
  alignas(64) uint8_t own[kTileBytes];          // a copy of the current tile, see own_copy
  // Histograms of the sample. Each has several copies that are summed at the end: incrementing one
  // counter twice in a row has to wait for the store of the first increment.
  alignas(64) uint32_t counts[16][256];
  alignas(64) uint32_t gap_counts[4][256], bit_counts[4][256], low_counts[4][512];
};

// The outputs of a sparse or bitmap chunk. REQUIRES: room for `words * W + kMostTileBytes` bytes in
// gaps, values and wide each. Kernels write past the used bytes.
struct PositionStreams {
  uint8_t* tiles;
  uint8_t* positions;  // gaps or bitmap
  uint8_t* values;
  uint8_t* wide;
};

// One chunk's part of every stream; null for a stream in which it owns nothing.
struct ChunkStreams {
  const uint8_t* at[kStreams];
};

// The checks of format.md, 4.3; delta.cc turns them into error texts.
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
  kUnknownLaw,
};

// The first failed check of a chunk: the actual number and the number that the delta declares.
struct Refusal {
  Check check = Check::kPassed;
  uint32_t tile = 0;
  uint64_t actual = 0, declared = 0;
};

// The kernels of one instruction set. segment.h, lattice.h, nested.h, octaves.h, ratios.h and
// adam_parts.h document the functions, with `word_bytes` as their template argument.
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
  LatticeErrors (*lattice_codes_part)(const uint8_t* values, const uint8_t* weights, uint64_t count,
                                      double step, uint64_t seed, uint32_t halvings,
                                      uint32_t spare_bits, uint8_t* codes);
  uint64_t (*lattice_values_part)(const uint8_t* codes, const uint8_t* weights, uint64_t count,
                                  double step, uint64_t seed, uint32_t halvings,
                                  uint32_t spare_bits, uint8_t* values);
  CastErrors (*lattice_cast_part)(const uint8_t* values, const uint8_t* weights, uint64_t count,
                                  double step, uint64_t seed, uint32_t halvings,
                                  uint32_t spare_bits);
  LatticeErrors (*nested_codes_part)(const uint8_t* values, const uint8_t* weights, uint64_t count,
                                     double step, uint64_t seed, uint32_t code_bytes,
                                     uint32_t halvings, uint32_t spare_bits, uint8_t* codes);
  uint64_t (*nested_values_part)(const uint8_t* codes, const uint8_t* weights, uint64_t count,
                                 double step, uint64_t seed, uint32_t code_bytes, uint32_t halvings,
                                 uint32_t spare_bits, uint8_t* values);
  uint64_t (*octave_codes_part)(const uint8_t* values, const uint8_t* base, uint64_t count,
                                const OctaveForm& form, uint32_t band, uint8_t* codes);
  uint64_t (*octave_values_part)(const uint8_t* codes, uint64_t count, const OctaveForm& form,
                                 uint8_t* values);
  RatioErrors (*ratio_codes_part)(const uint8_t* values, const uint8_t* variances, uint64_t count,
                                  const RatioForm& form, uint8_t* codes);
  uint64_t (*ratio_values_part)(const uint8_t* codes, const uint8_t* variances, uint64_t count,
                                const RatioForm& form, uint8_t* values);
  void (*law_gradients_part)(const AdamLaw& law, uint64_t count, const uint8_t* before,
                             const uint8_t* now, uint8_t* gradients);
  void (*law_step_part)(const AdamLaw& law, uint64_t count, const uint8_t* base,
                        const uint8_t* gradients, uint8_t* prediction);
  void (*law_squares_part)(const AdamLaw& law, uint64_t count, const uint8_t* before,
                           uint8_t* prediction);
  void (*law_weights_part)(const AdamLaw& law, uint64_t count, const uint8_t* base,
                           const uint8_t* now, uint8_t* prediction);
};

extern const Kernels kKernelsPlain;  // runs on every processor of this architecture
extern const Kernels kKernelsX86V2, kKernelsX86V3, kKernelsX86V4;

}  // namespace deltacheck
