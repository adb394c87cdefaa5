#include "../common/bind.h"
#include "cpu.h"

namespace kdecode {

void bind_markov(nb::module_& module) {
  nb::class_<MarkovArgs> cls(module, "MarkovArgs");
  cls.def(nb::init<>());
  cls.def_rw("out", &MarkovArgs::out);
  bind_pointer(cls, "table", &MarkovArgs::table);
  bind_pointer(cls, "row_previous", &MarkovArgs::row_previous);
  bind_pointer(cls, "bias", &MarkovArgs::bias);
  cls.def_rw("rows", &MarkovArgs::rows);
}

}  // namespace kdecode
