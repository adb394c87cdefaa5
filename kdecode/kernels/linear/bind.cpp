#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "../common/bind.h"
#include "../common/kernel_table.h"

namespace kdecode {
namespace {

void run_linear(const std::string& isa, std::uintptr_t x, std::uintptr_t row_index, std::uintptr_t out, bool is_out_fp32,
                const std::vector<Tiles>& matrices, const std::vector<std::int64_t>& counts) {
  const KernelTable& table = kernel_table(isa);
  if (matrices.size() != counts.size()) throw std::invalid_argument("every matrix needs its number of rows");
  std::vector<LinearGroup> groups;
  groups.reserve(matrices.size());
  std::int64_t first = 0;
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    if (matrices[i].rows != matrices[0].rows || matrices[i].cols != matrices[0].cols || matrices[i].format != matrices[0].format) {
      throw std::invalid_argument("the matrices of a group must agree in rows, columns and format");
    }
    if (counts[i] > 0) groups.push_back({matrices[i], first, counts[i]});
    first += counts[i];
  }
  LinearArgs args;
  args.x = reinterpret_cast<const bf16*>(x);
  args.row_index = reinterpret_cast<const std::int64_t*>(row_index);
  args.out = reinterpret_cast<void*>(out);
  args.is_out_fp32 = is_out_fp32;
  args.groups = groups.data();
  args.num_groups = static_cast<std::int64_t>(groups.size());
  nb::gil_scoped_release unlocked;
  table.linear(args);
}

void run_unpack(const std::string& isa, const Tiles& matrix, std::uintptr_t out) {
  const KernelTable& table = kernel_table(isa);
  const Tiles copy = matrix;
  nb::gil_scoped_release unlocked;
  table.unpack(copy, reinterpret_cast<bf16*>(out));
}

}  // namespace

void bind_linear(nb::module_& m) {
  m.def("linear", run_linear, nb::arg("isa"), nb::arg("x"), nb::arg("row_index"), nb::arg("out"), nb::arg("is_out_fp32"),
        nb::arg("matrices"), nb::arg("counts"),
        "out[p] = W_g x[row_index[p]] for the counts[g] output rows p of every group g, on torch's OpenMP threads.");
  m.def("unpack", run_unpack, nb::arg("isa"), nb::arg("matrix"), nb::arg("out"),
        "The matrix in row-major bf16, dequantised if it is MXFP4, on torch's OpenMP threads.");
}

}  // namespace kdecode
