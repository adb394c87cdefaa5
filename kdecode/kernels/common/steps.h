// THE list of native steps: name of the function in KD_NS and of its argument struct. Each op declares both in its cpu.h,
// defines the function in cpu.cpp and `void bind_<name>(nanobind::module_&)` in bind.cpp.
#pragma once

#include "../attn_out/cpu.h"
#include "../dense_mlp/cpu.h"
#include "../draft_context/cpu.h"
#include "../draft_insert/cpu.h"
#include "../embed/cpu.h"
#include "../exchange/cpu.h"
#include "../head/cpu.h"
#include "../kda_commit/cpu.h"
#include "../kda_front/cpu.h"
#include "../markov/cpu.h"
#include "../mla_front/cpu.h"
#include "../moe_front/cpu.h"
#include "../moe_tail/cpu.h"

#define KD_STEPS(X)                 \
  X(embed, EmbedArgs)               \
  X(kda_front, KdaFrontArgs)        \
  X(kda_commit, KdaCommitArgs)      \
  X(mla_front, MlaFrontArgs)        \
  X(attn_out, AttnOutArgs)          \
  X(dense_mlp, DenseMlpArgs)        \
  X(moe_front, MoeFrontArgs)        \
  X(moe_tail, MoeTailArgs)          \
  X(head, HeadArgs)                 \
  X(draft_context, DraftContextArgs) \
  X(draft_insert, DraftInsertArgs)  \
  X(markov, MarkovArgs)             \
  X(reduce_parts, ReducePartsArgs)
