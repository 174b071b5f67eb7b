// Mutates the seeds of a target at random, for compilers without libFuzzer. It uses no coverage, so
// it needs more inputs to find the same errors. Every input follows from the seed and its number,
// and can be repeated alone.
//
// `--replay FOLDER` first runs every input of a stored corpus. `--keep FOLDER`, in a build with
// -fsanitize-coverage=trace-pc for all files but this one, writes each input that reaches new code
// to that folder.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <random>

#include "target.h"

namespace {

constexpr size_t kPlaces = 1 << 16;
uint8_t g_reached[kPlaces];
size_t g_new = 0;

}  // namespace

// The code under test calls this at every edge of its control flow, in builds with coverage.
extern "C" void __sanitizer_cov_trace_pc() {
  const auto place = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  uint8_t* const reached = &g_reached[(place ^ (place >> 16)) % kPlaces];
  g_new += *reached == 0;
  *reached = 1;
}

namespace {

void run_exactly(const Input& input) {
  std::unique_ptr<uint8_t[]> exact(new uint8_t[input.size()]);
  if (!input.empty()) std::memcpy(exact.get(), input.data(), input.size());
  LLVMFuzzerTestOneInput(exact.get(), input.size());
}

uint64_t g_seed = 1, g_number = 0;

void tell_input(int) {
  std::fprintf(stderr, "broken by input %llu: run again with --seed %llu --only %llu\n",
               static_cast<unsigned long long>(g_number), static_cast<unsigned long long>(g_seed),
               static_cast<unsigned long long>(g_number));
  std::_Exit(1);
}

void mutate(Input* input, std::mt19937_64* random) {
  const auto below = [&](uint64_t bound) { return (*random)() % bound; };
  if (input->empty()) input->push_back(0);
  // The first bytes determine how the others are read, so a mutation there changes everything.
  const bool early = below(3) == 0;
  const size_t at = below(early ? std::min<size_t>(input->size(), 200) : input->size());
  const auto here = input->begin() + static_cast<int64_t>(at);
  static constexpr uint8_t kTelling[] = {0, 1, 2, 127, 128, 253, 254, 255};
  switch (below(8)) {
    case 0:
      *here = static_cast<uint8_t>(*here ^ (1u << below(8)));
      break;
    case 1:
      *here = kTelling[below(8)];
      break;
    case 2:
      *here = static_cast<uint8_t>(*here + below(5) - 2);
      break;
    case 3:
      input->insert(here, static_cast<uint8_t>((*random)()));
      break;
    case 4:
      input->erase(here,
                   here + static_cast<int64_t>(1 + below(std::min<size_t>(input->size() - at, 8))));
      break;
    case 5: {  // a part over another
      const size_t from = below(input->size()),
                   length = 1 + below(std::min<size_t>(input->size() - std::max(from, at), 64));
      std::memmove(input->data() + at, input->data() + from, length);
      break;
    }
    case 6:
      std::swap(*here, (*input)[below(input->size())]);
      break;
    default:
      if (below(20) == 0) input->resize(at);
      break;
  }
}

}  // namespace

int main(int count, char** arguments) {
  uint64_t runs = ~uint64_t{0}, only = ~uint64_t{0};
  double seconds = 1e9;
  std::string folder, kept, corpus;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = arguments[i], value = arguments[i + 1];
    if (name == "--runs") runs = std::stoull(value);
    if (name == "--seconds") seconds = std::stod(value);
    if (name == "--seed") g_seed = std::stoull(value);
    if (name == "--only") only = std::stoull(value);
    if (name == "--write-seeds") folder = value;
    if (name == "--keep") kept = value;
    if (name == "--replay") corpus = value;
  }
  const std::vector<Input> first = seeds();
  if (!folder.empty()) {
    for (size_t i = 0; i < first.size(); ++i)
      std::ofstream(folder + "/" + std::to_string(i), std::ios::binary)
          .write(reinterpret_cast<const char*>(first[i].data()),
                 static_cast<std::streamsize>(first[i].size()));
    return 0;
  }
  std::signal(SIGABRT, tell_input);
  uint64_t replayed = 0;
  if (!corpus.empty()) {
    std::vector<std::filesystem::path> files(std::filesystem::directory_iterator(corpus), {});
    std::sort(files.begin(), files.end());
    for (const auto& file : files) {
      std::fprintf(stderr, "%s\n", file.c_str());  // the last one is the one that breaks
      std::ifstream in(file, std::ios::binary);
      run_exactly(Input(std::istreambuf_iterator<char>(in), {}));
      ++replayed;
    }
    std::printf("%llu inputs of the corpus\n", static_cast<unsigned long long>(replayed));
  }
  const auto began = std::chrono::steady_clock::now();
  uint64_t done = 0;
  for (g_number = only == ~uint64_t{0} ? 0 : only; done < runs; ++g_number, ++done) {
    if (g_number % 64 == 0 &&
        std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count() > seconds)
      break;
    std::mt19937_64 random(g_seed * 1000003 + g_number);
    Input input = first[g_number % first.size()];
    if (g_number >= first.size())
      for (uint64_t times = 1 + random() % 6; times > 0; --times) mutate(&input, &random);
    g_new = 0;
    run_exactly(input);
    if (!kept.empty() && g_new > 0 && g_number >= first.size() && input.size() < 4096)
      std::ofstream(kept + "/" + std::to_string(g_number), std::ios::binary)
          .write(reinterpret_cast<const char*>(input.data()),
                 static_cast<std::streamsize>(input.size()));
    if (only != ~uint64_t{0}) break;
  }
  std::printf("%llu inputs, seed %llu, no finding: below %.1e an input with 95 %% confidence\n",
              static_cast<unsigned long long>(done), static_cast<unsigned long long>(g_seed),
              3.0 / static_cast<double>(done > 0 ? done : 1));
  return 0;
}
