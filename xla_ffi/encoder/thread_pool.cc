#include "thread_pool.h"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace deltacheck {
namespace {

// Added to the niceness of the process. Larger: training loses less time beside a save; smaller:
// saves and restores end sooner beside other work. The caller of a job keeps its own.
constexpr int kHelperNiceness = 5, kMostNiceness = 19;

// Lets the calling thread yield to others. Linux alone gives each thread a priority of its own.
void lower_priority() {
#ifdef __linux__
  const int niceness = getpriority(PRIO_PROCESS, static_cast<id_t>(getpid())) + kHelperNiceness;
  (void)setpriority(PRIO_PROCESS, 0, std::min(kMostNiceness, niceness));
#endif
}

struct Job {
  Job(const std::function<void()>* work, int openings) : work(work), openings(openings) {}

  const std::function<void()>* work;
  int openings;     // number of threads that may still join
  int running = 0;  // number of threads that have joined and not finished
  std::condition_variable idle;
};

class Pool {
 public:
  explicit Pool(pid_t process) : process(process) {}

  void run(int helpers, const std::function<void()>& work) {
    Job job(&work, helpers);
    {
      std::lock_guard lock(mutex_);
      grow(helpers);
      jobs_.push_back(&job);
    }
    for (int i = 0; i < helpers; ++i) wake_.notify_one();
    work();
    std::unique_lock lock(mutex_);
    jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), &job), jobs_.end());
    job.idle.wait(lock, [&] { return job.running == 0; });
  }

  const pid_t process;

 private:
  // Starts threads. REQUIRES: mutex_ is held. Fewer threads than requested are no error, because
  // the caller works, too.
  void grow(int target) {
    try {
      for (; threads_ < target; ++threads_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
    }
  }

  [[noreturn]] void serve() {
    lower_priority();
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return !jobs_.empty(); });
      Job* job = jobs_.front();
      if (--job->openings == 0) jobs_.pop_front();
      ++job->running;
      lock.unlock();
      (*job->work)();
      lock.lock();
      if (--job->running == 0) job->idle.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job*> jobs_;
  int threads_ = 0;
};

// Never destroyed: its threads run until the process ends. A forked child has none of them, and the
// parent's mutex may be locked for ever in it. So the child abandons that pool and makes its own.
Pool& pool() {
  static std::atomic<Pool*> current{nullptr};
  Pool* pool = current.load(std::memory_order_acquire);
  const pid_t process_id = getpid();
  while (pool == nullptr || pool->process != process_id) {
    Pool* created = new Pool(process_id);
    if (current.compare_exchange_strong(pool, created, std::memory_order_acq_rel)) return *created;
    delete created;
  }
  return *pool;
}

}  // namespace

void run_on_threads(int threads, const std::function<void()>& work) {
  if (threads <= 1)
    work();
  else
    pool().run(threads - 1, work);
}

int usable_processors() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace deltacheck
