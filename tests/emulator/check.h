// Checks of the emulated tests. The first failures are printed, and the exit status of the program
// is 1.

#pragma once

#include <cstdio>
#include <string>

namespace check {

inline int& failures() {
  static int failures = 0;
  return failures;
}

inline void fail(const char* file, int line, const char* what,
                 const std::string& more = "is false") {
  if (++failures() <= 20) std::fprintf(stderr, "%s:%d: %s %s\n", file, line, what, more.c_str());
}

inline int result() {
  if (failures() != 0) std::fprintf(stderr, "%d checks failed\n", failures());
  return failures() != 0;
}

}  // namespace check

#define CHECK(condition) ((condition) ? (void)0 : check::fail(__FILE__, __LINE__, #condition))
