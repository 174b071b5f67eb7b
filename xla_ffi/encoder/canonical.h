// The canonical form of a JSON text (docs/reference/format.md, section 1), of which the checksum of
// a document is computed: no white space, and the keys of every object ascending.

#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace deltacheck {

// Returns true if a number with a point or an exponent is spelled as Python spells it.
using IsSpelled = bool (*)(std::string_view number);

// Returns the canonical form of a text that differs from it in the order of keys only. Every other
// text is refused, so that a caller can leave it to a complete reader of JSON: white space, keys
// that are not plain ASCII or have escapes, two equal keys, and text or numbers in another spelling
// than Python's.
std::optional<std::string> canonical_json(std::string_view text, IsSpelled is_spelled);

}  // namespace deltacheck
