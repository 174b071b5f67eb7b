// Defines one table of kernels.h. This file is compiled once for each instruction set.
// DELTACHECK_KERNELS is the name of the table and DELTACHECK_INSTRUCTION_SET its text. No function
// of this file except those behind the table may have external linkage: the linker would select one
// copy for all processors.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "format.h"

// Arithmetic on all elements is faster in vectors of 512 bits; code that mostly writes memory is
// not (CMakeLists.txt).
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#  pragma GCC push_options
#  pragma GCC target("prefer-vector-width=512")
#endif
#include "adam_parts.h"
#include "lattice.h"
#include "nested.h"
#include "octaves.h"
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#  pragma GCC pop_options
#endif

#include "kernels.h"
#include "segment.h"

namespace deltacheck {
namespace {

// Calls `function<W>` for the W that equals `word_bytes`. REQUIRES: 1, 2, 4 or 8.
#define DELTACHECK_FOR_WORD(function, ...) \
  switch (word_bytes) {                    \
    case 1:                                \
      return function<1>(__VA_ARGS__);     \
    case 2:                                \
      return function<2>(__VA_ARGS__);     \
    case 4:                                \
      return function<4>(__VA_ARGS__);     \
    default:                               \
      return function<8>(__VA_ARGS__);     \
  }

uint64_t first_difference_any(int word_bytes, const uint8_t* current, const uint8_t* base,
                              uint64_t words){
    DELTACHECK_FOR_WORD(first_difference, current, base, words)}

Method choose_any(int word_bytes, const uint8_t* current, const uint8_t* base, uint64_t words,
                  uint64_t first, Scratch* scratch) {
  DELTACHECK_FOR_WORD(choose, current, base, words, first, scratch)
}

bool encode_positions_any(int word_bytes, Method method, const uint8_t* current, uint8_t* base,
                          uint64_t words, uint64_t first, Scratch* scratch,
                          const PositionStreams& out, Row* row){
    DELTACHECK_FOR_WORD(encode_positions, method, current, base, words, first, scratch, out, row)}

uint32_t encode_dense_any(int word_bytes, Method method, const uint8_t* current, uint8_t* base,
                          uint64_t words, Scratch* scratch, uint8_t* const* out){
    DELTACHECK_FOR_WORD(encode_dense, method, current, base, words, scratch, out)}

Refusal
    check_chunk_any(int word_bytes, const Row& row, const ChunkStreams& streams, uint64_t words) {
  DELTACHECK_FOR_WORD(check_chunk, row, streams, words)
}

void apply_chunk_any(int word_bytes, const Row& row, const ChunkStreams& streams, uint8_t* base,
                     uint64_t words) {
  DELTACHECK_FOR_WORD(apply_chunk, row, streams, base, words)
}

}  // namespace

const Kernels DELTACHECK_KERNELS = {
    DELTACHECK_INSTRUCTION_SET, first_difference_any, choose_any,        encode_positions_any,
    encode_dense_any,           check_chunk_any,      apply_chunk_any,   lattice_codes_part,
    lattice_values_part,        lattice_cast_part,    nested_codes_part, nested_values_part,
    octave_codes_part,          octave_values_part,   ratio_codes_part,  ratio_values_part,
    law_gradients_part,         law_step_part,        law_squares_part,  law_weights_part};

}  // namespace deltacheck
