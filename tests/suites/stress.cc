// Encodes and applies on many threads at once, with varying numbers of threads and kernels, while
// children are forked. For a sanitizer that watches threads. Every result is compared with that of
// one thread.

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "encoder/delta.h"

using namespace deltacheck;

namespace {

constexpr int kWordBytes = 2, kChunks = 24;
constexpr uint64_t kChunkWords = 3000;

struct Sample {
  std::vector<uint8_t> base, current;
  std::vector<uint64_t> bounds;
  Run run() const { return {bounds.data(), bounds.size() - 1, kWordBytes}; }
};

Sample sample() {
  Sample made;
  uint64_t random = 1;
  for (uint64_t i = 0; i < kChunks * kChunkWords * kWordBytes; ++i) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    made.base.push_back(static_cast<uint8_t>(random >> 56));
    const uint64_t one_in =
        i / kWordBytes / kChunkWords % 4;  // equal, all, half and few words changed, chunk by chunk
    const bool change = one_in == 1 || (one_in == 2 && random >> 40 & 1) ||
                        (one_in == 3 && (random >> 40) % 500 == 0);
    made.current.push_back(static_cast<uint8_t>(made.base.back() + change));
  }
  for (uint64_t chunk = 0; chunk <= kChunks; ++chunk) made.bounds.push_back(chunk * kChunkWords);
  return made;
}

std::string bytes_of(const Encoded& encoded) {
  std::string all(reinterpret_cast<const char*>(encoded.rows.data()),
                  encoded.rows.size() * sizeof(Row));
  for (const Bytes& stream : encoded.streams)
    if (stream.size > 0) all.append(reinterpret_cast<const char*>(stream.data.get()), stream.size);
  return all;
}

bool once(const Sample& given, const std::string& expected) {
  std::vector<uint8_t> base = given.base;
  const Encoded encoded = encode(given.run(), given.current.data(), base.data());
  if (bytes_of(encoded) != expected || base != given.current) return false;
  StreamView views[kStreams];
  for (int stream = 0; stream < kStreams; ++stream)
    views[stream] = {encoded.streams[stream].data.get(), encoded.streams[stream].size};
  base = given.base;
  return apply(given.run(), encoded.rows.data(), encoded.rows.size(), views, base.data()).empty() &&
         base == given.current;
}

}  // namespace

// Arguments: seconds, 1 to fork as well, then the kernels to use.
int main(int count, char** arguments) {
  if (count < 4) return 2;
  const double seconds = std::atof(arguments[1]);
  const bool forks = std::atoi(arguments[2]) != 0;
  const Sample given = sample();
  set_threads(1);
  use_instruction_set(arguments[3]);
  std::vector<uint8_t> base = given.base;
  const std::string expected = bytes_of(encode(given.run(), given.current.data(), base.data()));

  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0}, calls{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (int round = 0; !stop; ++round, ++calls) {
        set_threads(1 + (round + caller) % 5);
        use_instruction_set(arguments[3 + (round + caller) % (count - 3)]);
        if (!once(given, expected)) ++wrong;
      }
    });
  }
  int children = 0, failed = 0;
  const auto began = std::chrono::steady_clock::now();
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count() <
         seconds) {
    if (!forks) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      continue;
    }
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // a child that waits for a thread of its parent waits for ever
#ifdef __SANITIZE_THREAD__
      set_threads(1);  // it cannot watch threads that a child starts
#endif
      _exit(once(given, expected) ? 0 : 3);
    }
    int status = 0;
    waitpid(child, &status, 0);
    failed += status != 0;
    ++children;
  }
  stop = true;
  for (std::thread& caller : callers) caller.join();
  std::printf("%d calls, %d wrong; %d children, %d failed\n", calls.load(), wrong.load(), children,
              failed);
  return wrong != 0 || failed != 0;
}
