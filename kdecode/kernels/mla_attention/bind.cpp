#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>

#include "../common/bind.h"
#include "../common/kernel_table.h"

namespace kdecode {
namespace {

void check(const PromptAttentionArgs& args) {
  for (const int size : {args.nope_dim, args.rope_dim, args.v_dim}) {
    if (size < kTileRows || size % kTileRows != 0) {
      throw std::invalid_argument("Native attention takes sizes that are positive multiples of 16; one is " +
                                  std::to_string(size) + ".");
    }
  }
  const int widest = args.nope_dim + args.rope_dim > args.v_dim ? args.nope_dim + args.rope_dim : args.v_dim;
  if (widest > kMaxPromptWidth) {
    throw std::invalid_argument("Native attention takes queries and values of at most " + std::to_string(kMaxPromptWidth) +
                                " numbers; these have " + std::to_string(widest) + ".");
  }
  if (args.tokens < 1 || args.heads < 1 || args.start < 0) {
    throw std::invalid_argument("Native attention of " + std::to_string(args.tokens) + " tokens and " + std::to_string(args.heads) +
                                " heads after " + std::to_string(args.start) +
                                " tokens: tokens and heads have to be positive, what is before them cannot be negative.");
  }
}

void run_prompt_attention(const std::string& isa, const PromptAttentionArgs& args) {
  const KernelTable& table = kernel_table(isa);
  const PromptAttentionArgs copy = args;
  check(copy);
  nb::gil_scoped_release unlocked;
  table.prompt_attention(copy);
}

}  // namespace

void bind_prompt_attention(nb::module_& m) {
  using Args = PromptAttentionArgs;
  nb::class_<Args> cls(m, "PromptAttentionArgs");
  cls.def(nb::init<>());
  bind_pointer(cls, "query", &Args::query);
  bind_pointer(cls, "keys", &Args::keys);
  bind_pointer(cls, "rest", &Args::rest);
  bind_pointer(cls, "values", &Args::values);
  bind_pointer(cls, "out", &Args::out);
  cls.def_rw("query_step", &Args::query_step);
  cls.def_rw("keys_step", &Args::keys_step);
  cls.def_rw("rest_step", &Args::rest_step);
  cls.def_rw("values_step", &Args::values_step);
  cls.def_rw("out_step", &Args::out_step);
  cls.def_rw("tokens", &Args::tokens);
  cls.def_rw("start", &Args::start);
  cls.def_rw("heads", &Args::heads);
  cls.def_rw("nope_dim", &Args::nope_dim);
  cls.def_rw("rope_dim", &Args::rope_dim);
  cls.def_rw("v_dim", &Args::v_dim);
  cls.def_rw("scale", &Args::scale);
  m.attr("MAX_PROMPT_WIDTH") = kMaxPromptWidth;
  m.def("prompt_attention", run_prompt_attention, nb::arg("isa"), nb::arg("args"),
        "Causal attention of a prompt's rows over expanded keys and values, on torch's OpenMP threads.");
}

}  // namespace kdecode
