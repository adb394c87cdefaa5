#include "../common/bind.h"
#include "cpu.h"

namespace kdecode {

void bind_kda_commit(nb::module_& module) {
  nb::class_<KdaCommitArgs> cls(module, "KdaCommitArgs");
  cls.def(nb::init<>());
  bind_pointer(cls, "kept", &KdaCommitArgs::kept);
  bind_pointer(cls, "window", &KdaCommitArgs::window);
  bind_pointer(cls, "state", &KdaCommitArgs::state);
  bind_pointer(cls, "keys", &KdaCommitArgs::keys);
  bind_pointer(cls, "decays", &KdaCommitArgs::decays);
  bind_pointer(cls, "corrections", &KdaCommitArgs::corrections);
  bind_pointer(cls, "samples", &KdaCommitArgs::samples);
  cls.def_rw("max_requests", &KdaCommitArgs::max_requests);
  cls.def_rw("heads", &KdaCommitArgs::heads);
  cls.def_rw("head_dim", &KdaCommitArgs::head_dim);
}

}  // namespace kdecode
