#include "cpu.h"

#include <algorithm>
#include <cstring>

#include "../common/tile_dot.h"

namespace kdecode::KD_NS {
namespace {

// Smaller products than this take less time than waking the other threads (bytes of weights).
constexpr std::int64_t kMinParallelBytes = 128 * 1024;
// What a thread takes at a time, at least.
constexpr std::int64_t kMinChunkBytes = 32 * 1024;

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

// One tile of one group's matrix, times all rows of the group.
void multiply_tile(const LinearArgs& args, const LinearGroup& group, std::int64_t tile) {
  const bf16* x[kMaxRows];
  float y[kMaxRows * kTileRows];
  for (std::int64_t begin = 0; begin < group.count; begin += kMaxRows) {
    const int num_rows = static_cast<int>(std::min<std::int64_t>(kMaxRows, group.count - begin));
    const std::int64_t first = group.first + begin;
    for (int r = 0; r < num_rows; ++r) {
      x[r] = args.x + (args.row_index ? args.row_index[first + r] : first + r) * group.w.cols;
    }
    tile_dot(group.w, tile, num_rows, x, y);
    for (int r = 0; r < num_rows; ++r) store(args, group.w, tile, first + r, y + r * kTileRows);
  }
}

std::int64_t chunk_of(const Tiles& w) { return std::max<std::int64_t>(1, kMinChunkBytes / w.tile_bytes()); }

}  // namespace

void linear(const LinearArgs& args) {
  if (args.num_groups == 0) return;
  const Tiles& shape = args.groups[0].w;
  const std::int64_t num_tiles = shape.num_tiles(), total = args.num_groups * num_tiles;
  const std::int64_t chunk = chunk_of(shape);
#pragma omp parallel for schedule(dynamic, chunk) if (total * shape.tile_bytes() >= kMinParallelBytes)
  for (std::int64_t unit = 0; unit < total; ++unit) {
    multiply_tile(args, args.groups[unit / num_tiles], unit % num_tiles);
  }
}

void unpack(const Tiles& w, bf16* out) {
  const std::int64_t num_tiles = w.num_tiles(), chunk = chunk_of(w);
#pragma omp parallel for schedule(dynamic, chunk) if (num_tiles * w.tile_bytes() >= kMinParallelBytes)
  for (std::int64_t tile = 0; tile < num_tiles; ++tile) unpack_tile(w, tile, out + tile * kTileRows * w.cols);
}

}  // namespace kdecode::KD_NS
