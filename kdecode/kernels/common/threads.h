// The thread pool of the native kernels: persistent workers that run one function together (SPMD).
//
// Workers spin briefly, then yield, then sleep, so that a contended machine does not collapse. The pool is an object, owned by
// whoever made it; there is no global one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace kdecode {

struct PoolState;

// One thread's view of the pool. All threads must execute the same sequence of split() and barrier() calls. A job must not throw
// (the process ends if it does: the other threads could only wait for it forever) and must not run another job of its pool.
class Worker {
 public:
  Worker(PoolState& state, int index, int count) : state_(state), index_(index), count_(count) {}

  int index() const { return index_; }
  int count() const { return count_; }

  // Waits until every thread of the job is here; writes before it are visible after it.
  void barrier();

  // At least `bytes` of memory of this thread's own, on a cache line. The next call may move it and what is in it is lost then; it
  // grows in the first job that needs more than any before.
  void* scratch(std::int64_t bytes);

  // Calls body(begin, end) for chunks of `chunk` items of [0, n). Each thread has a stretch of its own, which it takes in order, so
  // that it reads memory in one stream; one that has finished helps with the others'. No barrier at the end.
  template <class Body>
  void split(std::int64_t n, std::int64_t chunk, Body&& body) {
    const int split = open_split();
    const std::int64_t chunks = (n + chunk - 1) / chunk;
    for (int i = 0; i < count_; ++i) {
      const int owner = (index_ + i) % count_;
      const std::int64_t first = chunks * owner / count_, last = chunks * (owner + 1) / count_;
      if (first == last) continue;
      std::atomic<std::int64_t>& taken = taken_of(split, owner);
      // The first look is one that does not take the counter from its owner.
      while (first + taken.load(std::memory_order_relaxed) < last) {
        const std::int64_t at = first + taken.fetch_add(1, std::memory_order_relaxed);
        if (at >= last) break;
        body(at * chunk, (at + 1) * chunk < n ? (at + 1) * chunk : n);
      }
    }
  }

 private:
  // The place of this split's counters; every thread has the same.
  int open_split();
  // How many chunks of a thread's stretch were taken.
  std::atomic<std::int64_t>& taken_of(int split, int thread);

  PoolState& state_;
  int index_;
  int count_;
  std::uint32_t arrivals_ = 0;  // of all threads at all barriers up to the last one, modulo 2^32
  std::uint32_t bank_ = 0;      // of the split counters in use until the next barrier
  std::uint32_t splits_ = 0;    // opened since the last barrier
};

// Cores that this process may use.
int available_cores();

// What a spinning thread does between two looks.
inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  // num_threads includes the caller; std::invalid_argument unless 1 <= num_threads <= available_cores(). Only tests oversubscribe.
  explicit Pool(int num_threads, bool can_oversubscribe = false);
  // Must not be called while a job runs.
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const;
  // Runs job(context, worker) on every thread; returns when all have finished. Calls from several threads take turns. Threads do
  // not survive fork(): a child process has to make its own pool, and std::logic_error says so if it runs its parent's.
  void run(void (*job)(void*, Worker&), void* context);

 private:
  std::unique_ptr<PoolState> state_;
};

}  // namespace kdecode
