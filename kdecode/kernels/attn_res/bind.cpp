#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>

#include "../common/bind.h"
#include "../common/kernel_table.h"

namespace kdecode {
namespace {

void run_mix_rows(const std::string& isa, std::uintptr_t sources, std::uintptr_t weight, std::uintptr_t out, int num_snapshots,
                  int rows, std::int64_t width, float eps) {
  const KernelTable& table = kernel_table(isa);
  if (num_snapshots < 0 || num_snapshots > kMaxSnapshots || rows < 0 || width < 1) {
    throw std::invalid_argument("A mix of " + std::to_string(num_snapshots) + " snapshots, " + std::to_string(rows) +
                                " rows and " + std::to_string(width) + " columns: there are at most " +
                                std::to_string(kMaxSnapshots) + " snapshots, and columns have to be positive.");
  }
  MixNorm args;
  args.snapshots = reinterpret_cast<const bf16*>(sources);
  args.prefix = args.snapshots + static_cast<std::int64_t>(num_snapshots) * rows * width;
  args.mix_weight = reinterpret_cast<const float*>(weight);
  args.mix_out = reinterpret_cast<bf16*>(out);
  args.eps = eps;
  args.num_snapshots = num_snapshots;
  args.rows = rows;
  args.width = width;
  nb::gil_scoped_release unlocked;
  table.mix_rows(args);
}

}  // namespace

void bind_mix_rows(nb::module_& m) {
  m.attr("MAX_SNAPSHOTS") = kMaxSnapshots;
  m.def("mix_rows", run_mix_rows, nb::arg("isa"), nb::arg("sources"), nb::arg("weight"), nb::arg("out"), nb::arg("num_snapshots"),
        nb::arg("rows"), nb::arg("width"), nb::arg("eps"),
        "The residual mix of `sources` [num_snapshots + 1, rows, width], on torch's OpenMP threads.");
}

}  // namespace kdecode
