// How the ranks of one machine give each other their parts of a step's values: through memory that all of them have mapped.
//
// A rank is a process, or a set of threads of one. Each has two places for its part in the segment, which exchanges use by turns:
// whoever writes its part of exchange n + 2 has waited for n + 1, which every rank publishes only after its last thread has read
// exchange n. So a part is written once, read where it is, and nobody ever waits for the readers.
//
// Every wait is bounded. A rank beats a counter as long as it is alive and not stopped, however long it computes. Whoever waits in
// vain writes into the segment which rank it waited for; from then on every wait of every rank returns at once, what is read after
// it means nothing, and the group is at its end.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "threads.h"

namespace kdecode {

inline constexpr int kMaxRanks = 64;

struct ExchangeSegment;

// Who waited for whom, in the exchange of this number since the group began.
struct ExchangeFailure {
  enum Reason : std::uint32_t {
    kSilent = 1,    // the awaited rank's counter stood still
    kLate = 2,      // it is alive and did not come
    kReported = 3,  // `fail`: somebody learnt otherwise that it is gone
  };
  Reason reason;
  int waiter;
  int awaited;
  std::uint32_t number;
};

// One rank's end of the segment.
class SharedExchange {
 public:
  // Bytes of the file that the ranks map.
  static std::int64_t segment_bytes(int size, std::int64_t part_bytes);

  // fd: a file of segment_bytes of zeros; it may be closed afterwards. part_bytes: the most that one part has, a multiple of 4096.
  // can_spin: whether every thread of every rank has a core of its own. silence_s: how long a rank may be awaited whose counter
  // stands still; patience_s: any rank. std::invalid_argument for a rank that has joined before, or another segment.
  SharedExchange(int fd, int rank, int size, std::int64_t part_bytes, bool can_spin, double silence_s, double patience_s);
  // Must not be called while a job uses it.
  ~SharedExchange();
  SharedExchange(const SharedExchange&) = delete;
  SharedExchange& operator=(const SharedExchange&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::int64_t part_bytes() const { return part_bytes_; }
  double silence_s() const { return silence_s_; }
  double patience_s() const { return patience_s_; }
  // Exchanges to which this rank has published its part.
  std::uint32_t number() const { return number_.load(std::memory_order_relaxed); }
  // A rank's counter, ten beats a second; that of a rank which has not joined stands still.
  std::uint32_t heartbeat(int rank) const;
  std::optional<ExchangeFailure> failure() const;
  // Ends the group because of a rank that is gone. The first failure stays.
  void fail(int awaited) { fail(ExchangeFailure::kReported, awaited, number()); }

  // For `Parts`. A rank's part of exchange `number`.
  char* part(int rank, std::uint32_t number) const;
  // One thread of the rank, once all have written: the part of exchange `number` is there.
  void publish(std::uint32_t number) noexcept;
  // Any thread: returns once every rank has published its part of exchange `number`, or the group has failed.
  void wait(std::uint32_t number) noexcept;

 private:
  class Heart;
  class Watch;

  bool has_failed() const;
  void fail(ExchangeFailure::Reason reason, int awaited, std::uint32_t number) noexcept;
  void sleep(std::uint32_t number) noexcept;

  const int rank_, size_;
  const std::int64_t part_bytes_;
  const int spins_;
  const double silence_s_, patience_s_;
  const pid_t process_;
  ExchangeSegment* segment_ = nullptr;
  std::atomic<std::uint32_t> number_{0};
  std::unique_ptr<Heart> heart_;
};

// One exchange as a thread of a job sees it. Every thread makes one; all must do the same with it, and with those after it.
class Parts {
 public:
  Parts(SharedExchange& exchange, Worker& worker) : exchange_(exchange), worker_(worker), number_(exchange.number()) {}

  int size() const { return exchange_.size(); }
  int rank() const { return exchange_.rank(); }

  // `bytes` into this rank's part, which its threads write together before publish().
  template <class T>
  T* mine(std::int64_t bytes = 0) const {
    return reinterpret_cast<T*>(exchange_.part(exchange_.rank(), number_) + bytes);
  }

  // A barrier, after which this rank's part is there. The parts of the exchange before must not be read any more.
  void publish() {
    worker_.barrier();
    if (worker_.index() == 0) exchange_.publish(number_);
  }

  // What follows may read every rank's part, until the next exchange is published.
  void wait() { exchange_.wait(number_); }

  void complete() {
    publish();
    wait();
  }

  template <class T>
  const T* of(int rank, std::int64_t bytes = 0) const {
    return reinterpret_cast<const T*>(exchange_.part(rank, number_) + bytes);
  }

 private:
  SharedExchange& exchange_;
  Worker& worker_;
  const std::uint32_t number_;
};

// Where the second of two arrays in one part begins, if the first has so many bytes.
inline std::int64_t behind(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace kdecode

#ifdef KD_NS
#include "vmath.h"

namespace kdecode::KD_NS {

// out[i] = bf16(sum over the ranks, in their order, of number at + i of the fp32 array `bytes` into their parts).
inline void sum_parts(const Parts& parts, std::int64_t bytes, std::int64_t at, int count, bf16* out) {
  constexpr int kBlock = 256;
  for (int start = 0; start < count; start += kBlock) {
    const int columns = count - start < kBlock ? count - start : kBlock;
    const float* part = parts.of<float>(0, bytes) + at + start;
    float sums[kBlock];
    for (int i = 0; i < columns; ++i) sums[i] = part[i];
    for (int rank = 1; rank < parts.size(); ++rank) {
      part = parts.of<float>(rank, bytes) + at + start;
      for (int i = 0; i < columns; ++i) sums[i] += part[i];
    }
    for (int i = 0; i < columns; ++i) out[start + i] = round_bf16(sums[i]);
  }
}

// body(row, rank, first column, columns) over what the ranks have of a [rows, size * width] value, in blocks.
template <class Body>
void split_parts(Worker& worker, std::int64_t rows, int size, std::int64_t width, Body&& body) {
  constexpr std::int64_t kBlock = 2048;
  const std::int64_t blocks = (width + kBlock - 1) / kBlock;
  worker.split(rows * size * blocks, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      const std::int64_t start = i % blocks * kBlock;
      const std::int64_t columns = width - start < kBlock ? width - start : kBlock;
      body(i / blocks / size, static_cast<int>(i / blocks % size), start, static_cast<int>(columns));
    }
  });
}

}  // namespace kdecode::KD_NS
#endif
