#include "threads.h"

#include <sched.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace kdecode {
namespace {

constexpr int kLine = 128;         // bytes; two cache lines, which hardware prefetches in pairs
constexpr int kSpins = 4000;       // pauses before the first yield, 40 to 150 us by processor
constexpr int kYields = 100;       // yields before sleeping
constexpr std::uint32_t kCounters = 8;

// A count of arrivals, modulo 2^32, that threads wait on. Everything is on one cache line: an arrival fetches it once.
//
// No wake-up is lost: a waiter announces itself in sleepers_ before it looks at the count for the last time, an arriving thread
// looks at sleepers_ after it has changed the count, and both are sequentially consistent, so one of them sees the other. The
// waiter holds the mutex from its announcement until it sleeps, so the notification cannot fall between the two.
class alignas(kLine) Gate {
 public:
  // Returns the count with this arrival.
  std::uint32_t arrive() { return count_.fetch_add(1, std::memory_order_seq_cst) + 1; }

  // To be called by whoever made the count reach what threads may be waiting for.
  void wake() {
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }
    condition_.notify_all();
  }

  // Returns once the count has reached `target`; what was written before those arrivals is visible then.
  void wait_for(std::uint32_t target, int spins) {
    for (int i = 0; i < spins; ++i) {
      if (has_reached(target)) return;
      pause();
    }
    for (int i = 0; i < kYields; ++i) {
      if (has_reached(target)) return;
      sched_yield();
    }
    // Sleeping leaves this core idle, which is also what lets the scheduler move a thread that lost its core to another process
    // over here.
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    condition_.wait(lock, [&] { return has_reached(target); });
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  // Nobody waits for a count 2^31 away.
  bool has_reached(std::uint32_t target) const {
    return static_cast<std::int32_t>(count_.load(std::memory_order_seq_cst) - target) >= 0;
  }

  std::atomic<std::uint32_t> count_{0};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable condition_;
};

struct alignas(kLine) Counter {
  std::atomic<std::int64_t> taken{0};
};

// Memory of one thread.
struct Scratch {
  struct Free {
    void operator()(void* memory) const { ::operator delete(memory, std::align_val_t{kLine}); }
  };
  std::unique_ptr<void, Free> memory;
  std::int64_t bytes = 0;
};

}  // namespace

// A job is a phase or several, separated by barriers; its end is a barrier, too.
//
// Split counters: the s-th split of a phase uses the s-th counters, one a thread, of the phase's bank, and phases alternate between
// two banks. The last thread to arrive at the barrier that ends a phase lets the others go and then clears that phase's bank. Nobody
// uses the bank in the next phase, and the phase after that starts only when this thread, too, has arrived at the next barrier: so
// counters are zero whenever a split is opened. A phase of more than kCounters splits gets barriers of its own (open_split), which
// is possible because all threads execute the same sequence.
struct PoolState {
  PoolState(int count, int spins)
      : count(count), spins(spins), counters(2 * kCounters * count), scratch(count), caller(*this, 0, count) {}

  const int count;
  const int spins;
  const pid_t process = getpid();
  Gate start;    // one arrival a job
  Gate arrived;  // num_threads arrivals a barrier
  std::vector<Counter> counters;  // [bank][split][thread]
  std::vector<Scratch> scratch;  // of each thread
  void (*job)(void*, Worker&) = nullptr;  // null ends the threads
  void* context = nullptr;
  Worker caller;
  std::mutex running;
  std::vector<std::thread> threads;
};

void Worker::barrier() {
  const std::uint32_t used = splits_, bank = bank_;
  splits_ = 0;
  bank_ ^= 1;
  arrivals_ += static_cast<std::uint32_t>(count_);
  if (state_.arrived.arrive() != arrivals_) {
    state_.arrived.wait_for(arrivals_, state_.spins);
    return;
  }
  state_.arrived.wake();
  Counter* const first = &state_.counters[bank * kCounters * count_];
  const std::uint32_t count = used * static_cast<std::uint32_t>(count_);
  for (std::uint32_t i = 0; i < count; ++i) first[i].taken.store(0, std::memory_order_relaxed);
}

int Worker::open_split() {
  if (splits_ == kCounters) barrier();
  return static_cast<int>(bank_ * kCounters + splits_++) * count_;
}

std::atomic<std::int64_t>& Worker::taken_of(int split, int thread) { return state_.counters[split + thread].taken; }

void* Worker::scratch(std::int64_t bytes) {
  Scratch& own = state_.scratch[index_];
  if (own.bytes < bytes) {
    own.memory.reset(::operator new(static_cast<std::size_t>(bytes), std::align_val_t{kLine}));
    own.bytes = bytes;
  }
  return own.memory.get();
}

namespace {

// noexcept: an exception that leaves a job ends the process with its message, on whichever thread it happens.
void take_part(PoolState& state, Worker& worker) noexcept {
  state.job(state.context, worker);
  worker.barrier();
}

void serve(PoolState& state, int index) {
  Worker worker(state, index, state.count);
  // Jobs are counted from the pool's creation, not from this thread's start: the first may be waiting already.
  for (std::uint32_t job = 1;; ++job) {
    state.start.wait_for(job, state.spins);
    if (state.job == nullptr) return;
    take_part(state, worker);
  }
}

// Ends and joins the threads that were started. No job may run.
void stop(PoolState& state) {
  state.job = nullptr;
  state.start.arrive();
  state.start.wake();
  for (std::thread& thread : state.threads) thread.join();
}

}  // namespace

int available_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());
}

Pool::Pool(int num_threads, bool can_oversubscribe) {
  const int cores = available_cores();
  if (num_threads < 1 || (num_threads > cores && !can_oversubscribe)) {
    throw std::invalid_argument("A pool of " + std::to_string(num_threads) + " threads was asked for; this process may use " +
                                std::to_string(cores) + " cores, so the number has to be from 1 to " + std::to_string(cores) + ".");
  }
  // With more threads than cores, whoever a thread is waiting for needs its core.
  state_ = std::make_unique<PoolState>(num_threads, num_threads > cores ? 0 : kSpins);
  try {
    for (int i = 1; i < num_threads; ++i) state_->threads.emplace_back([state = state_.get(), i] { serve(*state, i); });
  } catch (...) {
    // The system has no thread left; destroying those that run already would end the process.
    stop(*state_);
    throw;
  }
}

Pool::~Pool() {
  if (getpid() != state_->process) {
    // A forked child has none of the threads; joining them would wait forever.
    state_.release();
    return;
  }
  stop(*state_);
}

int Pool::num_threads() const { return state_->count; }

void Pool::run(void (*job)(void*, Worker&), void* context) {
  if (getpid() != state_->process) {
    throw std::logic_error("This pool belongs to process " + std::to_string(state_->process) + "; process " +
                           std::to_string(getpid()) + " was forked from it and has to make its own.");
  }
  std::lock_guard<std::mutex> turn(state_->running);
  state_->job = job;
  state_->context = context;
  state_->start.arrive();
  state_->start.wake();
  take_part(*state_, state_->caller);
}

}  // namespace kdecode
