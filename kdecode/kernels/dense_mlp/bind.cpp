#include "../common/bind_shared.h"
#include "cpu.h"

namespace kdecode {

void bind_dense_mlp(nb::module_& module) {
  nb::class_<DenseMlpArgs> cls(module, "DenseMlpArgs");
  cls.def(nb::init<>());
  bind_mix_norm(cls, &DenseMlpArgs::mix);
  bind_activation(cls, &DenseMlpArgs::activation);
  cls.def_rw("gate_up", &DenseMlpArgs::gate_up);
  cls.def_rw("down", &DenseMlpArgs::down);
  bind_pointer(cls, "product", &DenseMlpArgs::product);
  bind_pointer(cls, "mlp_delta", &DenseMlpArgs::mlp_delta);
  bind_pointer(cls, "residual", &DenseMlpArgs::residual);
  bind_exchange(cls);
}

}  // namespace kdecode
