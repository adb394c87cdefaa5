#include "exchange.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

namespace kdecode {
namespace {

constexpr int kLine = 128;   // bytes; two cache lines, which hardware prefetches in pairs
constexpr int kPage = 4096;
constexpr int kSpins = 4000;  // pauses before the first sleep
constexpr auto kBeat = std::chrono::milliseconds(100);
constexpr double kSlice = 0.05;   // seconds of one sleep, between two looks at the other ranks
constexpr double kStopped = 1.0;  // seconds from one look to the next that only a process which was stopped itself takes

struct alignas(kLine) RankLine {
  std::atomic<std::uint32_t> joined;
  std::atomic<std::uint32_t> published;  // exchanges, modulo 2^32
  std::atomic<std::uint32_t> heartbeat;
};

// Arrivals of all ranks at all exchanges, modulo 2^32, on which threads sleep. One count, so that a waiter sleeps once, and only
// the last to arrive wakes anybody: ranks may be many more than cores.
struct alignas(kLine) Arrivals {
  std::atomic<std::uint32_t> count;
  std::atomic<std::uint32_t> sleepers;
};

struct alignas(kLine) Fault {
  std::atomic<std::uint64_t> word;  // 0: none; else as in `pack`
};

// In memory of several processes, whose first state is all zeros.
static_assert(std::atomic<std::uint32_t>::is_always_lock_free && std::atomic<std::uint64_t>::is_always_lock_free);

std::uint64_t pack(const ExchangeFailure& failure) {
  return static_cast<std::uint64_t>(failure.number) << 32 | static_cast<std::uint64_t>(failure.reason) << 16 |
         static_cast<std::uint64_t>(failure.waiter) << 8 | static_cast<std::uint64_t>(failure.awaited);
}

ExchangeFailure unpack(std::uint64_t word) {
  const auto byte = [word](int shift) { return static_cast<std::uint32_t>(word >> shift & 0xff); };
  return {static_cast<ExchangeFailure::Reason>(byte(16)), static_cast<int>(byte(8)), static_cast<int>(byte(0)),
          static_cast<std::uint32_t>(word >> 32)};
}

// Nobody waits for a count 2^31 away.
bool has_reached(std::uint32_t count, std::uint32_t target) { return static_cast<std::int32_t>(count - target) >= 0; }

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Not FUTEX_PRIVATE: the word is in memory of several processes.
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t value) {
  const timespec slice{0, static_cast<long>(kSlice * 1e9)};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &slice, nullptr, 0);
}

void futex_wake_all(const std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

struct ExchangeSegment {
  Arrivals arrivals;
  Fault fault;
  RankLine ranks[kMaxRanks];
};

namespace {

constexpr std::int64_t kHeaderBytes = (sizeof(ExchangeSegment) + kPage - 1) / kPage * kPage;

void check_shape(int size, std::int64_t part_bytes) {
  if (size < 2 || size > kMaxRanks) {
    throw std::invalid_argument("An exchange of " + std::to_string(size) + " ranks was asked for; it has 2 to " +
                                std::to_string(kMaxRanks) + ".");
  }
  if (part_bytes < kPage || part_bytes % kPage != 0) {
    throw std::invalid_argument("Parts of " + std::to_string(part_bytes) + " bytes were asked for; they have a positive multiple of " +
                                std::to_string(kPage) + ".");
  }
}

}  // namespace

// The thread that beats a rank's counter. It does not survive a fork.
class SharedExchange::Heart {
 public:
  explicit Heart(std::atomic<std::uint32_t>& counter) : thread_([this, &counter] { beat(counter); }) {}

  ~Heart() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_stopping_ = true;
    }
    stop_.notify_all();
    thread_.join();
  }

 private:
  void beat(std::atomic<std::uint32_t>& counter) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!is_stopping_) {
      counter.fetch_add(1, std::memory_order_relaxed);
      stop_.wait_for(lock, kBeat);
    }
  }

  std::mutex mutex_;
  std::condition_variable stop_;
  bool is_stopping_ = false;
  std::thread thread_;
};

// What one waiting thread knows of the ranks that it waits for.
class SharedExchange::Watch {
 public:
  Watch(const SharedExchange& exchange, std::uint32_t number) : exchange_(exchange), number_(number) { begin(now()); }

  // The failure that follows from what it sees now, if there is one.
  std::optional<ExchangeFailure> look() {
    const double time = now();
    if (time - looked_ > kStopped) begin(time);
    looked_ = time;
    for (int rank = 0; rank < exchange_.size_; ++rank) {
      const RankLine& line = exchange_.segment_->ranks[rank];
      if (has_reached(line.published.load(std::memory_order_relaxed), number_ + 1)) continue;
      const std::uint32_t beats = line.heartbeat.load(std::memory_order_relaxed);
      if (beats != beats_[rank]) {
        beats_[rank] = beats;
        heard_[rank] = time;
      }
      if (time - heard_[rank] > exchange_.silence_s_) return ExchangeFailure{ExchangeFailure::kSilent, exchange_.rank_, rank, number_};
      if (time - began_ > exchange_.patience_s_) return ExchangeFailure{ExchangeFailure::kLate, exchange_.rank_, rank, number_};
    }
    return std::nullopt;
  }

