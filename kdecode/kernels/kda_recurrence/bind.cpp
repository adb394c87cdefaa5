#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>

#include "../common/bind.h"
#include "../common/kernel_table.h"

namespace kdecode {
namespace {

void run_delta_rule_chunks(const std::string& isa, std::uintptr_t qkv, std::uintptr_t decay, std::uintptr_t beta,
                           std::uintptr_t state, std::uintptr_t out, std::int64_t tokens, std::int64_t heads,
                           std::int64_t head_dim) {
  const KernelTable& table = kernel_table(isa);
  if (tokens < 1 || heads < 1 || head_dim < 1 || head_dim % kTileRows != 0) {
    throw std::invalid_argument("The delta rule of " + std::to_string(tokens) + " tokens, " + std::to_string(heads) +
                                " heads of " + std::to_string(head_dim) +
                                " channels: all have to be positive, the channels a multiple of 16.");
  }
  DeltaRuleArgs args;
  args.qkv = reinterpret_cast<const bf16*>(qkv);
  args.decay = reinterpret_cast<const float*>(decay);
  args.beta = reinterpret_cast<const float*>(beta);
  args.state = reinterpret_cast<float*>(state);
  args.out = reinterpret_cast<bf16*>(out);
  args.tokens = tokens;
  args.heads = heads;
  args.head_dim = head_dim;
  nb::gil_scoped_release unlocked;
  table.delta_rule_chunks(args);
}

}  // namespace

void bind_delta_rule_chunks(nb::module_& m) {
  m.def("delta_rule_chunks", run_delta_rule_chunks, nb::arg("isa"), nb::arg("qkv"), nb::arg("decay"), nb::arg("beta"),
        nb::arg("state"), nb::arg("out"), nb::arg("tokens"), nb::arg("heads"), nb::arg("head_dim"),
        "The delta rule over one request's rows, and its state moved past them; on torch's OpenMP threads.");
}

}  // namespace kdecode
