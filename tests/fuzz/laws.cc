// Fuzzes the laws of Adam: any words against any base by any law. Decoding restores every bit, the
// bytes depend neither on kernels nor on threads, and damaged laws are refused or decoded alike.

#include <algorithm>

#include "target.h"

using namespace deltacheck;

namespace {

constexpr uint32_t kMostElements = 6000, kMostChunks = 3;

// Returns a law: forms in range, unless `raw`, and any numbers or usual ones.
AdamLaw law_of(Reader* reader, bool raw) {
  AdamLaw law = reader->take<AdamLaw>();
  if (!raw) {
    law.mean %= kMeanForms;
    law.square %= kSquareForms;
    law.weight %= kWeightForms;
    law.reserved = 0;
  }
  return law;
}

AdamLaw usual_law() {
  return {1,      1,     0,      0,      0.9f, 0.1f,   10.0f, 0.999f,
          0.001f, 1e-9f, -1e-4f, -1e-5f, 1.0f, -1e-6f, 1.0f,  1.0f};
}

Encoded encode_at(const Run& run, const std::vector<uint8_t>& current,
                  const std::vector<uint8_t>& base, Method method, const AdamLaw& law,
                  size_t offset) {
  Exact now(current.size(), offset), shadow(current.size(), offset);
  if (!current.empty()) std::memcpy(now.data(), current.data(), current.size());
  if (!base.empty()) std::memcpy(shadow.data(), base.data(), base.size());
  Encoded encoded = encode(run, now.data(), shadow.data(), method, false, &law);
  promise(current.empty() || std::memcmp(shadow.data(), current.data(), current.size()) == 0,
          "the base becomes the current words");
  return encoded;
}

std::string decode(const Run& run, const Encoded& encoded, uint8_t* base) {
  StreamView views[kStreams];
  for (int stream = 0; stream < kStreams; ++stream)
    views[stream] = {encoded.streams[stream].data.get(), encoded.streams[stream].size};
  return apply(run, encoded.rows.data(), encoded.rows.size(), views, base);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Reader reader(data, size);
  const uint8_t kernels = reader.take<uint8_t>(), threads = reader.take<uint8_t>(),
                flags = reader.take<uint8_t>();
  const Method method = static_cast<Method>(kGradientLaw + reader.take<uint8_t>() % 3);
  const AdamLaw law = flags & 1 ? law_of(&reader, false) : usual_law();
  std::vector<uint64_t> bounds{0};
  for (uint32_t chunks = 1 + reader.take<uint8_t>() % kMostChunks; chunks > 0; --chunks) {
    const uint32_t elements = reader.take<uint16_t>() % (flags & 64 ? kMostElements : 100);
    // Some chunks have not three equal parts.
    bounds.push_back(bounds.back() + kLawParts * elements + (flags & 2 ? elements % 3 : 0));
  }
  const Run run{bounds.data(), bounds.size() - 1, static_cast<int>(kLawWordBytes)};
  uint64_t random = reader.take<uint32_t>();
  std::vector<uint8_t> base(run.bytes());
  for (uint64_t at = 0; at + kLawWordBytes <= base.size(); at += kLawWordBytes) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    // Any bits, or numbers of usual sizes.
    uint32_t word = static_cast<uint32_t>(random >> 32);
    if (flags & 4) word = (word & 0x81ffffff) | 0x38000000;
    std::memcpy(base.data() + at, &word, sizeof word);
  }
  // The current words follow the law of a decoder, but for some.
  std::vector<uint8_t> current = base;
  for (uint64_t at = 0; reader.left() > 0 && at < current.size(); at += reader.take<uint16_t>())
    current[at] = static_cast<uint8_t>(current[at] + reader.take<uint8_t>());

  use_instruction_set("plain");
  set_threads(1);
  Encoded expected = encode_at(run, current, base, method, law, 0);
  use_some_kernels(kernels);
  set_threads(1 + threads % 3);
  const Encoded found = encode_at(run, current, base, method, law, flags >> 3 & 7);
  promise(same(found, expected), "bytes depend neither on kernels nor on threads");
  Exact decoded(base.size(), flags >> 3 & 7), again(base.size());
  const auto reset = [&](Exact* memory) {
    if (!base.empty()) std::memcpy(memory->data(), base.data(), base.size());
  };
  reset(&decoded);
  promise(decode(run, found, decoded.data()).empty(), "what was encoded is accepted");
  promise(base.empty() || std::memcmp(decoded.data(), current.data(), current.size()) == 0,
          "what was encoded comes back");

  // Any law, and any byte of a stream.
  Bytes& laws = expected.streams[kLaw];
  if (laws.size == 0) return 0;
  const AdamLaw other = law_of(&reader, true);
  std::memcpy(laws.data.get(), &other, sizeof other);
  for (Bytes& stream : expected.streams) {
    if (stream.size > 0 && (flags & 128))
      stream.data.get()[reader.take<uint16_t>() % stream.size] ^= reader.take<uint8_t>();
  }
  reset(&decoded);
  const std::string refusal = decode(run, expected, decoded.data());
  use_instruction_set("plain");
  set_threads(1);
  reset(&again);
  promise(decode(run, expected, again.data()) == refusal, "all kernels refuse the same");
  promise(!refusal.empty() || std::memcmp(decoded.data(), again.data(), base.size()) == 0,
          "all kernels decode the same");
  return 0;
}

std::vector<Input> seeds() {
  std::vector<Input> all;
  for (uint8_t flags : {0, 1, 2, 4, 5, 8 + 4, 64 + 4, 64 + 5, 128 + 4, 128 + 5}) {
    for (uint8_t method = 0; method < 3; ++method) {
      Input input{flags, method, flags, method};
      if (flags & 1) put(&input, usual_law());
      put<uint8_t>(&input, 2);
      for (uint16_t elements : {80, 99, 50}) put<uint16_t>(&input, elements);
      put<uint32_t>(&input, 12345);
      for (uint16_t k = 0; k < 30; ++k) {
        put<uint8_t>(&input, static_cast<uint8_t>(k * 37));
        put<uint16_t>(&input, static_cast<uint16_t>(k * 40));
      }
      put(&input, usual_law());
      all.push_back(input);
    }
  }
  return all;
}
