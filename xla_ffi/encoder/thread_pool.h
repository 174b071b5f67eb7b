// A pool of threads in which the caller takes part.

#pragma once

#include <functional>

namespace deltacheck {

// Calls `work` on the calling thread and, as far as threads are free, on up to `threads - 1` more
// at the same time. Returns when every call that was started has returned. `work` hands out its own
// portions, must do all of them if it is called only once, and must not throw.
//
// Callers on several threads share the pool and cannot wait for one another for ever, since each
// does its own work if nobody helps. Threads are started at first use and never joined; a forked
// child starts its own.
void run_on_threads(int threads, const std::function<void()>& work);

// The processors that this process may run on.
int usable_processors();

}  // namespace deltacheck
