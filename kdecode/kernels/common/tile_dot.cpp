// The tile kernels. Each instruction set's header defines, in an anonymous namespace of KD_NS:
//
//   dot_bf16(lines, pairs, num_rows, x, y)             y = 16 rows of W times x, W in kBf16 lines
//   dot_mxfp4(codes, scales, groups, num_rows, x, y)   the same for MXFP4
//   dot_packed12(tile, num_rows, x, y)                 the same for kPacked12: the very sums of dot_bf16
//   dot_int4(codes, scales, groups, num_rows, x, y)    the same for kInt4
//   dot_int8(codes, scales, groups, num_rows, x, y)    the same for kInt8, x as round_inputs makes it
//   decode_block(block, table, lines)                  192 bytes of a packed tile -> 4 kBf16 lines, not corrected
//   decode_group(codes, lines)                         256 bytes of codes -> 16 kBf16 lines, not scaled
//
// An MXFP4 group's 32 products of a code with x are summed in fp32 and multiplied by the group's scale once. A scale byte s is
// the fp32 number whose exponent field is s: 2^(s - 127) for 1 <= s <= 254; packing refuses the other two.
#include "tile_dot.h"

#include <cstring>

#if defined(__AVX512BF16__)
#include "tile_dot_avx512.h"
#include "tile_packed12_avx512.h"
#include "tile_integer_avx512.h"
#elif defined(__AVX2__)
#include "tile_dot_avx2.h"
#include "tile_integer_avx2.h"
#else
#include "tile_dot_portable.h"
#include "tile_integer_portable.h"
#endif
#include "packed12_reader.h"

namespace kdecode::KD_NS {
namespace {

constexpr int kLineValues = 32;   // 16 rows of 2 columns
constexpr int kGroupColumns = 32;
constexpr int kGroupLines = 16;
constexpr int kGroupBytes = 256;

// lines [num_lines, 16, 2] -> out [16, 2 * num_lines] (a row every `stride` numbers)
void transpose_lines(const bf16* lines, std::int64_t num_lines, int num_rows, std::int64_t stride, bf16* out) {
  for (int row = 0; row < num_rows; ++row) {
    bf16* const to = out + row * stride;
    for (std::int64_t line = 0; line < num_lines; ++line) {
      std::memcpy(to + line * 2, lines + line * kLineValues + row * 2, 2 * sizeof(bf16));
    }
  }
}

// All lines of a tile, a piece at a time, so that its lines stay in the first-level cache for all 16 rows.
template <class Lines>
void transpose_pieces(Lines& lines, std::int64_t pairs, int num_rows, std::int64_t stride, bf16* out) {
  for (std::int64_t pair = 0; pair < pairs; pair += kGroupLines) {
    const std::int64_t count = pairs - pair < kGroupLines ? pairs - pair : kGroupLines;
    transpose_lines(lines.take(pair, count), count, num_rows, stride, out + pair * 2);
  }
}

void scale_lines(bf16* lines, const std::uint8_t* scales) {
  float factors[kLineValues];
  for (int i = 0; i < kLineValues; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(scales[i / 2]) << 23;
    std::memcpy(&factors[i], &bits, sizeof(bits));
  }
  for (int line = 0; line < kGroupLines; ++line) {
    for (int i = 0; i < kLineValues; ++i) {
      std::uint32_t bits = static_cast<std::uint32_t>(lines[line * kLineValues + i]) << 16;
      float value;
      std::memcpy(&value, &bits, sizeof(bits));
      value *= factors[i];
      std::memcpy(&bits, &value, sizeof(bits));
      lines[line * kLineValues + i] = static_cast<bf16>(bits >> 16);
    }
  }
}

// Addresses of rows by what is at them.
template <class T>
struct TypedRows {
  TypedRows(const void* const* x, int num_rows) {
    for (int r = 0; r < num_rows; ++r) at[r] = static_cast<const T*>(x[r]);
  }
  const T* at[kMaxRows];
};

}  // namespace

void tile_dot(const Tiles& w, std::int64_t tile, int num_rows, const void* const* x, float* y) {
  const std::int64_t groups = w.cols / kGroupColumns, first = tile * groups;
  const auto* const codes = static_cast<const std::uint8_t*>(w.data);
  if (w.format == TileFormat::kInt8) {
    const TypedRows<std::int16_t> rows(x, num_rows);
    return dot_int8(codes + first * integer_group_bytes(8), w.scales + first * 32, groups, num_rows, rows.at, y);
  }
  const TypedRows<bf16> rows(x, num_rows);
  if (w.format == TileFormat::kBf16) {
    const std::int64_t pairs = w.cols / 2;
    return dot_bf16(static_cast<const bf16*>(w.data) + tile * pairs * kLineValues, pairs, num_rows, rows.at, y);
  }
  if (w.format == TileFormat::kPacked12) return dot_packed12(Packed12Tile(w, tile), num_rows, rows.at, y);
  if (w.format == TileFormat::kInt4) {
    return dot_int4(codes + first * integer_group_bytes(4), w.scales + first * 32, groups, num_rows, rows.at, y);
  }
  dot_mxfp4(codes + first * kGroupBytes, w.scales + first * kTileRows, groups, num_rows, rows.at, y);
}

void prepare_row(const Tiles& w, const bf16* x, void* out) {
  round_inputs(x, w.cols, static_cast<std::int16_t*>(out));
}

void unpack_tile(const Tiles& w, std::int64_t tile, bf16* out) {
  const std::int64_t missing = (tile + 1) * kTileRows - w.rows;
  const int num_rows = missing > 0 ? static_cast<int>(kTileRows - missing) : kTileRows;
  const std::int64_t pairs = w.cols / 2;
  if (w.format == TileFormat::kBf16) {
    PlainLines lines{static_cast<const bf16*>(w.data) + tile * pairs * kLineValues};
    return transpose_pieces(lines, pairs, num_rows, w.cols, out);
  }
  if (w.format == TileFormat::kPacked12) {
    Packed12Lines<kGroupLines> lines(Packed12Tile(w, tile));
    return transpose_pieces(lines, pairs, num_rows, w.cols, out);
  }
  alignas(64) bf16 lines[kGroupLines * kLineValues];
  const std::int64_t groups = w.cols / kGroupColumns;
  for (std::int64_t group = 0; group < groups; ++group) {
    const std::int64_t index = tile * groups + group;
    const auto* const codes = static_cast<const std::uint8_t*>(w.data);
    if (w.format == TileFormat::kMxfp4) {
      decode_group(codes + index * kGroupBytes, lines);
      scale_lines(lines, w.scales + index * kTileRows);
    } else if (w.format == TileFormat::kInt4) {
      decode_int4(codes + index * integer_group_bytes(4), lines);
      scale_integers(lines, w.scales + index * 32);
    } else {
      decode_int8(codes + index * integer_group_bytes(8), lines);
      scale_integers(lines, w.scales + index * 32);
    }
    transpose_lines(lines, kGroupLines, num_rows, w.cols, out + group * kGroupColumns);
  }
}

}  // namespace kdecode::KD_NS
