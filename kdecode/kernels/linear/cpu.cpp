#include "cpu.h"

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <cstring>
#include <memory>

#include "../common/tile_dot.h"

namespace kdecode::KD_NS {
namespace {

// Smaller products than this take less time than waking the other threads (bytes of weights).
constexpr std::int64_t kMinParallelBytes = 128 * 1024;
// Weight bytes that a thread takes at a time: from what lets the hardware prefetcher run (it restarts at every claim) to what
// stays in the second-level cache, together with some rows of x, while all rows pass over it.
constexpr std::int64_t kMinClaimBytes = 64 * 1024;
constexpr std::int64_t kMaxClaimBytes = 384 * 1024;
constexpr std::int64_t kClaimsPerThread = 8;  // so that the threads finish together

bf16 to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>(bits >> 16 | 0x40);  // NaN stays one
  return static_cast<bf16>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

void store(const LinearArgs& args, const Tiles& w, std::int64_t tile, std::int64_t row, const float* y) {
  const std::int64_t column = tile * kTileRows, offset = row * w.rows + column;
  const int width = static_cast<int>(std::min<std::int64_t>(kTileRows, w.rows - column));
  if (args.is_out_fp32) {
    std::memcpy(static_cast<float*>(args.out) + offset, y, width * sizeof(float));
    return;
  }
  bf16* const out = static_cast<bf16*>(args.out) + offset;
  for (int i = 0; i < width; ++i) out[i] = to_bf16(y[i]);
}

// Rows of x as tile_dot reads them: the bf16 rows themselves, or what prepare_row made of them, once for all tiles.
class Inputs {
 public:
  explicit Inputs(const LinearArgs& args) : args_(args), bytes_(args.groups[0].w.input_bytes()) {
    if (bytes_ == 0) return;
    const LinearGroup& last = args.groups[args.num_groups - 1];
    const std::int64_t count = last.first + last.count;
    memory_.reset(new char[static_cast<std::size_t>(count * bytes_)]);
#pragma omp parallel for schedule(static) if (count * bytes_ >= kMinParallelBytes)
    for (std::int64_t row = 0; row < count; ++row) prepare_row(args.groups[0].w, plain(row), memory_.get() + row * bytes_);
  }

  const void* row(std::int64_t row) const { return bytes_ == 0 ? static_cast<const void*>(plain(row)) : memory_.get() + row * bytes_; }

 private:
  const bf16* plain(std::int64_t row) const {
    return args_.x + (args_.row_index ? args_.row_index[row] : row) * args_.groups[0].w.cols;
  }

  const LinearArgs& args_;
  const std::int64_t bytes_;
  std::unique_ptr<char[]> memory_;
};

// Tiles [begin, end) of one group's matrix, times all rows of the group, kMaxRows at a time.
void multiply_tiles(const LinearArgs& args, const Inputs& inputs, const LinearGroup& group, std::int64_t begin, std::int64_t end) {
  const void* x[kMaxRows];
  float y[kMaxRows * kTileRows];
  for (std::int64_t row = group.first; row < group.first + group.count; row += kMaxRows) {
    const int num_rows = static_cast<int>(std::min<std::int64_t>(kMaxRows, group.first + group.count - row));
    for (int r = 0; r < num_rows; ++r) x[r] = inputs.row(row + r);
    for (std::int64_t tile = begin; tile < end; ++tile) {
      tile_dot(group.w, tile, num_rows, x, y);
      for (int r = 0; r < num_rows; ++r) store(args, group.w, tile, row + r, y + r * kTileRows);
    }
  }
}

std::int64_t tiles_per_claim(const Tiles& w, std::int64_t total_tiles) {
#ifdef _OPENMP
  const std::int64_t threads = omp_get_max_threads();
#else
  const std::int64_t threads = 1;
#endif
  const std::int64_t even = total_tiles * w.tile_bytes() / (threads * kClaimsPerThread);
  return std::max<std::int64_t>(1, std::clamp(even, kMinClaimBytes, kMaxClaimBytes) / w.tile_bytes());
}

}  // namespace

void linear(const LinearArgs& args) {
  if (args.num_groups == 0) return;
  const Tiles& shape = args.groups[0].w;
  const Inputs inputs(args);
  const std::int64_t num_tiles = shape.num_tiles(), total = args.num_groups * num_tiles;
  const std::int64_t claim = tiles_per_claim(shape, total), claims_per_group = (num_tiles + claim - 1) / claim;
#pragma omp parallel for schedule(dynamic, 1) if (total * shape.tile_bytes() >= kMinParallelBytes)
  for (std::int64_t i = 0; i < args.num_groups * claims_per_group; ++i) {
    const std::int64_t begin = i % claims_per_group * claim;
    multiply_tiles(args, inputs, args.groups[i / claims_per_group], begin, std::min(num_tiles, begin + claim));
  }
}

void unpack(const Tiles& w, bf16* out) {
  const std::int64_t num_tiles = w.num_tiles(), claim = tiles_per_claim(w, num_tiles);
#pragma omp parallel for schedule(dynamic, claim) if (num_tiles * w.tile_bytes() >= kMinParallelBytes)
  for (std::int64_t tile = 0; tile < num_tiles; ++tile) unpack_tile(w, tile, out + tile * kTileRows * w.cols);
}

}  // namespace kdecode::KD_NS
