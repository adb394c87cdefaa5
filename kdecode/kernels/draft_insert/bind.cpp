#include "../common/bind.h"
#include "cpu.h"

namespace kdecode {

void bind_draft_insert(nb::module_& module) {
  nb::class_<DraftInsertArgs> cls(module, "DraftInsertArgs");
  cls.def(nb::init<>());
  cls.def_rw("proj", &DraftInsertArgs::proj);
  bind_pointer(cls, "context", &DraftInsertArgs::context);
  bind_pointer(cls, "projected", &DraftInsertArgs::projected);
  bind_pointer(cls, "kv_norm", &DraftInsertArgs::kv_norm);
  bind_pointer(cls, "row_position", &DraftInsertArgs::row_position);
  bind_pointer(cls, "row_pages", &DraftInsertArgs::row_pages);
  bind_pointer(cls, "row_rotation", &DraftInsertArgs::row_rotation);
  bind_pointer(cls, "pages", &DraftInsertArgs::pages);
  cls.def_rw("latent_eps", &DraftInsertArgs::latent_eps);
  cls.def_rw("kv_rank", &DraftInsertArgs::kv_rank);
  cls.def_rw("rope_dim", &DraftInsertArgs::rope_dim);
  cls.def_rw("page_tokens", &DraftInsertArgs::page_tokens);
  cls.def_rw("max_pages", &DraftInsertArgs::max_pages);
  cls.def_rw("rows", &DraftInsertArgs::rows);
}

}  // namespace kdecode
