// The encoder of one chunk (docs/reference/format.md, section 4): the choice of the method, the
// streams and the new base; and the inverse, with all checks. Compiled by kernels.cc once for each
// instruction set and called through kernels.h.
//
// This file depends on no framework, allocates nothing and starts no thread. All functions have
// internal linkage, see format.h. They are templates on the bytes of a word; words may lie at any
// address. Lengths are in words unless the name says bytes. The host is little endian.

#pragma once

#include <cstdint>
#include <cstring>

#include "compact.h"
#include "format.h"
#include "intrinsics.h"
#include "kernels.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "streams are written as they stand in memory");

namespace deltacheck {

namespace {

// --- one tile: the streams of its changed words --------------------------------------------------

// Writes the gaps of one tile and returns their bytes. Up to 8 bytes behind them may be
// overwritten.
inline uint32_t write_gaps(const uint16_t* positions, uint32_t count, uint8_t* __restrict out) {
  if (count == 0) return 0;
  uint16_t most = positions[0];
#pragma omp simd reduction(max : most)
  for (uint32_t k = 1; k < count; ++k) {
    const uint16_t gap = static_cast<uint16_t>(positions[k] - positions[k - 1] - 1);
    most = gap > most ? gap : most;
  }
  if (most < kEscape) {
    out[0] = static_cast<uint8_t>(positions[0]);
#pragma omp simd
    for (uint32_t k = 1; k < count; ++k)
      out[k] = static_cast<uint8_t>(positions[k] - positions[k - 1] - 1);
    return count;
  }
  // Long gaps are either rare or everywhere. Eight escapes are written at once, needed or not, and
  // the next gap overwrites those that were not.
  uint8_t* at = out;
  uint32_t next = 0;
  for (uint32_t k = 0; k < count; ++k) {
    const uint32_t gap = positions[k] - next;
    next = positions[k] + 1u;
    uint32_t escapes = gap / kEscape;
    const uint8_t last = static_cast<uint8_t>(gap - escapes * kEscape);
    for (; escapes > 8; escapes -= 8, at += 8) std::memset(at, kEscape, 8);
    std::memset(at, kEscape, 8);
    at += escapes;
    *at++ = last;
  }
  return static_cast<uint32_t>(at - out);
}

// Writes the values of one tile and its wide differences; returns the number of the latter. Up to
// 64 bytes behind them may be overwritten.
template <int W>
inline uint32_t write_values(const uint8_t* z, uint32_t count, uint8_t* __restrict values,
                             uint8_t* __restrict wide) {
  using U = typename Word<W>::type;
  const U* __restrict from = reinterpret_cast<const U*>(z);
  if constexpr (W == 1) {
#pragma omp simd
    for (uint32_t k = 0; k < count; ++k) values[k] = static_cast<uint8_t>(from[k] - 1);
    return 0;
  } else {
    U any = 0;
#pragma omp simd reduction(| : any)
    for (uint32_t k = 0; k < count; ++k) {
      values[k] = static_cast<uint8_t>(from[k] > 255 ? kEscape : from[k] - 1);
      any |= from[k];
    }
    return any > 255 ? pack_wide<W>(z, count, wide) : 0;
  }
}

// Writes the entry of a tile, three 16-bit numbers (4.3).
inline void write_entry(uint8_t* tiles, uint64_t tile, uint32_t changed, uint32_t gap_bytes,
                        uint32_t wide_count) {
  const uint16_t entry[3] = {static_cast<uint16_t>(changed), static_cast<uint16_t>(gap_bytes),
                             static_cast<uint16_t>(wide_count)};
  std::memcpy(tiles + kTileEntryBytes * tile, entry, sizeof entry);
}

// --- 4.4: the choice of the method ---------------------------------------------------------------

// The number of copies of each byte-plane histogram, see Scratch. Wider words have more planes, so
// two copies of each suffice to avoid waiting for a store.
template <int W>
constexpr int kWays = W <= 2 ? 4 : 2;

template <int W>
inline void clear_planes(Scratch* scratch) {
  std::memset(scratch->counts, 0, W * kWays<W> * sizeof scratch->counts[0]);
}

// Adds the byte planes from `kFirst` on to their histograms.
template <int W, int kFirst, bool kRotate>
inline void count_planes(const typename Word<W>::Memory* words, uint32_t count,
                         uint32_t (*counts)[256]) {
  const auto add = [&](uint32_t i, int way) {
    const typename Word<W>::type word = kRotate ? rotated_left<W>(words[i]) : words[i];
    for (int k = kFirst; k < W; ++k) ++counts[kWays<W> * k + way][(word >> (8 * k)) & 255];
  };
  uint32_t i = 0;
  for (; i + kWays<W> <= count; i += kWays<W>) {
    for (int way = 0; way < kWays<W>; ++way) add(i + way, way);
  }
  for (; i < count; ++i) add(i, 0);
}

// Adds all copies of a histogram to the first one and clears the others.
inline uint32_t* merged(uint32_t (*ways)[256], int count) {
  for (int way = 1; way < count; ++way) {
    for (int byte = 0; byte < 256; ++byte) {
      ways[0][byte] += ways[way][byte];
      ways[way][byte] = 0;
    }
  }
  return ways[0];
}

template <int W>
inline uint32_t* whole_plane(uint32_t (*counts)[256], int plane) {
  return merged(counts + kWays<W> * plane, kWays<W>);
}

// Adds differences, none of them 0, to the histograms. The low bytes of narrow and of wide
// differences are counted separately, in the lower and the upper half, because only narrow ones are
// in `values`. Entries 0 of the higher planes may be omitted: most differences are small, and 64
// words whose high bytes are all zero are not counted word by word.
template <int W>
inline void count_differences(const uint8_t* z, uint32_t count, Scratch* scratch) {
  using U = typename Word<W>::type;
  using Memory = typename Word<W>::Memory;
  constexpr uint32_t kGroup = 64;
  const Memory* __restrict from = reinterpret_cast<const Memory*>(z);
  uint32_t (*low)[512] = scratch->low_counts;
  for (uint32_t start = 0; start < count; start += kGroup, from += kGroup) {
    const uint32_t size_of_group = count - start < kGroup ? count - start : kGroup;
    U any = 0;
#pragma omp simd reduction(| : any)
    for (uint32_t i = 0; i < size_of_group; ++i) any = static_cast<U>(any | from[i]);
    if (any <= 255) {
      for (uint32_t i = 0; i < size_of_group; ++i) ++low[i % 4][from[i]];
      continue;
    }
    for (uint32_t i = 0; i < size_of_group; ++i)
      ++low[i % 4][(from[i] & 255) + (from[i] > 255) * 256];
    if (any <= 65535) {
      for (uint32_t i = 0; i < size_of_group; ++i)
        ++scratch->counts[kWays<W> + i % kWays<W>][(from[i] >> 8) & 255];
    } else {
      count_planes<W, 1, false>(from, size_of_group, scratch->counts);
    }
  }
}

// Adds the gaps between changed words to their histogram and returns their bytes.
inline uint64_t count_gaps(const uint16_t* positions, uint32_t count, uint32_t (*counts)[256]) {
  uint64_t escapes = 0;
  uint32_t next = 0;
  for (uint32_t k = 0; k < count; ++k) {
    const uint32_t gap = positions[k] - next, whole = gap / kEscape;
    next = positions[k] + 1u;
    escapes += whole;
    ++counts[k % 4][gap - whole * kEscape];
  }
  counts[0][kEscape] += static_cast<uint32_t>(escapes);
  return escapes + count;
}

// Does the same from the bit masks, for tiles in which nearly all words have changed. Words right
// after a changed one are counted a block at a time.
inline uint64_t count_short_gaps(const uint64_t* masks, uint32_t blocks, uint32_t* counts) {
  uint64_t bytes = 0;
  uint64_t carry = 0;  // the last bit of the block before
  uint32_t next = 0;   // the word after the last changed one
  for (uint32_t block = 0; block < blocks; ++block) {
    const uint64_t bits = masks[block], start = 64 * block;
    if (bits != 0) {
      const uint64_t follows = bits & (bits << 1 | carry);
      const uint32_t adjacent = static_cast<uint32_t>(__builtin_popcountll(follows));
      counts[0] += adjacent;
      bytes += adjacent;
      for (uint64_t rest = bits & ~follows; rest != 0; rest &= rest - 1) {
        const uint64_t below = bits & ((rest & -rest) - 1);
        if (below != 0) next = static_cast<uint32_t>(start + 64 - __builtin_clzll(below));
        uint32_t gap = static_cast<uint32_t>(start + __builtin_ctzll(rest)) - next;
        bytes += gap / kEscape + 1;
        for (; gap >= kEscape; gap -= kEscape) ++counts[kEscape];
        ++counts[gap];
      }
      next = static_cast<uint32_t>(start + 64 - __builtin_clzll(bits));
    }
    carry = bits >> 63;
  }
  return bytes;
}

// Adds the bitmap bytes of a tile to their histogram.
inline void count_bits(const uint64_t* masks, uint32_t words, uint32_t (*counts)[256]) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(masks);
  uint32_t block = 0;
  for (; (block + 1) * 64 <= words; ++block) {
    if (masks[block] == 0) {
      counts[0][0] += 8;
    } else if (masks[block] == ~uint64_t{0}) {
      counts[0][255] += 8;
    } else {
      for (uint32_t i = 0; i < 8; ++i) ++counts[i % 4][bytes[8 * block + i]];
    }
  }
  for (uint32_t i = 8 * block; i < (words + 7) / 8; ++i) ++counts[0][bytes[i]];
}

// Returns true if value planes cost less than `bound` on the sample. A small part of the sample
// suffices for most chunks, so the cost is tested each time that the part has doubled.
template <int W>
inline bool planes_cost_less(const uint8_t* current, uint64_t words, uint64_t sample_words,
                             uint64_t bound, Scratch* scratch) {
  using Memory = typename Word<W>::Memory;
  constexpr uint32_t kStep = 256;
  const uint64_t rounding = kRoundingCost * sample_words * W;
  clear_planes<W>(scratch);
  // A smaller number of words cannot cost as much, even if all their bits are in use.
  uint64_t counted = 0, next_look = (bound + rounding) / (kByteCost * W);
  for (uint64_t tile = 0; tile < tiles_of(words, W); tile += kSampleEvery) {
    const Memory* c = reinterpret_cast<const Memory*>(current + tile * kTileBytes);
    const uint32_t size = words_of_tile(words, tile, kTileWords<W>);
    for (uint32_t at = 0; at < size; at += kStep) {
      const uint32_t size_of_group = size - at < kStep ? size - at : kStep;
      count_planes<W, 0, true>(c + at, size_of_group, scratch->counts);
      counted += size_of_group;
      if (counted < next_look || counted == sample_words) continue;
      next_look = 2 * counted;
      uint64_t least = 0;
      for (int k = 0; k < W && least < bound + rounding; ++k)
        least += cost(whole_plane<W>(scratch->counts, k), counted, false);
      if (least >= bound + rounding) return false;
    }
  }
  uint64_t sum = 0;
  for (int k = 0; k < W; ++k) sum += cost(whole_plane<W>(scratch->counts, k), sample_words);
  return sum < bound;
}

// Computes the costs of diff, bitmap and sparse on the sample, and returns its number of changed
// words. The costs are valid if there is any. Tiles before `first` are known to be equal.
template <int W>
inline uint64_t position_costs(const uint8_t* current, const uint8_t* base, uint64_t words,
                               uint64_t sample_words, uint64_t first, Scratch* scratch,
                               uint64_t* diff, uint64_t* bitmap, uint64_t* sparse) {
  clear_planes<W>(scratch);
  std::memset(scratch->gap_counts, 0, sizeof scratch->gap_counts);
  std::memset(scratch->bit_counts, 0, sizeof scratch->bit_counts);
  std::memset(scratch->low_counts, 0, sizeof scratch->low_counts);
  uint64_t changed = 0, gap_bytes = 0, bitmap_bytes = 0;
  bool quiet = false;  // as in encode_positions
  for (uint64_t tile = 0; tile < tiles_of(words, W); tile += kSampleEvery) {
    const uint8_t* c = current + tile * kTileBytes;
    const uint8_t* b = base + tile * kTileBytes;
    const uint32_t size = words_of_tile(words, tile, kTileWords<W>), bytes_of_bits = (size + 7) / 8;
    bitmap_bytes += bytes_of_bits;
    quiet = tile < first || (quiet && equal_bytes(c, b, size * W));
    const uint32_t count = quiet ? 0 : compact<W, false>(c, const_cast<uint8_t*>(b), size, scratch);
    if (count == 0) {
      quiet = true;
      scratch->bit_counts[0][0] += bytes_of_bits;
      continue;
    }
    changed += count;
    gap_bytes += count > size / 8 * 7
                     ? count_short_gaps(scratch->masks, (size + 63) / 64, scratch->gap_counts[0])
                     : count_gaps(scratch->positions, count, scratch->gap_counts);
    count_bits(scratch->masks, size, scratch->bit_counts);
    count_differences<W>(scratch->z, count, scratch);
  }
  if (changed == 0) return 0;
  // A narrow difference is equal to its low byte; it has this byte alone in `values`, and nothing
  // in `wide`.
  uint32_t low[256], values[256];
  uint64_t wide[256], wide_count = 0;
  for (int byte = 0; byte < 256; ++byte) {
    uint32_t narrow = 0, wider = 0;
    for (const auto& way : scratch->low_counts) narrow += way[byte], wider += way[256 + byte];
    low[byte] = narrow + wider;
    values[(byte + 255) % 256] = narrow;
    wide[byte] = wider;
    wide_count += wider;
  }
  low[0] += static_cast<uint32_t>(sample_words - changed);
  values[255] = static_cast<uint32_t>(wide_count);
  *diff = cost(low, sample_words);
  for (int k = 1; k < W; ++k) {
    uint32_t* plane = whole_plane<W>(scratch->counts, k);
    uint32_t rest = static_cast<uint32_t>(sample_words);
    for (int byte = 1; byte < 256; ++byte) {
      wide[byte] += plane[byte];
      rest -= plane[byte];
    }
    wide[0] += rest - (sample_words - wide_count);
    plane[0] = rest;
    *diff += cost(plane, sample_words);
  }
  const uint64_t shared =
      cost(values, changed) + (wide_count != 0 ? cost(wide, wide_count * W) : 0);
  *bitmap = cost(merged(scratch->bit_counts, 4), bitmap_bytes) + shared;
  *sparse = cost(merged(scratch->gap_counts, 4), gap_bytes) + shared;
  return changed;
}

// Returns the first tile that differs, or the number of tiles if none does. It runs at the speed of
// memory: most chunks of some leaves are equal to the end, and those of others differ at once.
template <int W>
inline uint64_t first_difference(const uint8_t* current, const uint8_t* base, uint64_t words) {
  const uint64_t tiles = tiles_of(words, W);
  uint64_t tile = 0;
  while (tile < tiles && equal_bytes(current + tile * kTileBytes, base + tile * kTileBytes,
                                     words_of_tile(words, tile, kTileWords<W>) * W))
    ++tile;
  return tile;
}

// Returns the method with the least estimated cost. `base`: null if there is none. `first`: tiles
// before it are known to be equal. REQUIRES: words > 0.
template <int W>
inline Method choose(const uint8_t* current, const uint8_t* base, uint64_t words, uint64_t first,
                     Scratch* scratch) {
  uint64_t sample_words = 0;
  for (uint64_t tile = 0; tile < tiles_of(words, W); tile += kSampleEvery)
    sample_words += words_of_tile(words, tile, kTileWords<W>);
  Choice best{kRaw, kByteCost * sample_words * W};
  if (base != nullptr) {
    uint64_t diff, bitmap, sparse;
    if (position_costs<W>(current, base, words, sample_words, first, scratch, &diff, &bitmap,
                          &sparse) == 0)
      return kSparse;
    best = least_of(diff, sparse, bitmap, best.cost);
  }
  return planes_cost_less<W>(current, words, sample_words, best.cost, scratch) ? kPlanes
                                                                               : best.method;
}

// --- encode --------------------------------------------------------------------------------------

// Returns a copy of a tile. Several passes over a tile must see the same words, so that its streams
// decode to its new base, but another thread of the program may write to the source meanwhile.
template <int W>
inline const uint8_t* own_copy(const uint8_t* current, uint32_t words, Scratch* scratch) {
  std::memcpy(scratch->own, current, size_t{words} * W);
  return scratch->own;
}

// Returns the number of words of a run that differ, and copies current to base.
template <int W>
inline uint64_t update_base(const uint8_t* current, uint8_t* base, uint64_t words,
                            Scratch* scratch) {
  uint64_t changed = 0;
  for (uint64_t tile = 0; tile < tiles_of(words, W); ++tile) {
    const uint8_t* c = current + tile * kTileBytes;
    uint8_t* b = base + tile * kTileBytes;
    const uint32_t size = words_of_tile(words, tile, kTileWords<W>);
    if (equal_bytes(c, b, size * W)) continue;
    changed += differing<W>(c, b, size, scratch->masks);
    std::memcpy(b, c, size_t{size} * W);
  }
  return changed;
}

// Encodes a sparse or bitmap chunk. Tiles before `first` are known to be equal. Fills the counts of
// the row and copies the changed words to the base. Returns false if the streams are not smaller
// than the chunk; they are incomplete then, but `changed` and the base are correct.
template <int W>
inline bool encode_positions(Method method, const uint8_t* current, uint8_t* base, uint64_t words,
                             uint64_t first, Scratch* scratch, const PositionStreams& out,
                             Row* row) {
  const uint64_t tiles = tiles_of(words, W);
  const uint64_t fixed_bytes = kTileEntryBytes * tiles + (method == kBitmap ? (words + 7) / 8 : 0);
  uint64_t changed = 0, gap_bytes = 0, wide_count = 0;
  bool fits = true, quiet = false;
  for (uint64_t tile = 0; tile < tiles; ++tile) {
    const uint8_t* c = current + tile * kTileBytes;
    uint8_t* b = base + tile * kTileBytes;
    const uint32_t size = words_of_tile(words, tile, kTileWords<W>), bytes_of_bits = (size + 7) / 8;
    uint8_t* bits = out.positions + tile * (kTileWords<W> / 8);  // under bitmap
    // If the previous tile was equal, this one likely is, too. Testing that is cheaper than finding
    // the words that differ.
    quiet = tile < first || (quiet && equal_bytes(c, b, size * W));
    const uint32_t count =
        quiet ? 0 : compact<W, true>(own_copy<W>(c, size, scratch), b, size, scratch);
    if (count == 0) {
      quiet = true;
      write_entry(out.tiles, tile, 0, 0, 0);
      if (method == kBitmap) std::memset(bits, 0, bytes_of_bits);
      continue;
    }
    uint32_t gaps = 0;
    if (method == kBitmap)
      std::memcpy(bits, scratch->masks, bytes_of_bits);
    else
      gaps = write_gaps(scratch->positions, count, out.positions + gap_bytes);
    const uint32_t wide =
        write_values<W>(scratch->z, count, out.values + changed, out.wide + wide_count * W);
    write_entry(out.tiles, tile, count, gaps, wide);
    changed += count;
    gap_bytes += gaps;
    wide_count += wide;
    if (fixed_bytes + gap_bytes + changed + wide_count * W >= words * W) {
      fits = false;
      const uint64_t done = (tile + 1) * kTileWords<W>;
      if (done < words)
        changed += update_base<W>(c + kTileBytes, b + kTileBytes, words - done, scratch);
      break;
    }
  }
  row->changed = static_cast<uint32_t>(changed);
  row->gap_bytes = fits ? static_cast<uint32_t>(gap_bytes) : 0;
  row->wide_count = fits ? static_cast<uint32_t>(wide_count) : 0;
  return fits;
}

// Writes the byte planes of a tile's differences. Returns the changed words; copies current to
// base.
template <int W>
inline uint32_t difference_planes(const uint8_t* current, uint8_t* base, uint32_t words,
                                  uint8_t* const* planes) {
  using U = typename Word<W>::type;
  using Memory = typename Word<W>::Memory;
  const Memory* __restrict c = reinterpret_cast<const Memory*>(current);
  Memory* __restrict b = reinterpret_cast<Memory*>(base);
  uint8_t* p[W];
  for (int k = 0; k < W; ++k) p[k] = planes[k];
  constexpr uint32_t kBlock =
      W == 1 ? 128 : kTileWords<W>;  // so that a count of its words fits into a word
  uint32_t changed = 0;
  for (uint32_t start = 0; start < words; start += kBlock) {
    const uint32_t end = words - start < kBlock ? words : start + kBlock;
    U changed_in_batch = 0;
#pragma omp simd reduction(+ : changed_in_batch)
    for (uint32_t i = start; i < end; ++i) {
      const U z = zigzag<W>(c[i], b[i]);
      b[i] = c[i];
      changed_in_batch = static_cast<U>(changed_in_batch + (z != 0));
      for (int k = 0; k < W; ++k) p[k][i] = static_cast<uint8_t>(z >> (8 * k));
    }
    changed += changed_in_batch;
  }
  return changed;
}

// Writes the byte planes of a tile's values.
template <int W>
inline void value_planes(const uint8_t* current, uint32_t words, uint8_t* const* planes) {
  using U = typename Word<W>::type;
  using Memory = typename Word<W>::Memory;
  const Memory* __restrict c = reinterpret_cast<const Memory*>(current);
  uint8_t* p[W];
  for (int k = 0; k < W; ++k) p[k] = planes[k];
#pragma omp simd
  for (uint32_t i = 0; i < words; ++i) {
    const U word = rotated_left<W>(c[i]);
    for (int k = 0; k < W; ++k) p[k][i] = static_cast<uint8_t>(word >> (8 * k));
  }
}

// Encodes a chunk as diff, planes or raw. Their sizes follow from the method, so the streams are
// written in their final place. `out`: the W planes, or the one raw stream. `base`: null if there
// is none. Returns the changed words; copies current to base. Plain stores are used: non-temporal
// stores were slower.
template <int W>
inline uint32_t encode_dense(Method method, const uint8_t* current, uint8_t* base, uint64_t words,
                             Scratch* scratch, uint8_t* const* out) {
  uint64_t changed = 0;
  for (uint64_t tile = 0; tile < tiles_of(words, W); ++tile) {
    const uint64_t start = tile * kTileWords<W>;
    const uint32_t size = words_of_tile(words, tile, kTileWords<W>);
    const uint8_t* c = current + start * W;
    uint8_t* b = base != nullptr ? base + start * W : nullptr;
    uint8_t* planes[W];
    for (int k = 0; k < W && method != kRaw; ++k) planes[k] = out[k] + start;
    if (method == kRaw) {
      std::memcpy(out[0] + start * W, c, size_t{size} * W);
      c = out[0] + start * W;
    } else if (b != nullptr) {
      c = own_copy<W>(c, size, scratch);
    }
    if (method == kDiff) {
      changed += difference_planes<W>(c, b, size, planes);
      continue;
    }
    if (method == kPlanes) value_planes<W>(c, size, planes);
    changed += b != nullptr ? update_base<W>(c, b, size, scratch) : size;
  }
  return static_cast<uint32_t>(changed);
}

// --- decode --------------------------------------------------------------------------------------

// Performs all checks of 4.3 inside the streams of one chunk. REQUIRES: the streams have the sizes
// that the row implies.
template <int W>
inline Refusal check_chunk(const Row& row, const ChunkStreams& streams, uint64_t words) {
  if (row.method != kSparse && row.method != kBitmap) return {};
  using Entry = typename Word<2>::Memory;
  const Entry* entries = reinterpret_cast<const Entry*>(streams.at[kTiles]);
  const uint64_t tiles = tiles_of(words, W);
  uint64_t sums[3] = {0, 0, 0};
  for (uint64_t tile = 0; tile < tiles; ++tile) {
    for (int column = 0; column < 3; ++column) sums[column] += entries[3 * tile + column];
  }
  if (sums[0] != row.changed) return {Check::kChangedSum, 0, sums[0], row.changed};
  if (sums[1] != row.gap_bytes) return {Check::kGapSum, 0, sums[1], row.gap_bytes};
  if (sums[2] != row.wide_count) return {Check::kWideSum, 0, sums[2], row.wide_count};
  const uint8_t* bits = streams.at[kBits];
  if (row.method == kBitmap && words % 8 != 0 && bits[words / 8] >> (words % 8))
    return {Check::kUnusedBit, 0, 0, 0};
  // From here on no offset can leave a stream, because the sums are the sizes of the streams.
  const uint8_t* gaps = streams.at[kGaps];
  const uint8_t* values = streams.at[kValues];
  const typename Word<W>::Memory* wide =
      reinterpret_cast<const typename Word<W>::Memory*>(streams.at[kWide]);
  for (uint64_t tile = 0; tile < tiles; ++tile) {
    const uint32_t number = static_cast<uint32_t>(tile);
    const uint32_t count = entries[3 * tile], gap_bytes = entries[3 * tile + 1],
                   wide_count = entries[3 * tile + 2];
    const uint32_t size = words_of_tile(words, tile, kTileWords<W>);
    if (row.method == kSparse) {
      // Positions ascend by construction, so their number and the last one suffice.
      uint32_t ends = 0, sum = 0;
#pragma omp simd reduction(+ : ends, sum)
      for (uint32_t i = 0; i < gap_bytes; ++i) {
        ends += gaps[i] != kEscape;
        sum += gaps[i];
      }
      if (ends != count || (gap_bytes != 0 && gaps[gap_bytes - 1] == kEscape))
        return {Check::kTileGaps, number, gap_bytes, count};
      if (count != 0 && sum + count - 1 >= size)
        return {Check::kTilePosition, number, sum + count - 1, size};
    } else {
      const uint8_t* mine = bits + tile * (kTileWords<W> / 8);
      uint32_t bit_count = 0;
      for (uint32_t i = 0; i < (size + 7) / 8; ++i)
        bit_count += static_cast<uint32_t>(__builtin_popcount(mine[i]));
      if (bit_count != count) return {Check::kTileBits, number, bit_count, count};
    }
    uint32_t escapes = 0;
#pragma omp simd reduction(+ : escapes)
    for (uint32_t i = 0; i < count; ++i) escapes += values[i] == kEscape;
    if (escapes != wide_count) return {Check::kTileEscapes, number, escapes, wide_count};
    for (uint32_t i = 0; i < wide_count; ++i) {
      if (wide[i] <= 255) return {Check::kTileWide, number, wide[i], 0};
    }
    if (gaps != nullptr) gaps += gap_bytes;
    values += count;
    if (wide != nullptr) wide += wide_count;
  }
  return {};
}

// Decodes the differences of the changed words of one tile. Returns the wide ones that are left.
template <int W>
inline const typename Word<W>::Memory* differences_of(const uint8_t* values, uint32_t count,
                                                      const typename Word<W>::Memory* wide,
                                                      bool has_wide,
                                                      typename Word<W>::type* differences) {
  using U = typename Word<W>::type;
#pragma omp simd
  for (uint32_t i = 0; i < count; ++i)
    differences[i] = unzigzag<W>(static_cast<U>(static_cast<U>(values[i]) + 1));
  for (uint32_t i = 0; has_wide && i < count; ++i) {
    if (values[i] == kEscape) differences[i] = unzigzag<W>(*wide++);
  }
  return wide;
}

// Adds the differences of a sparse or bitmap chunk to the base. REQUIRES: check_chunk passed.
template <int W>
inline void apply_positions(const Row& row, const ChunkStreams& streams, uint8_t* base,
                            uint64_t words) {
  using U = typename Word<W>::type;
  using Memory = typename Word<W>::Memory;
  const typename Word<2>::Memory* entries =
      reinterpret_cast<const typename Word<2>::Memory*>(streams.at[kTiles]);
  const uint8_t* gaps = streams.at[kGaps];
  const uint8_t* values = streams.at[kValues];
  const Memory* wide = reinterpret_cast<const Memory*>(streams.at[kWide]);
  // Decoded before they are added: one loop over vectors, and one that only follows positions.
  U differences[kTileWords<W>];
  for (uint64_t tile = 0; tile < tiles_of(words, W); ++tile) {
    const uint32_t count = entries[3 * tile];
    wide = differences_of<W>(values, count, wide, W > 1 && entries[3 * tile + 2] != 0, differences);
    values += count;
    const U* next = differences;
    Memory* b = reinterpret_cast<Memory*>(base + tile * kTileBytes);
    if (row.method == kSparse) {
      for (uint32_t k = count; k > 0; --k, ++b) {
        for (; *gaps == kEscape; ++gaps) b += kEscape;
        b += *gaps++;
        *b = static_cast<U>(*b + *next++);
      }
      continue;
    }
    const uint32_t size = words_of_tile(words, tile, kTileWords<W>), bytes_of_bits = (size + 7) / 8;
    const uint8_t* bits = streams.at[kBits] + tile * (kTileWords<W> / 8);
    for (uint32_t byte = 0; byte < bytes_of_bits; byte += 8) {
      uint64_t block = 0;
      std::memcpy(&block, bits + byte, bytes_of_bits - byte < 8 ? bytes_of_bits - byte : 8);
      Memory* const of_block = b + 8 * byte;
      for (; block != 0; block &= block - 1) {
        Memory& word = of_block[static_cast<uint32_t>(__builtin_ctzll(block))];
        word = static_cast<U>(word + *next++);
      }
    }
  }
}

template <int W, bool kDifference>
inline void apply_planes(const uint8_t* const* planes, uint8_t* base, uint64_t words) {
  using U = typename Word<W>::type;
  using Memory = typename Word<W>::Memory;
  Memory* __restrict b = reinterpret_cast<Memory*>(base);
  const uint8_t* p[W];
  for (int k = 0; k < W; ++k) p[k] = planes[k];
#pragma omp simd
  for (uint64_t i = 0; i < words; ++i) {
    U word = 0;
    for (int k = 0; k < W; ++k)
      word = static_cast<U>(word | static_cast<U>(static_cast<U>(p[k][i]) << (8 * k)));
    b[i] = kDifference ? static_cast<U>(b[i] + unzigzag<W>(word)) : rotated_right<W>(word);
  }
}

// Turns the base into the encoded chunk. REQUIRES: check_chunk passed.
template <int W>
inline void apply_chunk(const Row& row, const ChunkStreams& streams, uint8_t* base,
                        uint64_t words) {
  if (row.method == kDiff) return apply_planes<W, true>(&streams.at[kDiff0], base, words);
  if (row.method == kPlanes) return apply_planes<W, false>(&streams.at[kPlane0], base, words);
  if (row.method == kRaw) {
    if (words > 0)
      std::memcpy(base, streams.at[kWords], words * W);  // an empty chunk has no stream to point at
    return;
  }
  apply_positions<W>(row, streams, base, words);
}

}  // namespace
}  // namespace deltacheck
