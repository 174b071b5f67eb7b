// Encodes which words of an array have changed, and by how much, near the entropy given the words
// before. docs/how-to/publish.md, "The compact encoding", defines the bytes.

#pragma once

#include <cstdint>
#include <string>

#include "blocks.h"

namespace deltacheck {

// Returns the changes from `before` to `now`. REQUIRES: words of 1 or 2 bytes. Throws
// std::bad_alloc.
Bytes encode_changes(const uint8_t* before, const uint8_t* now, uint64_t words, int word_bytes);

// Changes words in place. Returns an empty string, or the reason why the changes were refused; the
// words are then a mixture. Any bytes are safe, but not all damage is found. REQUIRES: words of 1
// or 2 bytes. Throws std::bad_alloc.
std::string apply_changes(const uint8_t* changes, uint64_t size, uint8_t* words, uint64_t count,
                          int word_bytes);

}  // namespace deltacheck
