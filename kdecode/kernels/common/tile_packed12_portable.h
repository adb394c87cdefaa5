// Packed bf16 for any processor: a block decoded to memory. Only for tile_dot.cpp.
#pragma once

#include "packed12.h"

namespace kdecode::KD_NS {
namespace {

inline void decode_block(const std::uint8_t* block, const std::uint8_t* table, bf16* lines) {
  for (int byte = 0; byte < 64; ++byte) {
    const int codes = block[128 + byte];
    bf16* const to = lines + packed12_line(byte) * 32 + packed12_number(byte);
    to[0] = static_cast<bf16>(block[byte] | table[codes & 15] << 8);
    to[64] = static_cast<bf16>(block[64 + byte] | table[codes >> 4] << 8);
  }
}

}  // namespace
}  // namespace kdecode::KD_NS
