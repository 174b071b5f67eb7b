// Fuzzes changed words: any bytes are refused or give some words, with any number of threads, and
// what is encoded comes back.

#include "encoder/changes.h"

#include <algorithm>

#include "target.h"

using namespace deltacheck;

namespace {

constexpr uint32_t kMostWords = 3000;

// Words like those of weights: few of their classes are frequent.
void fill(uint8_t* words, size_t size, uint64_t random) {
  for (size_t i = 0; i < size; ++i) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    words[i] = i % 2 == 1 ? static_cast<uint8_t>(0x3c + (random >> 62)) : random >> 56 & 0xff;
  }
}

std::string applied(const Input& changes, Exact* words, int word_bytes) {
  Exact copy(changes.size(), 1);
  if (!changes.empty()) std::memcpy(copy.data(), changes.data(), changes.size());
  return apply_changes(copy.data(), changes.size(), words->data(),
                       words->size() / static_cast<size_t>(word_bytes), word_bytes);
}

}  // namespace

// Of an input: bytes of a word, threads, number of words, the words, then changes or new words.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Reader reader(data, size);
  const int word_bytes = 1 + (reader.take<uint8_t>() & 1);
  const uint8_t flags = reader.take<uint8_t>();
  set_threads(1 + flags % 3);
  const uint64_t count = reader.take<uint16_t>() % kMostWords;
  const size_t bytes = count * static_cast<size_t>(word_bytes);
  Exact before(bytes, flags >> 7), now(bytes, flags >> 6 & 1), words(bytes, 1);
  fill(before.data(), bytes, reader.take<uint32_t>());
  const auto reset = [&](Exact* to) {
    if (bytes > 0) std::memcpy(to->data(), before.data(), bytes);
  };
  reset(&now);
  reset(&words);
  if (flags & 32) {
    // Changes of some words at a time, which add to one byte.
    const uint32_t stride = 1 + reader.take<uint16_t>() % 2000;
    for (size_t at = 0; at < bytes; at += stride)
      now.data()[at] = static_cast<uint8_t>(now.data()[at] + reader.take<uint8_t>());
  } else {
    Input changes;
    while (reader.left() > 0) changes.push_back(reader.take<uint8_t>());
    const bool refused = !applied(changes, &now, word_bytes).empty();
    promise(applied(changes, &words, word_bytes).empty() != refused, "the same is refused again");
    promise(bytes == 0 || std::memcmp(words.data(), now.data(), bytes) == 0,
            "the same changes give the same words");
    reset(&words);
  }
  const Bytes encoded = encode_changes(before.data(), now.data(), count, word_bytes);
  const Input payload(encoded.data.get(), encoded.data.get() + encoded.size);
  promise(applied(payload, &words, word_bytes).empty(), "what was encoded is accepted");
  promise(bytes == 0 || std::memcmp(words.data(), now.data(), bytes) == 0,
          "what was encoded comes back");
  return 0;
}

std::vector<Input> seeds() {
  std::vector<Input> all;
  for (uint8_t word = 0; word < 2; ++word) {
    for (uint16_t count : {uint16_t{1}, uint16_t{63}, uint16_t{700}, uint16_t{2900}}) {
      for (uint16_t stride : {1, 2, 5, 40, 900}) {
        Input input{word, static_cast<uint8_t>(32 + count % 32)};
        put(&input, count);
        put<uint32_t>(&input, stride);
        Exact before((1u + word) * count), now((1u + word) * count);
        fill(before.data(), before.size(), stride);
        std::memcpy(now.data(), before.data(), before.size());
        Input changing = input;
        put<uint16_t>(&changing, static_cast<uint16_t>(stride - 1));
        for (size_t at = 0; at < now.size(); at += stride) {
          const uint8_t step = static_cast<uint8_t>(at % 7 == 0 ? 255 : 1);
          now.data()[at] = static_cast<uint8_t>(now.data()[at] + step);
          put(&changing, step);
        }
        all.push_back(changing);
        const Bytes encoded = encode_changes(before.data(), now.data(), count, 1 + word);
        input[1] &= static_cast<uint8_t>(~32);
        input.insert(input.end(), encoded.data.get(), encoded.data.get() + encoded.size);
        all.push_back(input);
      }
    }
  }
  return all;
}
