#include "../common/bind_shared.h"
#include "cpu.h"

namespace kdecode {

void bind_mla_front(nb::module_& module) {
  nb::class_<MlaFrontArgs> cls(module, "MlaFrontArgs");
  cls.def(nb::init<>());
  bind_mix_norm(cls, &MlaFrontArgs::mix);
  cls.def_rw("in_proj", &MlaFrontArgs::in_proj);
  cls.def_rw("q_b", &MlaFrontArgs::q_b);
  cls.def_rw("w_uk", &MlaFrontArgs::w_uk);
  cls.def_rw("w_uv", &MlaFrontArgs::w_uv);
  bind_pointer(cls, "q_norm", &MlaFrontArgs::q_norm);
  bind_pointer(cls, "kv_norm", &MlaFrontArgs::kv_norm);
  bind_pointer(cls, "row_position", &MlaFrontArgs::row_position);
  bind_pointer(cls, "row_pages", &MlaFrontArgs::row_pages);
  bind_pointer(cls, "row_context", &MlaFrontArgs::row_context);
  bind_pointer(cls, "row_rotation", &MlaFrontArgs::row_rotation);
  bind_pointer(cls, "pages", &MlaFrontArgs::pages);
  bind_pointer(cls, "fp8_values", &MlaFrontArgs::fp8_values);
  cls.def_rw("fp8_scale", &MlaFrontArgs::fp8_scale);
  bind_pointer(cls, "mla_proj", &MlaFrontArgs::mla_proj);
  bind_pointer(cls, "query_norm", &MlaFrontArgs::query_norm);
  bind_pointer(cls, "mla_query", &MlaFrontArgs::mla_query);
  bind_pointer(cls, "mla_latent", &MlaFrontArgs::mla_latent);
  bind_pointer(cls, "attn_out", &MlaFrontArgs::attn_out);
  bind_pointer(cls, "split_stats", &MlaFrontArgs::split_stats);
  bind_pointer(cls, "split_sums", &MlaFrontArgs::split_sums);
  bind_exchange(cls);
  cls.def_rw("interleave", &MlaFrontArgs::interleave);
  cls.def_rw("latent_eps", &MlaFrontArgs::latent_eps);
  cls.def_rw("softmax_scale", &MlaFrontArgs::softmax_scale);
  cls.def_rw("has_gate", &MlaFrontArgs::has_gate);
  cls.def_rw("heads", &MlaFrontArgs::heads);
  cls.def_rw("kv_rank", &MlaFrontArgs::kv_rank);
  cls.def_rw("nope_dim", &MlaFrontArgs::nope_dim);
  cls.def_rw("rope_dim", &MlaFrontArgs::rope_dim);
  cls.def_rw("v_dim", &MlaFrontArgs::v_dim);
  cls.def_rw("page_rows", &MlaFrontArgs::page_rows);
  cls.def_rw("max_pages", &MlaFrontArgs::max_pages);
  cls.def_rw("split_tokens", &MlaFrontArgs::split_tokens);
  cls.def_rw("max_splits", &MlaFrontArgs::max_splits);
  module.attr("MAX_MLA_WIDTH") = kMaxMlaWidth;
  module.attr("MAX_MLA_HEAD_DIM") = kMaxMlaHeadDim;
}

}  // namespace kdecode
