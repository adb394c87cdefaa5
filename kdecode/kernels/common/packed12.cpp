#include "packed12.h"

#include <algorithm>
#include <array>

namespace kdecode {
namespace {

constexpr int kLineValues = 32;

// The 16 most frequent high bytes of a tile; of equally frequent ones the lower.
std::array<std::uint8_t, 16> frequent_high_bytes(const bf16* lines, std::int64_t count) {
  std::array<std::int64_t, 256> histogram{};
  for (std::int64_t i = 0; i < count; ++i) ++histogram[lines[i] >> 8];
  std::array<std::uint8_t, 256> order;
  for (int byte = 0; byte < 256; ++byte) order[byte] = static_cast<std::uint8_t>(byte);
  std::partial_sort(order.begin(), order.begin() + 16, order.end(), [&](std::uint8_t a, std::uint8_t b) {
    return histogram[a] != histogram[b] ? histogram[a] > histogram[b] : a < b;
  });
  std::array<std::uint8_t, 16> table;
  std::copy(order.begin(), order.begin() + 16, table.begin());
  return table;
}

void pack_tile(const bf16* lines, std::int64_t blocks, std::uint8_t* out, std::vector<std::uint32_t>& corrections) {
  const auto table = frequent_high_bytes(lines, blocks * kPacked12Lines * kLineValues);
  std::array<std::int16_t, 256> code;
  code.fill(-1);
  for (int entry = 0; entry < 16; ++entry) code[table[entry]] = static_cast<std::int16_t>(entry);
  std::copy(table.begin(), table.end(), out);
  for (std::int64_t block = 0; block < blocks; ++block) {
    const bf16* const from = lines + block * kPacked12Lines * kLineValues;
    std::uint8_t* const to = out + kPacked12HeaderBytes + block * kPacked12BlockBytes;
    std::uint8_t* const codes = to + 128;
    std::fill(codes, codes + 64, std::uint8_t{0});
    std::array<std::uint32_t, kPacked12Lines * kLineValues> missing;
    int num_missing = 0;
    for (int half = 0; half < 2; ++half) {
      for (int byte = 0; byte < 64; ++byte) {
        const int line = half * 2 + packed12_line(byte), number = packed12_number(byte);
        const bf16 weight = from[line * kLineValues + number];
        const int high = weight >> 8;
        to[half * 64 + byte] = static_cast<std::uint8_t>(weight);
        if (code[high] < 0) missing[num_missing++] = packed12_correction(block, line, number, high);
        codes[byte] |= static_cast<std::uint8_t>((code[high] < 0 ? 0 : code[high]) << 4 * half);
      }
    }
    corrections.insert(corrections.end(), missing.begin(), missing.begin() + num_missing);
  }
}

}  // namespace

bool pack12(const Tiles& source, std::uint8_t* out, std::int64_t max_corrections, std::vector<std::uint32_t>& corrections) {
  const std::int64_t num_tiles = source.num_tiles(), blocks = source.cols / kPacked12Columns;
  const std::int64_t tile_bytes = kPacked12HeaderBytes + blocks * kPacked12BlockBytes;
  std::vector<std::vector<std::uint32_t>> by_tile(num_tiles);
#pragma omp parallel for schedule(static)
  for (std::int64_t tile = 0; tile < num_tiles; ++tile) {
    const bf16* const lines = static_cast<const bf16*>(source.data) + tile * source.cols * 16;
    std::fill_n(out + tile * tile_bytes, kPacked12HeaderBytes, std::uint8_t{0});
    pack_tile(lines, blocks, out + tile * tile_bytes, by_tile[tile]);
  }
  corrections.clear();
  for (std::int64_t tile = 0; tile < num_tiles; ++tile) {
    Packed12Header header;
    std::memcpy(&header, out + tile * tile_bytes, sizeof(header));
    header.first = corrections.size();
    header.count = static_cast<std::uint32_t>(by_tile[tile].size());
    std::memcpy(out + tile * tile_bytes, &header, sizeof(header));
    corrections.insert(corrections.end(), by_tile[tile].begin(), by_tile[tile].end());
  }
  return static_cast<std::int64_t>(corrections.size()) <= max_corrections;
}

}  // namespace kdecode
