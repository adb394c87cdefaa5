// Sources of a tile's lines for kernels that take them a piece at a time. Only for tile_dot.cpp: the instruction set's
// decode_block(block, table, lines) has to be there.
#pragma once

#include "packed12.h"

namespace kdecode::KD_NS {
namespace {

// Lines that are in memory as they are.
struct PlainLines {
  const bf16* lines;
  const bf16* take(std::int64_t first, std::int64_t) { return lines + first * 32; }
};

// Lines [first, first + count) of a packed tile, decoded and corrected; both numbers are multiples of 4. Calls for one tile have
// to be in the order of its lines: its corrections are used up.
inline void decode_in_order(Packed12Tile& tile, std::int64_t first, std::int64_t count, bf16* lines) {
  const std::int64_t begin = first / kPacked12Lines, end = (first + count) / kPacked12Lines;
  for (std::int64_t block = begin; block < end; ++block) {
    decode_block(tile.blocks + block * kPacked12BlockBytes, tile.table, lines + (block - begin) * kPacked12Lines * 32);
  }
  for (; tile.next < tile.end && corrected_block(*tile.next) < end; ++tile.next) {
    correct(*tile.next, lines + (corrected_block(*tile.next) - begin) * kPacked12Lines * 32);
  }
}

// Lines of a packed tile, decoded and corrected. Pieces have to be taken in order.
template <int kMaxLines>
class Packed12Lines {
 public:
  explicit Packed12Lines(const Packed12Tile& tile) : tile_(tile) {}

  // The result is valid until the next call.
  const bf16* take(std::int64_t first, std::int64_t count) {
    decode_in_order(tile_, first, count, buffer_);
    return buffer_;
  }

 private:
  Packed12Tile tile_;
  alignas(64) bf16 buffer_[kMaxLines * 32];
};

}  // namespace
}  // namespace kdecode::KD_NS
