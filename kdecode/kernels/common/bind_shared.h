// Bindings of the structs that argument structs of several ops hold: their fields become fields of the op's own struct.
#pragma once

#include "bind.h"
#include "exchange.h"
#include "residual.h"
#include "tile_ops.h"

namespace kdecode {

// Exposes `Struct::field` of the member `holder` of Args; a pointer as an integer.
template <class Args, class Struct, class T>
void bind_nested(nb::class_<Args>& cls, const char* name, Struct Args::*holder, T Struct::*field) {
  cls.def_prop_rw(
      name, [holder, field](const Args& args) { return args.*holder.*field; },
      [holder, field](Args& args, T value) { args.*holder.*field = value; });
}

template <class Args, class Struct, class T>
void bind_nested(nb::class_<Args>& cls, const char* name, Struct Args::*holder, T* Struct::*field) {
  cls.def_prop_rw(
      name, [holder, field](const Args& args) { return reinterpret_cast<std::uintptr_t>(args.*holder.*field); },
      [holder, field](Args& args, std::uintptr_t address) { args.*holder.*field = reinterpret_cast<T*>(address); });
}

template <class Args>
void bind_mix_norm(nb::class_<Args>& cls, MixNorm Args::*holder) {
  bind_nested(cls, "prefix", holder, &MixNorm::prefix);
  bind_nested(cls, "snapshots", holder, &MixNorm::snapshots);
  bind_nested(cls, "mix_weight", holder, &MixNorm::mix_weight);
  bind_nested(cls, "norm_weight", holder, &MixNorm::norm_weight);
  bind_nested(cls, "mix_out", holder, &MixNorm::mix_out);
  bind_nested(cls, "norm_out", holder, &MixNorm::norm_out);
  bind_nested(cls, "eps", holder, &MixNorm::eps);
  bind_nested(cls, "num_snapshots", holder, &MixNorm::num_snapshots);
  bind_nested(cls, "rows", holder, &MixNorm::rows);
  bind_nested(cls, "width", holder, &MixNorm::width);
}

template <class Args>
void bind_activation(nb::class_<Args>& cls, Activation Args::*holder) {
  bind_nested(cls, "is_situ", holder, &Activation::is_situ);
  bind_nested(cls, "beta", holder, &Activation::beta);
  bind_nested(cls, "linear_beta", holder, &Activation::linear_beta);
}

// The exchange stays alive with the arguments; without one this is the only rank.
template <class Args>
void bind_exchange(nb::class_<Args>& cls) {
  cls.def_prop_rw(
      "exchange", [](const Args& args) { return args.exchange; },
      [](Args& args, SharedExchange& exchange) { args.exchange = &exchange; }, nb::for_getter(nb::rv_policy::reference),
      nb::for_setter(nb::keep_alive<1, 2>()));
}

}  // namespace kdecode
