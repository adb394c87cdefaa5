// What one instruction set offers; `kernel_table.cpp` makes one a set, `isa.cpp` chooses.
#pragma once

#include <string>
#include <vector>

#include "../attn_res/cpu.h"
#include "../kda_conv/cpu.h"
#include "../kda_recurrence/cpu.h"
#include "../linear/cpu.h"
#include "../mla_attention/cpu.h"
#include "../mlp/cpu.h"
#include "native.h"
#include "program.h"
#include "vmath_probe.h"

namespace kdecode {

struct KernelTable {
  struct Step {
    const char* name;
    StepFunction function;
  };

  const char* isa;
  std::vector<Step> steps;
  void (*tile_dot)(const Tiles&, std::int64_t tile, int num_rows, const void* const* x, float* y);
  void (*prepare_row)(const Tiles&, const bf16* x, void* out);
  void (*unpack_tile)(const Tiles&, std::int64_t tile, bf16* out);
  void (*linear)(const LinearArgs&);
  void (*unpack)(const Tiles&, bf16* out);
  void (*gated)(const GatedArgs&);
  void (*convolve)(const ConvolveArgs&);
  void (*delta_rule_chunks)(const DeltaRuleArgs&);
  void (*prompt_attention)(const PromptAttentionArgs&);
  void (*mix_rows)(const MixNorm&);
  VmathProbe vmath_probe;

  // std::invalid_argument if there is no such step.
  StepFunction step(const std::string& name) const;
};

// Instruction sets that this build has and this processor supports, the best first.
std::vector<std::string> supported_isas();
// std::invalid_argument unless supported.
const KernelTable& kernel_table(const std::string& isa);

}  // namespace kdecode
