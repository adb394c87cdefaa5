#include "cpu.h"

#include <cstring>

#include "../common/threads.h"

namespace kdecode::KD_NS {
namespace {

void copy_row(const bf16* in, std::int64_t width, bf16* out) { std::memcpy(out, in, width * sizeof(bf16)); }

void set_nan(std::int64_t width, bf16* out) {
  for (std::int64_t i = 0; i < width; ++i) out[i] = 0x7fc0;
}

// body(row, its token) for every row, split over the threads.
template <class Body>
void for_rows(const EmbedArgs& args, Worker& worker, Body&& body) {
  worker.split(args.rows, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row) body(row, std::int64_t{args.row_token[row]});
  });
}

// The rank whose part of the vocabulary has a token gives its row; all others read it there.
void embed_of_ranks(const EmbedArgs& args, Worker& worker) {
  const std::int64_t width = args.width;
  Parts parts(*args.exchange, worker);
  const std::int64_t own = parts.rank() * args.vocab;
  for_rows(args, worker, [&](std::int64_t row, std::int64_t token) {
    const bool is_own = token >= own && token < own + args.vocab;
    if (is_own) copy_row(args.table + (token - own) * width, width, parts.mine<bf16>() + row * width);
  });
  parts.complete();
  for_rows(args, worker, [&](std::int64_t row, std::int64_t token) {
    bf16* out = args.prefix + row * width;
    if (token < 0 || token >= parts.size() * args.vocab) return set_nan(width, out);
    copy_row(parts.of<bf16>(static_cast<int>(token / args.vocab)) + row * width, width, out);
  });
}

}  // namespace

void embed(const EmbedArgs& args, Worker& worker) {
  if (args.exchange != nullptr) return embed_of_ranks(args, worker);
  for_rows(args, worker, [&](std::int64_t row, std::int64_t token) {
    bf16* out = args.prefix + row * args.width;
    if (token < 0 || token >= args.vocab) return set_nan(args.width, out);
    copy_row(args.table + token * args.width, args.width, out);
  });
}

}  // namespace kdecode::KD_NS
