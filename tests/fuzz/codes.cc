// Fuzzes the codes of derived leaves: any bytes, with any parameters that a manifest may have.
// Nothing is written outside of the values, all kernels agree, a lattice value is finite and in the
// cell of its weight, an octave value can be coded again, and a ratio value is finite.

#include <algorithm>
#include <cmath>

#include "target.h"

using namespace deltacheck;

namespace {

constexpr size_t kMostCodes = 5000;

void check_lattice(Reader* reader, double step, uint64_t seed, bool cells, uint32_t halvings,
                   uint32_t spare_bits, uint8_t kernels, size_t offset) {
  const size_t count = std::min(kMostCodes, reader->left() / (cells ? 6 : 4));
  Exact codes(count * 4, offset), weights(count * 2, offset), values(count * 4, offset),
      again(count * 4);
  for (size_t i = 0; i < codes.size(); ++i) codes.data()[i] = reader->take<uint8_t>();
  for (size_t i = 0; i < weights.size(); ++i) weights.data()[i] = reader->take<uint8_t>();
  const uint8_t* in = cells ? weights.data() : nullptr;
  const auto decode = [&](uint8_t* out) {
    return lattice_values(codes.data(), in, count, step, seed, halvings, spare_bits, out);
  };
  use_instruction_set("plain");
  const uint64_t expected = decode(again.data());
  use_some_kernels(kernels);
  promise(decode(values.data()) == expected &&
              (count == 0 || std::memcmp(values.data(), again.data(), values.size()) == 0),
          "kernels give the same values and refuse the same codes");
  for (size_t i = 0; i < count; ++i) {
    float value;
    std::memcpy(&value, values.data() + 4 * i, sizeof value);
    promise(std::isfinite(value), "a lattice value is finite");
  }
  const LatticeErrors errors =
      lattice_codes(values.data(), in, count, step, seed, halvings, spare_bits, codes.data());
  promise(errors.refused <= count && errors.largest >= 0,
          "values of a lattice are coded or refused");
  promise(decode(again.data()) == 0, "what is coded has a value");
}

void check_nested(Reader* reader, double step, uint64_t seed, uint32_t code_bytes,
                  uint32_t halvings, uint32_t spare_bits, uint8_t kernels, size_t offset) {
  const size_t count = std::min(kMostCodes, reader->left() / (2 + code_bytes));
  Exact codes(count * code_bytes, offset), weights(count * 2, offset), values(count * 4, offset),
      again(count * 4);
  for (size_t i = 0; i < codes.size(); ++i) codes.data()[i] = reader->take<uint8_t>();
  for (size_t i = 0; i < weights.size(); ++i) weights.data()[i] = reader->take<uint8_t>();
  const auto decode = [&](uint8_t* out) {
    return nested_values(codes.data(), weights.data(), count, step, seed, code_bytes, halvings,
                         spare_bits, out);
  };
  use_instruction_set("plain");
  const uint64_t expected = decode(again.data());
  use_some_kernels(kernels);
  promise(decode(values.data()) == expected &&
              (count == 0 || std::memcmp(values.data(), again.data(), values.size()) == 0),
          "kernels give the same values and refuse the same codes");
  if (expected == 0) {
    for (size_t i = 0; i < count; ++i) {
      float value;
      std::memcpy(&value, values.data() + 4 * i, sizeof value);
      promise(std::isfinite(value), "a nested value is finite");
    }
  }
  const LatticeErrors errors = nested_codes(values.data(), weights.data(), count, step, seed,
                                            code_bytes, halvings, spare_bits, codes.data());
  promise(errors.refused <= count && errors.largest >= 0, "values are coded or refused");
  promise(errors.refused > 0 || decode(again.data()) == 0, "what is coded has a value");
}

void check_octaves(Reader* reader, uint32_t fraction_bits, uint8_t kernels, size_t offset) {
  const OctaveForm form = octave_form(fraction_bits);
  const size_t count = std::min(kMostCodes, reader->left() / form.code_bytes);
  Exact codes(count * form.code_bytes, offset), values(count * 4, offset), again(count * 4),
      recoded(codes.size());
  for (size_t i = 0; i < codes.size(); ++i) codes.data()[i] = reader->take<uint8_t>();
  use_instruction_set("plain");
  const uint64_t expected = octave_values(codes.data(), count, form, again.data());
  use_some_kernels(kernels);
  const uint64_t bad = octave_values(codes.data(), count, form, values.data());
  promise(bad == expected &&
              (count == 0 || std::memcmp(values.data(), again.data(), values.size()) == 0),
          "kernels give the same values and refuse the same codes");
  const uint64_t refused = octave_codes(values.data(), nullptr, count, form, 0, recoded.data());
  promise(refused == 0, "what a code stands for has a code");
  octave_values(recoded.data(), count, form, again.data());
  // The second code may differ from the first: subnormals are further apart than cells.
  promise(count == 0 || std::memcmp(values.data(), again.data(), values.size()) == 0,
          "which stands for the same");
}

void check_ratios(Reader* reader, double step, double limit, uint8_t kernels, size_t offset) {
  const RatioForm form{std::min(std::max(step, 0x1p-32), 0x1p32),
                       limit > 0 ? std::sqrt(limit) : INFINITY};
  const size_t count = std::min(kMostCodes, reader->left() / 5);
  Exact codes(count, offset), variances(count * 4, offset), values(count * 4, offset),
      again(count * 4);
  for (size_t i = 0; i < codes.size(); ++i) codes.data()[i] = reader->take<uint8_t>();
  for (size_t i = 0; i < variances.size(); ++i) variances.data()[i] = reader->take<uint8_t>();
  const auto decode = [&](uint8_t* out) {
    return ratio_values(codes.data(), variances.data(), count, form, out);
  };
  use_instruction_set("plain");
  const uint64_t expected = decode(again.data());
  use_some_kernels(kernels);
  promise(decode(values.data()) == expected &&
              (count == 0 || std::memcmp(values.data(), again.data(), values.size()) == 0),
          "kernels give the same values and refuse the same codes");
  for (size_t i = 0; i < count; ++i) {
    float value;
    std::memcpy(&value, values.data() + 4 * i, sizeof value);
    promise(std::isfinite(value), "a ratio value is finite");
  }
  const RatioErrors errors =
      ratio_codes(values.data(), variances.data(), count, form, codes.data());
  promise(errors.refused <= count && errors.largest >= 0, "values are coded or refused");
  promise(decode(again.data()) == 0, "what is coded has a value");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Reader reader(data, size);
  const uint8_t kernels = reader.take<uint8_t>(), flags = reader.take<uint8_t>();
  const int exponent = static_cast<int>(reader.take<uint16_t>() % 277) -
                       149;  // of the spacing, as a manifest may say it
  const uint64_t seed = reader.take<uint64_t>();
  const double step = std::ldexp(1.0 + reader.take<uint8_t>() / 256.0, exponent);
  set_threads(1 + flags % 3);
  if ((flags & 3) == 3)
    check_ratios(&reader, step, static_cast<double>(flags >> 2), kernels, flags >> 4 & 3);
  else if (flags & 4)
    check_octaves(&reader, flags >> 5, kernels, flags >> 3 & 3);
  else if (flags & 128)
    check_nested(&reader, step, seed, 1 + (flags >> 3 & 1), seed % 32, seed / 32 % 8, kernels,
                 flags >> 4 & 3);
  else
    check_lattice(&reader, step, seed, (flags & 8) != 0, seed % 32, seed / 32 % 8, kernels,
                  flags >> 4 & 7);
  return 0;
}

std::vector<Input> seeds() {
  std::vector<Input> all;
  for (int flags = 0; flags < 256; flags += 3) {
    Input input{static_cast<uint8_t>(flags), static_cast<uint8_t>(flags)};
    put<uint16_t>(&input, static_cast<uint16_t>(flags * 7));
    put<uint64_t>(&input, 0x0123456789abcdef);
    put<uint8_t>(&input, 0x80);
    for (int k = 0; k < 400; ++k)
      put<uint8_t>(&input, static_cast<uint8_t>(k % 3 == 0 ? k : k * 37 >> 3));
    all.push_back(input);
  }
  return all;
}
