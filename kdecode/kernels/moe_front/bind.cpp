#include "../common/bind_shared.h"
#include "cpu.h"

namespace kdecode {

void bind_moe_front(nb::module_& module) {
  nb::class_<MoeFrontArgs> cls(module, "MoeFrontArgs");
  cls.def(nb::init<>());
  bind_mix_norm(cls, &MoeFrontArgs::mix);
  bind_activation(cls, &MoeFrontArgs::activation);
  cls.def_rw("router", &MoeFrontArgs::router);
  cls.def_rw("latent_down", &MoeFrontArgs::latent_down);
  cls.def_rw("shared_gate_up", &MoeFrontArgs::shared_gate_up);
  bind_pointer(cls, "router_bias", &MoeFrontArgs::router_bias);
  bind_pointer(cls, "router_logits", &MoeFrontArgs::router_logits);
  bind_pointer(cls, "route_ids", &MoeFrontArgs::route_ids);
  bind_pointer(cls, "route_weights", &MoeFrontArgs::route_weights);
  bind_pointer(cls, "latent", &MoeFrontArgs::latent);
  bind_pointer(cls, "shared_product", &MoeFrontArgs::shared_product);
  bind_exchange(cls);
  cls.def_rw("routed_scaling", &MoeFrontArgs::routed_scaling);
  cls.def_rw("top_k", &MoeFrontArgs::top_k);
  cls.def_rw("is_renormalized", &MoeFrontArgs::is_renormalized);
}

}  // namespace kdecode
