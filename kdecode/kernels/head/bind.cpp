#include "../common/bind_shared.h"
#include "cpu.h"

namespace kdecode {

void bind_head(nb::module_& module) {
  nb::class_<HeadArgs> cls(module, "HeadArgs");
  cls.def(nb::init<>());
  bind_mix_norm(cls, &HeadArgs::mix);
  cls.def_rw("weight", &HeadArgs::weight);
  bind_pointer(cls, "logits", &HeadArgs::logits);
  bind_exchange(cls);
}

}  // namespace kdecode
