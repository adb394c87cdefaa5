#include "cpu.h"

namespace kdecode::KD_NS {

namespace {
constexpr std::int64_t kMinParallelNumbers = 64 * 1024;
}  // namespace

void mix_rows(const MixNorm& args) {
  const std::int64_t numbers = args.rows * args.width * (args.num_snapshots + 1);
#pragma omp parallel for schedule(static) if (numbers >= kMinParallelNumbers)
  for (std::int32_t row = 0; row < args.rows; ++row) mix_row(args, row, args.mix_out + row * args.width);
}

}  // namespace kdecode::KD_NS
