#include "../common/bind_shared.h"
#include "cpu.h"

namespace kdecode {

void bind_kda_front(nb::module_& module) {
  nb::class_<KdaFrontArgs> cls(module, "KdaFrontArgs");
  cls.def(nb::init<>());
  bind_mix_norm(cls, &KdaFrontArgs::mix);
  cls.def_rw("in_proj", &KdaFrontArgs::in_proj);
  cls.def_rw("f_b", &KdaFrontArgs::f_b);
  cls.def_rw("g_b", &KdaFrontArgs::g_b);
  bind_pointer(cls, "conv", &KdaFrontArgs::conv);
  bind_pointer(cls, "decay_scale", &KdaFrontArgs::decay_scale);
  bind_pointer(cls, "dt_bias", &KdaFrontArgs::dt_bias);
  bind_pointer(cls, "out_norm", &KdaFrontArgs::out_norm);
  bind_pointer(cls, "row_slot", &KdaFrontArgs::row_slot);
  bind_pointer(cls, "window", &KdaFrontArgs::window);
  bind_pointer(cls, "state", &KdaFrontArgs::state);
  bind_pointer(cls, "kda_proj", &KdaFrontArgs::kda_proj);
  bind_pointer(cls, "kda_qkv", &KdaFrontArgs::kda_qkv);
  bind_pointer(cls, "kda_decay", &KdaFrontArgs::kda_decay);
  bind_pointer(cls, "kda_beta", &KdaFrontArgs::kda_beta);
  bind_pointer(cls, "kda_out", &KdaFrontArgs::kda_out);
  bind_pointer(cls, "attn_out", &KdaFrontArgs::attn_out);
  bind_pointer(cls, "keys", &KdaFrontArgs::keys);
  bind_pointer(cls, "decays", &KdaFrontArgs::decays);
  bind_pointer(cls, "corrections", &KdaFrontArgs::corrections);
  bind_pointer(cls, "samples", &KdaFrontArgs::samples);
  cls.def_rw("gate_lower_bound", &KdaFrontArgs::gate_lower_bound);
  cls.def_rw("is_softplus_gate", &KdaFrontArgs::is_softplus_gate);
  cls.def_rw("heads", &KdaFrontArgs::heads);
  cls.def_rw("head_dim", &KdaFrontArgs::head_dim);
  cls.def_rw("gate_rank", &KdaFrontArgs::gate_rank);
  cls.def_rw("decay_rank", &KdaFrontArgs::decay_rank);
  module.attr("MAX_KDA_HEAD_DIM") = kMaxKdaHeadDim;
  module.attr("MAX_VERIFY_ROWS") = kMaxVerifyRows;
}

}  // namespace kdecode
