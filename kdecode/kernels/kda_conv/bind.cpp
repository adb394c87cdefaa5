#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>

#include "../common/bind.h"
#include "../common/kernel_table.h"

namespace kdecode {
namespace {

void run_convolve(const std::string& isa, std::uintptr_t raw, std::int64_t raw_stride, std::uintptr_t window, std::uintptr_t taps,
                  std::uintptr_t out, std::int64_t tokens, std::int64_t channels) {
  const KernelTable& table = kernel_table(isa);
  if (tokens < 1 || channels < 1 || raw_stride < channels) {
    throw std::invalid_argument("A convolution of " + std::to_string(tokens) + " tokens and " + std::to_string(channels) +
                                " channels in rows of " + std::to_string(raw_stride) +
                                ": tokens and channels have to be positive, and a row cannot be shorter than its channels.");
  }
  ConvolveArgs args;
  args.raw = reinterpret_cast<const bf16*>(raw);
  args.raw_stride = raw_stride;
  args.window = reinterpret_cast<bf16*>(window);
  args.taps = reinterpret_cast<const float*>(taps);
  args.out = reinterpret_cast<bf16*>(out);
  args.tokens = tokens;
  args.channels = channels;
  nb::gil_scoped_release unlocked;
  table.convolve(args);
}

}  // namespace

void bind_convolve(nb::module_& m) {
  m.attr("CONV_TAPS") = kConvTaps;
  m.def("convolve", run_convolve, nb::arg("isa"), nb::arg("raw"), nb::arg("raw_stride"), nb::arg("window"), nb::arg("taps"),
        nb::arg("out"), nb::arg("tokens"), nb::arg("channels"),
        "The short convolution and SiLU over one request's rows, and its window moved past them; on torch's OpenMP threads.");
}

}  // namespace kdecode
