#include "../common/bind_shared.h"
#include "cpu.h"

namespace kdecode {

void bind_attn_out(nb::module_& module) {
  nb::class_<AttnOutArgs> cls(module, "AttnOutArgs");
  cls.def(nb::init<>());
  cls.def_rw("o_proj", &AttnOutArgs::o_proj);
  bind_pointer(cls, "attn_out", &AttnOutArgs::attn_out);
  bind_pointer(cls, "attn_delta", &AttnOutArgs::attn_delta);
  bind_pointer(cls, "prefix", &AttnOutArgs::prefix);
  bind_pointer(cls, "snapshot", &AttnOutArgs::snapshot);
  bind_exchange(cls);
  cls.def_rw("rows", &AttnOutArgs::rows);
}

}  // namespace kdecode
