#include "../common/bind_shared.h"
#include "cpu.h"

namespace kdecode {

void bind_reduce_parts(nb::module_& module) {
  nb::class_<ReducePartsArgs> cls(module, "ReducePartsArgs");
  cls.def(nb::init<>());
  bind_exchange(cls);
  bind_pointer(cls, "part", &ReducePartsArgs::part);
  bind_pointer(cls, "out", &ReducePartsArgs::out);
  cls.def_rw("width", &ReducePartsArgs::width);
  cls.def_rw("rows", &ReducePartsArgs::rows);
}

}  // namespace kdecode
