#include "../common/bind_shared.h"
#include "cpu.h"

namespace kdecode {

void bind_embed(nb::module_& module) {
  nb::class_<EmbedArgs> cls(module, "EmbedArgs");
  cls.def(nb::init<>());
  bind_pointer(cls, "row_token", &EmbedArgs::row_token);
  bind_pointer(cls, "table", &EmbedArgs::table);
  bind_pointer(cls, "prefix", &EmbedArgs::prefix);
  bind_exchange(cls);
  cls.def_rw("vocab", &EmbedArgs::vocab);
  cls.def_rw("width", &EmbedArgs::width);
  cls.def_rw("rows", &EmbedArgs::rows);
}

}  // namespace kdecode
