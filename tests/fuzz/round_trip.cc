// Fuzzes the round trip: any words against any base, divided anywhere, at any address. Decoding
// restores every bit, the base becomes the words, and the bytes depend neither on kernels nor on
// threads.

#include <algorithm>

#include "target.h"

using namespace deltacheck;

namespace {

constexpr uint32_t kMostBytes = 3 * kTileBytes + 200, kMostChunks = 6;

struct Result {
  Encoded encoded;
  std::vector<uint8_t> base;
};

Result encode_at(const Run& run, const std::vector<uint8_t>& current,
                 const std::vector<uint8_t>* base, size_t offset) {
  Exact now(current.size(), offset), shadow(current.size(), offset);
  if (!current.empty()) std::memcpy(now.data(), current.data(), current.size());
  if (base != nullptr && !base->empty()) std::memcpy(shadow.data(), base->data(), base->size());
  Encoded encoded = encode(run, now.data(), base != nullptr ? shadow.data() : nullptr);
  return {std::move(encoded),
          base != nullptr ? std::vector<uint8_t>(shadow.data(), shadow.data() + shadow.size())
                          : current};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Reader reader(data, size);
  const int word_bytes = some_word_bytes(reader.take<uint8_t>());
  const uint8_t kernels = reader.take<uint8_t>(), threads = reader.take<uint8_t>(),
                flags = reader.take<uint8_t>();
  // Most runs are short: they are many times as fast, and few edge cases need whole tiles.
  const uint32_t words =
      reader.take<uint32_t>() % (flags & 64 ? kMostBytes / static_cast<uint32_t>(word_bytes) : 700);
  std::vector<uint64_t> bounds{0, words};
  for (uint32_t cuts = reader.take<uint8_t>() % kMostChunks; cuts > 0; --cuts)
    bounds.push_back(reader.take<uint32_t>() % (words + 1));
  std::sort(bounds.begin(), bounds.end());
  const Run run{bounds.data(), bounds.size() - 1, word_bytes};

  // The base is noise or one byte. The current words are the base, followed by changes of some
  // words at a time that add to one byte.
  uint64_t random = reader.take<uint32_t>();
  std::vector<uint8_t> base(run.bytes());
  for (uint8_t& byte : base) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    byte = flags & 1 ? static_cast<uint8_t>(random >> 56) : static_cast<uint8_t>(flags);
  }
  std::vector<uint8_t> current = base;
  const uint32_t stride = 1 + reader.take<uint16_t>() % 2000;
  for (uint64_t at = 0; (flags & 2) && at < current.size(); at += stride) ++current[at];
  for (uint64_t at = 0; reader.left() > 0 && at < current.size(); at += reader.take<uint16_t>())
    current[at] = static_cast<uint8_t>(current[at] + reader.take<uint8_t>());
  const std::vector<uint8_t>* given = flags & 4 ? nullptr : &base;

  use_instruction_set("plain");
  set_threads(1);
  const Result expected = encode_at(run, current, given, 0);
  use_some_kernels(kernels);
  set_threads(1 + threads % 3);
  const Result found = encode_at(run, current, given, flags >> 3 & 7);
  promise(same(found.encoded, expected.encoded), "bytes depend neither on kernels nor on threads");
  promise(found.base == current && expected.base == current, "the base becomes the current words");
  StreamView views[kStreams];
  for (int stream = 0; stream < kStreams; ++stream)
    views[stream] = {found.encoded.streams[stream].data.get(), found.encoded.streams[stream].size};
  Exact decoded(base.size(), flags >> 3 & 7);
  if (!base.empty()) std::memcpy(decoded.data(), base.data(), base.size());
  promise(apply(run, found.encoded.rows.data(), found.encoded.rows.size(), views, decoded.data())
              .empty(),
          "what was encoded is accepted");
  promise(base.empty() || std::memcmp(decoded.data(), current.data(), current.size()) == 0,
          "what was encoded comes back");
  return 0;
}

std::vector<Input> seeds() {
  std::vector<Input> all;
  for (uint8_t word = 0; word < 4; ++word) {
    for (uint8_t flags : {0, 1, 2, 3, 5, 8 + 3, 56 + 2, 64 + 2, 64 + 3 + 16}) {
      for (uint16_t stride : {0, 4, 30, 400}) {
        Input input{word, flags, word, flags};
        put<uint32_t>(&input, flags & 64 ? kMostBytes / (1u << word) - 3 : 690);
        put<uint8_t>(&input, 2);
        put<uint32_t>(&input, 100);
        put<uint32_t>(&input, 30000);
        put<uint32_t>(&input, 12345);
        put<uint16_t>(&input, stride);
        for (uint16_t k = 0; k < 40; ++k) {
          put<uint8_t>(&input, static_cast<uint8_t>(k * 37));
          put<uint16_t>(&input, static_cast<uint16_t>(k * stride));
        }
        all.push_back(input);
      }
    }
  }
  return all;
}