 private:
  void begin(double time) {
    began_ = looked_ = time;
    for (int rank = 0; rank < exchange_.size_; ++rank) {
      beats_[rank] = exchange_.heartbeat(rank);
      heard_[rank] = time;
    }
  }

  const SharedExchange& exchange_;
  const std::uint32_t number_;
  double began_, looked_;
  std::uint32_t beats_[kMaxRanks];
  double heard_[kMaxRanks];
};

std::int64_t SharedExchange::segment_bytes(int size, std::int64_t part_bytes) {
  check_shape(size, part_bytes);
  return kHeaderBytes + 2 * size * part_bytes;
}

SharedExchange::SharedExchange(int fd, int rank, int size, std::int64_t part_bytes, bool can_spin, double silence_s, double patience_s)
    : rank_(rank),
      size_(size),
      part_bytes_(part_bytes),
      spins_(can_spin ? kSpins : 0),
      silence_s_(silence_s),
      patience_s_(patience_s),
      process_(getpid()) {
  const std::int64_t bytes = segment_bytes(size, part_bytes);
  if (rank < 0 || rank >= size) {
    throw std::invalid_argument("Rank " + std::to_string(rank) + " of " + std::to_string(size) + " does not exist.");
  }
  struct stat file;
  if (fstat(fd, &file) != 0 || file.st_size != bytes) {
    throw std::invalid_argument("The shared memory of " + std::to_string(size) + " ranks with parts of " +
                                std::to_string(part_bytes) + " bytes has " + std::to_string(bytes) +
                                " bytes; what was given is another group's, or no shared memory.");
  }
  void* memory = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {
    throw std::runtime_error("Shared memory of " + std::to_string(bytes) + " bytes could not be mapped: " + std::strerror(errno) + ".");
  }
  segment_ = static_cast<ExchangeSegment*>(memory);
  if (segment_->ranks[rank].joined.exchange(1) != 0) {
    munmap(memory, static_cast<std::size_t>(bytes));
    throw std::invalid_argument("Rank " + std::to_string(rank) + " has joined this exchange before.");
  }
  try {
    heart_ = std::make_unique<Heart>(segment_->ranks[rank].heartbeat);
  } catch (...) {
    munmap(memory, static_cast<std::size_t>(bytes));
    throw;
  }
}

SharedExchange::~SharedExchange() {
  // A forked child does not have the thread, and cannot join it.
  if (getpid() != process_) static_cast<void>(heart_.release());
  heart_.reset();
  munmap(segment_, static_cast<std::size_t>(segment_bytes(size_, part_bytes_)));
}

std::uint32_t SharedExchange::heartbeat(int rank) const {
  return segment_->ranks[rank].heartbeat.load(std::memory_order_relaxed);
}

bool SharedExchange::has_failed() const { return segment_->fault.word.load(std::memory_order_acquire) != 0; }

std::optional<ExchangeFailure> SharedExchange::failure() const {
  const std::uint64_t word = segment_->fault.word.load(std::memory_order_acquire);
  if (word == 0) return std::nullopt;
  return unpack(word);
}

void SharedExchange::fail(ExchangeFailure::Reason reason, int awaited, std::uint32_t number) noexcept {
  std::uint64_t none = 0;
  segment_->fault.word.compare_exchange_strong(none, pack({reason, rank_, awaited, number}));
  futex_wake_all(segment_->arrivals.count);
}

char* SharedExchange::part(int rank, std::uint32_t number) const {
  return reinterpret_cast<char*>(segment_) + kHeaderBytes + (std::int64_t{rank} * 2 + number % 2) * part_bytes_;
}

void SharedExchange::publish(std::uint32_t number) noexcept {
  Arrivals& arrivals = segment_->arrivals;
  // Of this rank's threads: none takes the number of the next exchange before it has waited for this one.
  number_.store(number + 1, std::memory_order_relaxed);
  segment_->ranks[rank_].published.store(number + 1, std::memory_order_relaxed);
  const std::uint32_t count = arrivals.count.fetch_add(1, std::memory_order_seq_cst) + 1;
  // A waiter announces itself before it looks at the count for the last time, and sleeps only while the count is what it saw.
  if (count != (number + 1) * static_cast<std::uint32_t>(size_)) return;
  if (arrivals.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(arrivals.count);
}

void SharedExchange::wait(std::uint32_t number) noexcept {
  const std::atomic<std::uint32_t>& count = segment_->arrivals.count;
  const std::uint32_t target = (number + 1) * static_cast<std::uint32_t>(size_);
  if (has_failed()) return;
  for (int i = 0; i <= spins_; ++i) {
    if (has_reached(count.load(std::memory_order_acquire), target)) return;
    pause();
  }
  sleep(number);
}

void SharedExchange::sleep(std::uint32_t number) noexcept {
  Arrivals& arrivals = segment_->arrivals;
  const std::uint32_t target = (number + 1) * static_cast<std::uint32_t>(size_);
  Watch watch(*this, number);
  arrivals.sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (!has_failed()) {
    const std::uint32_t seen = arrivals.count.load(std::memory_order_seq_cst);
    if (has_reached(seen, target)) break;
    futex_wait(arrivals.count, seen);
    if (const auto failure = watch.look()) fail(failure->reason, failure->awaited, failure->number);
  }
  arrivals.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace kdecode
