#include "probe.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>

#include "kernel_table.h"

namespace kdecode {
namespace {

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Runs a callable of one Worker& on the pool.
template <class Body>
void run_on(Pool& pool, Body&& body) {
  pool.run([](void* context, Worker& worker) { (*static_cast<std::remove_reference_t<Body>*>(context))(worker); }, &body);
}

constexpr std::int64_t kReadBytes = 64 * 1024;
// Of one claim of the read loop; long, because the hardware prefetcher restarts at each.
constexpr std::int64_t kStreamBytes = 512 * 1024;

// Addresses of the rows of x [num_rows, w.cols] as tile_dot reads them; prepared ones are put into `memory`.
void input_rows(const KernelTable& table, const Tiles& w, int num_rows, const bf16* x, char* memory, const void** rows) {
  for (int r = 0; r < num_rows; ++r) {
    rows[r] = x + r * w.cols;
    if (w.input_bytes() == 0) continue;
    table.prepare_row(w, x + r * w.cols, memory + r * w.input_bytes());
    rows[r] = memory + r * w.input_bytes();
  }
}

}  // namespace

std::int64_t pool_self_test(Pool& pool, int jobs, int phases, int splits, int items) {
  std::vector<std::atomic<std::int64_t>> taken(static_cast<std::size_t>(splits) * items);
  std::atomic<std::int64_t> faults{0};
  std::int64_t rounds = 0;
  for (int job = 0; job < jobs; ++job) {
    run_on(pool, [&](Worker& worker) {
      for (int phase = 0; phase < phases; ++phase) {
        const std::int64_t before = rounds + phase;
        auto* const own = static_cast<std::int64_t*>(worker.scratch((phase + 1) * 256));
        *own = before + worker.index();
        for (int split = 0; split < splits; ++split) {
          worker.split(items, 1 + split % 3, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) {
              if (taken[split * items + i].fetch_add(1, std::memory_order_relaxed) != before) faults.fetch_add(1);
            }
          });
        }
        worker.barrier();
        if (*own != before + worker.index()) faults.fetch_add(1);
        // Everything was taken once more, whoever took it; nobody may start the next phase before all have seen that.
        for (const auto& count : taken) {
          if (count.load(std::memory_order_relaxed) != before + 1) faults.fetch_add(1);
        }
        worker.barrier();
      }
    });
    rounds += phases;
  }
  return faults.load();
}

std::int64_t differing_tiles(const std::string& isa, const Tiles& w, const Tiles& other) {
  const KernelTable& table = kernel_table(isa);
  const std::int64_t num_tiles = w.num_tiles(), numbers = w.cols * kTileRows;
  std::int64_t differing = 0;
#pragma omp parallel for schedule(static) reduction(+ : differing)
  for (std::int64_t tile = 0; tile < num_tiles; ++tile) {
    // The last tile may have fewer rows; what it leaves is equal in both.
    std::vector<bf16> ours(numbers), theirs(numbers);
    table.unpack_tile(w, tile, ours.data());
    table.unpack_tile(other, tile, theirs.data());
    differing += ours != theirs;
  }
  return differing;
}

std::vector<double> time_stream(Pool& pool, const std::uint64_t* memory, std::int64_t num_bytes, int repeats) {
  const std::int64_t words = num_bytes / 8;
  std::atomic<std::uint64_t> sink{0};
  std::vector<double> seconds;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const double start = seconds_now();
    run_on(pool, [&](Worker& worker) {
      std::uint64_t sums[32] = {};
      worker.split(words, kStreamBytes / 8, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i + 32 <= end; i += 32) {
          for (int lane = 0; lane < 32; ++lane) sums[lane] ^= memory[i + lane];
        }
      });
      // The sums are used, so the compiler has to read the memory.
      for (const std::uint64_t sum : sums) sink.fetch_xor(sum, std::memory_order_relaxed);
    });
    seconds.push_back(seconds_now() - start);
  }
  return seconds;
}

std::vector<double> time_tile_dot(Pool& pool, const std::string& isa, const Tiles& w, int num_rows, const bf16* x, float* y,
                                  int repeats) {
  const KernelTable& table = kernel_table(isa);
  const std::int64_t chunk = std::max<std::int64_t>(1, kReadBytes / w.tile_bytes());
  std::vector<double> seconds;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const double start = seconds_now();
    run_on(pool, [&](Worker& worker) {
      const void* rows[kMaxRows];
      input_rows(table, w, num_rows, x, static_cast<char*>(worker.scratch(num_rows * w.input_bytes())), rows);
      worker.split(w.num_tiles(), chunk, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t tile = begin; tile < end; ++tile) table.tile_dot(w, tile, num_rows, rows, y + tile * num_rows * kTileRows);
      });
    });
    seconds.push_back(seconds_now() - start);
  }
  return seconds;
}

void tile_products(const std::string& isa, const Tiles& w, int num_rows, const bf16* x, float* y) {
  const KernelTable& table = kernel_table(isa);
  std::vector<char> memory(num_rows * w.input_bytes());
  const void* rows[kMaxRows];
  input_rows(table, w, num_rows, x, memory.data(), rows);
  for (std::int64_t tile = 0; tile < w.num_tiles(); ++tile) {
    table.tile_dot(w, tile, num_rows, rows, y + tile * num_rows * kTileRows);
  }
}

}  // namespace kdecode
