// The residual mix of the standard forward, for any number of rows, on torch's OpenMP threads.
#pragma once

#include "../common/residual.h"

#ifdef KD_NS
namespace kdecode::KD_NS {

// args.mix_out, of all rows; nothing of the norm is read or written.
void mix_rows(const MixNorm& args);

}  // namespace kdecode::KD_NS
#endif
