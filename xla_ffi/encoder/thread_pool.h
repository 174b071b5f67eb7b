// A pool of threads in which the caller takes part. Used by changes.cc, delta.cc, entropy.cc and
// entropy_read.cc.

#pragma once

#include <functional>

namespace deltacheck {

// Calls `work` on the calling thread and, if threads are idle, on up to `threads - 1` more at the
// same time. Returns when every started call has returned. `work` distributes its own portions,
// must do all of them if it is called only once, and must not throw.
//
// Callers on several threads share the pool. They cannot deadlock, since each does its own work if
// no thread helps. Threads are started at first use and never joined. A forked child starts its
// own. On Linux they have a lower priority than the process, so that a save yields to training.
void run_on_threads(int threads, const std::function<void()>& work);

// Returns the number of processors that this process may run on.
int usable_processors();

}  // namespace deltacheck
