#include "../common/bind.h"
#include "cpu.h"

namespace kdecode {

void bind_draft_context(nb::module_& module) {
  nb::class_<DraftContextArgs> cls(module, "DraftContextArgs");
  cls.def(nb::init<>());
  cls.def_rw("proj", &DraftContextArgs::proj);
  bind_pointer(cls, "taps", &DraftContextArgs::taps);
  bind_pointer(cls, "tap_norms", &DraftContextArgs::tap_norms);
  bind_pointer(cls, "normed", &DraftContextArgs::normed);
  bind_pointer(cls, "norm", &DraftContextArgs::norm);
  bind_pointer(cls, "projected", &DraftContextArgs::projected);
  bind_pointer(cls, "context", &DraftContextArgs::context);
  cls.def_rw("eps", &DraftContextArgs::eps);
  cls.def_rw("rows", &DraftContextArgs::rows);
}

}  // namespace kdecode
