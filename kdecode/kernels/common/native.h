// Shared types of the native kernels. No torch, no Python: raw pointers and sizes.
#pragma once

#include <cstdint>
#include <vector>

namespace kdecode {

using bf16 = std::uint16_t;  // bit pattern of a bfloat16
using fp8 = std::uint8_t;    // bit pattern of an OCP E4M3 number

enum class TileFormat : std::int32_t { kBf16 = 0, kMxfp4 = 1, kPacked12 = 2, kInt4 = 3, kInt8 = 4 };

// A packed matrix W of `rows` output rows (padded with zeros to a multiple of 16) and `cols` input columns.
//
// kBf16:  data[(tile * (cols / 2) + pair) * 32 + row_in_tile * 2 + parity], bf16: a 64-byte line holds 16 rows of 2
//         neighbouring columns. cols is even.
// kMxfp4: codes[(tile * (cols / 32) + group) * 256 + block * 64 + lane * 2 + byte], a 64-byte line holds 16 rows of 8
//         columns: its 16-bit word at lane i = row_in_tile * 2 + parity carries, from the low nibble up, the E2M1 codes of
//         columns group * 32 + block * 8 + {0, 2, 4, 6} + parity of row_in_tile.
//         scales[(tile * (cols / 32) + group) * 16 + row_in_tile], E8M0. cols is a multiple of 32.
// kPacked12: kBf16 in 12 bits a weight. A tile is a header of 64 bytes, which begins with a table of 16 high bytes (packed12.h),
//         and cols / 8 blocks of 192 bytes. A block is 4 lines of kBf16: 64 low bytes of lines 0 and 1, 64 of lines 2 and 3, then
//         64 bytes of codes. Low byte b of a pair belongs to number b / 16 * 8 + b % 8 of its line b / 8 % 2; the index of its
//         high byte is in byte b of the codes, in the low nibble for lines 0 and 1, in the high one for lines 2 and 3.
//         corrections: weights whose high byte is not in the table; each tile's own are in the order of its blocks. cols is a
//         multiple of 8.
// kInt4:  the codes of kMxfp4, but they are whole numbers from -8 to 7 in two's complement, and
//         scales[((tile * (cols / 32) + group) * 16 + row_in_tile) * 2], bf16.
// kInt8:  the order of kBf16, a byte a weight: codes[(tile * (cols / 2) + pair) * 32 + row_in_tile * 2 + parity], whole numbers in
//         two's complement; scales as in kInt4. cols is a multiple of 32.
struct Tiles {
  const void* data = nullptr;
  const std::uint8_t* scales = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  TileFormat format = TileFormat::kBf16;
  const std::uint32_t* corrections = nullptr;

  std::int64_t num_tiles() const { return (rows + 15) / 16; }
  std::int64_t tile_bytes() const {
    if (format == TileFormat::kPacked12) return 64 + cols * 24;
    if (format == TileFormat::kInt4) return cols / 32 * 288;
    if (format == TileFormat::kInt8) return cols / 32 * 544;
    return format == TileFormat::kBf16 ? cols * 32 : cols / 32 * 272;
  }
  // Of a row of x as the kernels read it, where that is not the bf16 row itself: 16 bits a number, an fp32 step for 32 of them.
  std::int64_t input_bytes() const { return format == TileFormat::kInt8 ? cols / 32 * 68 : 0; }
};

// The same matrix of every expert of a layer; plans of all numbers of rows share one.
struct TileList {
  std::vector<Tiles> at;
};

inline constexpr int kTileRows = 16;
inline constexpr int kMaxRows = 64;     // rows of one native decode step
inline constexpr int kMaxTopK = 64;     // experts of one row
inline constexpr int kMaxExperts = 4096;

}  // namespace kdecode
