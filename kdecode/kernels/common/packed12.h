// bf16 weights in 12 bits, without loss: the format TileFormat::kPacked12 (see native.h) and the packing of a matrix.
//
// The high byte of a bf16 weight (its sign and seven bits of its exponent) takes few values within a tile: a table of 16 covers
// nearly all, and a list of corrections the rest.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "native.h"

namespace kdecode {

inline constexpr int kPacked12Lines = 4;  // of a block
inline constexpr int kPacked12Columns = 2 * kPacked12Lines;
inline constexpr int kPacked12BlockBytes = 192;
inline constexpr int kPacked12HeaderBytes = 64;

// First bytes of a tile.
struct Packed12Header {
  std::uint8_t table[16];
  std::uint64_t first;  // correction of the tile, in the matrix's list
  std::uint32_t count;
  std::uint8_t unused[36];
};
static_assert(sizeof(Packed12Header) == kPacked12HeaderBytes, "the blocks begin on a cache line");

// One tile: its table, its blocks and its own corrections.
struct Packed12Tile {
  Packed12Tile(const Tiles& w, std::int64_t tile) : num_blocks(w.cols / kPacked12Columns) {
    const std::uint8_t* const start = static_cast<const std::uint8_t*>(w.data) + tile * w.tile_bytes();
    Packed12Header header;
    std::memcpy(&header, start, sizeof(header));
    table = start;
    blocks = start + kPacked12HeaderBytes;
    next = w.corrections + header.first;
    end = next + header.count;
  }
  const std::uint8_t* table;
  const std::uint8_t* blocks;
  const std::uint32_t* next;  // correction
  const std::uint32_t* end;
  std::int64_t num_blocks;
};

// A correction: its block, then the line (2 bits) and the number in it (5 bits), then the true high byte.
inline std::uint32_t packed12_correction(std::int64_t block, int line, int number, int high) {
  return static_cast<std::uint32_t>(block << 15 | line << 13 | number << 8 | high);
}
inline std::int64_t corrected_block(std::uint32_t correction) { return correction >> 15; }
// `lines`: those of its block, decoded.
inline void correct(std::uint32_t correction, bf16* lines) {
  bf16& weight = lines[(correction >> 13 & 3) * 32 + (correction >> 8 & 31)];
  weight = static_cast<bf16>((weight & 0xff) | (correction & 0xff) << 8);
}
// Columns of the widest matrix: a correction has 17 bits for its block.
inline constexpr std::int64_t kPacked12MaxCols = std::int64_t{kPacked12Columns} << 17;

// Where byte `b` of a block's 64 low bytes of one pair of lines belongs: unpacking low and high bytes within 128-bit lanes puts
// the two lines in order.
inline int packed12_line(int b) { return b / 8 % 2; }
inline int packed12_number(int b) { return b / 16 * 8 + b % 8; }

// Packs `source` (kBf16, columns a multiple of 8) into `out` (source.num_tiles() tiles of kPacked12). Returns whether at most
// `max_corrections` weights are outside their tile's table; if so, `corrections` has them.
bool pack12(const Tiles& source, std::uint8_t* out, std::int64_t max_corrections, std::vector<std::uint32_t>& corrections);

}  // namespace kdecode
