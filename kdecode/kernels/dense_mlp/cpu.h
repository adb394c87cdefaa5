// The MLP half of a dense layer: mix, norm, gated MLP, residual add.
#pragma once

#include "../common/exchange.h"
#include "../common/native.h"
#include "../common/residual.h"
#include "../common/tile_ops.h"

namespace kdecode {

class Worker;

struct DenseMlpArgs {
  MixNorm mix;
  Activation activation;
  Tiles gate_up;                 // [2 * F, width], 16 gate rows and 16 up rows alternating
  Tiles down;                    // [width, F]
  bf16* product = nullptr;       // scratch [rows, F]
  bf16* mlp_delta = nullptr;     // [rows, width]
  bf16* residual = nullptr;      // [rows, width], the prefix to add to (the buffer that mix.prefix reads)
  SharedExchange* exchange = nullptr;  // null: this is the only rank; else each has a part of F
};

}  // namespace kdecode

#ifdef KD_NS
namespace kdecode::KD_NS {

void dense_mlp(const DenseMlpArgs& args, Worker& worker);

}  // namespace kdecode::KD_NS
#endif
