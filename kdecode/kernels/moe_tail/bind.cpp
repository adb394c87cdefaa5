#include "../common/bind_shared.h"
#include "cpu.h"

namespace kdecode {

namespace {

// The list stays alive with the arguments.
void bind_list(nb::class_<MoeTailArgs>& cls, const char* name, const TileList* MoeTailArgs::*member) {
  cls.def_prop_rw(
      name, [member](const MoeTailArgs& args) { return args.*member; },
      [member](MoeTailArgs& args, const TileList& list) { args.*member = &list; }, nb::for_getter(nb::rv_policy::reference),
      nb::for_setter(nb::keep_alive<1, 2>()));
}

}  // namespace

void bind_moe_tail(nb::module_& module) {
  nb::class_<MoeTailArgs> cls(module, "MoeTailArgs");
  cls.def(nb::init<>());
  bind_activation(cls, &MoeTailArgs::activation);
  bind_list(cls, "expert_gate_up", &MoeTailArgs::expert_gate_up);
  bind_list(cls, "expert_down", &MoeTailArgs::expert_down);
  cls.def_rw("latent_up", &MoeTailArgs::latent_up);
  cls.def_rw("shared_down", &MoeTailArgs::shared_down);
  bind_pointer(cls, "expert_in", &MoeTailArgs::expert_in);
  bind_pointer(cls, "route_ids", &MoeTailArgs::route_ids);
  bind_pointer(cls, "route_weights", &MoeTailArgs::route_weights);
  bind_pointer(cls, "expert_product", &MoeTailArgs::expert_product);
  bind_pointer(cls, "expert_out", &MoeTailArgs::expert_out);
  bind_pointer(cls, "expert_sum", &MoeTailArgs::expert_sum);
  bind_pointer(cls, "latent_norm", &MoeTailArgs::latent_norm);
  bind_pointer(cls, "normed", &MoeTailArgs::normed);
  bind_pointer(cls, "routed", &MoeTailArgs::routed);
  bind_pointer(cls, "shared_product", &MoeTailArgs::shared_product);
  bind_pointer(cls, "shared", &MoeTailArgs::shared);
  bind_pointer(cls, "mlp_delta", &MoeTailArgs::mlp_delta);
  bind_pointer(cls, "prefix", &MoeTailArgs::prefix);
  bind_exchange(cls);
  bind_pointer(cls, "expert_part", &MoeTailArgs::expert_part);
  cls.def_rw("eps", &MoeTailArgs::eps);
  cls.def_rw("rows", &MoeTailArgs::rows);
  cls.def_rw("top_k", &MoeTailArgs::top_k);
  cls.def_rw("width", &MoeTailArgs::width);
}

}  // namespace kdecode
