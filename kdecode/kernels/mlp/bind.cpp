#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>

#include "../common/bind.h"
#include "../common/kernel_table.h"

namespace kdecode {
namespace {

void run_gated(const std::string& isa, std::uintptr_t product, std::uintptr_t out, std::int64_t rows, std::int64_t width,
               bool is_interleaved, bool is_situ, float beta, float linear_beta) {
  const KernelTable& table = kernel_table(isa);
  if (rows < 0 || width < 1 || (is_interleaved && width % kTileRows != 0)) {
    throw std::invalid_argument("A gated activation of " + std::to_string(rows) + " rows and " + std::to_string(width) +
                                " columns: the columns have to be positive, and a multiple of 16 if they are interleaved.");
  }
  GatedArgs args;
  args.product = reinterpret_cast<const bf16*>(product);
  args.out = reinterpret_cast<bf16*>(out);
  args.rows = rows;
  args.width = width;
  args.is_interleaved = is_interleaved;
  args.activation = {is_situ, beta, linear_beta};
  nb::gil_scoped_release unlocked;
  table.gated(args);
}

}  // namespace

void bind_gated(nb::module_& m) {
  m.def("gated", run_gated, nb::arg("isa"), nb::arg("product"), nb::arg("out"), nb::arg("rows"), nb::arg("width"),
        nb::arg("is_interleaved"), nb::arg("is_situ"), nb::arg("beta"), nb::arg("linear_beta"),
        "out = bf16(act(gate, up)) of the columns of `product`, on torch's OpenMP threads.");
}

}  // namespace kdecode
