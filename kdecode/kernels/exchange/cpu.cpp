#include "cpu.h"

#include <cstring>

#include "../common/tile_ops.h"

namespace kdecode::KD_NS {

void reduce_parts(const ReducePartsArgs& args, Worker& worker) {
  Parts parts(*args.exchange, worker);
  split_columns(worker, args.rows, args.width, [&](std::int64_t row, std::int64_t start, int columns) {
    const std::int64_t at = row * args.width + start;
    std::memcpy(parts.mine<float>() + at, args.part + at, columns * sizeof(float));
  });
  parts.complete();
  split_columns(worker, args.rows, args.width, [&](std::int64_t row, std::int64_t start, int columns) {
    const std::int64_t at = row * args.width + start;
    sum_parts(parts, 0, at, columns, args.out + at);
  });
}

}  // namespace kdecode::KD_NS
