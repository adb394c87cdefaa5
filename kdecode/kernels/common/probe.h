// Measurements and self-tests of the native core, reachable from Python.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "native.h"
#include "threads.h"

namespace kdecode {

// Runs `jobs` jobs of `phases` phases each, every phase with `splits` unbarriered splits over `items` items, and returns how many
// items of all were not handed out exactly once, plus the phases that began before the one before it was complete, plus the times
// that a thread found something else in its scratch than it had put there.
std::int64_t pool_self_test(Pool& pool, int jobs, int phases, int splits, int items);

// Tiles of two matrices of one shape whose numbers differ in a bit, after both have been unpacked.
std::int64_t differing_tiles(const std::string& isa, const Tiles& w, const Tiles& other);

// Seconds of each of `repeats` passes in which all threads together read `num_bytes` at `memory` once, in order.
std::vector<double> time_stream(Pool& pool, const std::uint64_t* memory, std::int64_t num_bytes, int repeats);

// y [tiles, num_rows, 16] = W x for x [num_rows, cols], on this thread.
void tile_products(const std::string& isa, const Tiles& w, int num_rows, const bf16* x, float* y);

// Seconds of each of `repeats` products of all tiles of `w` with `num_rows` rows of x.
std::vector<double> time_tile_dot(Pool& pool, const std::string& isa, const Tiles& w, int num_rows, const bf16* x, float* y,
                                  int repeats);

}  // namespace kdecode
