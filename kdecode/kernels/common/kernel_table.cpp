#include "kernel_table.h"

#include "steps.h"
#include "tile_dot.h"

#define KD_TEXT_OF(x) #x
#define KD_TEXT(x) KD_TEXT_OF(x)

namespace kdecode::KD_NS {

const KernelTable& table() {
#define KD_STEP(name, Args) {#name, [](const void* args, Worker& worker) { name(*static_cast<const Args*>(args), worker); }},
  static const KernelTable instance{KD_TEXT(KD_NS), {KD_STEPS(KD_STEP)}, tile_dot, prepare_row, unpack_tile, linear, unpack,
                                    gated, convolve, delta_rule_chunks, prompt_attention, mix_rows, vmath_probe};
#undef KD_STEP
  return instance;
}

}  // namespace kdecode::KD_NS
