#include "cpu.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "../common/attention.h"

namespace kdecode::KD_NS {
namespace {

static_assert(kMaxPromptWidth <= kMaxQueryWidth, "a query has to fit its block");

constexpr int kBlocks = 8;                           // blocks of queries that share one pass over the keys
constexpr std::int64_t kUnitQueries = kBlocks * kLaneBlock;
constexpr int kAheadRows = 8;                        // how far ahead of the copies rows are asked for

// Some queries of one head. A round's keys and values are copied, so that they lie together in the second-level cache.
class PromptUnit {
 public:
  explicit PromptUnit(const PromptAttentionArgs& args) : args_(args), width_(args.nope_dim + args.rope_dim) {
    for (int t = 0; t < kTokenBlock; ++t) {
      key_[t] = keys_ + t * width_;
      value_[t] = values_ + t * args.v_dim;
    }
  }

  void run(std::int64_t head, std::int64_t first_query) {
    const std::int64_t queries = std::min(kUnitQueries, args_.tokens - first_query);
    set_queries(head, first_query, queries);
    for (auto& softmax : softmax_) softmax = Softmax();
    const std::int64_t end = args_.start + first_query + queries;
    for (std::int64_t first = 0; first < end; first += kTokenBlock) {
      const int count = static_cast<int>(std::min<std::int64_t>(kTokenBlock, end - first));
      copy_round(head, first, count);
      for (std::int64_t start = 0; start < queries; start += kLaneBlock) {
        const std::int64_t lanes = std::min<std::int64_t>(kLaneBlock, queries - start);
        const std::int64_t seen = args_.start + first_query + start + 1 - first;  // tokens of the round, by the first lane
        if (seen + lanes - 1 > 0) round(static_cast<int>(start / kLaneBlock), static_cast<int>(lanes), seen, count, first == 0);
      }
    }
    write(head, first_query, queries);
  }

 private:
  void set_queries(std::int64_t head, std::int64_t first_query, std::int64_t queries) {
    for (std::int64_t start = 0; start < queries; start += kLaneBlock) {
      const int lanes = static_cast<int>(std::min<std::int64_t>(kLaneBlock, queries - start));
      const bf16* query[kLaneBlock];
      for (int i = 0; i < lanes; ++i) query[i] = args_.query + (first_query + start + i) * args_.query_step + head * width_;
      queries_[start / kLaneBlock].set(query, lanes, width_);
    }
  }

  // The list of keys is filled up with the last one for the scores that are computed together.
  void copy_round(std::int64_t head, std::int64_t first, int count) {
    const bf16* const keys = args_.keys + first * args_.keys_step + head * args_.nope_dim;
    const bf16* const rest = args_.rest + first * args_.rest_step;
    const bf16* const values = args_.values + first * args_.values_step + head * args_.v_dim;
    const std::int64_t last = args_.start + args_.tokens - 1 - first;
    for (int t = 0; t < count; ++t) {
      const std::int64_t ahead = std::min<std::int64_t>(t + kAheadRows, last);
      for (int c = 0; c < args_.nope_dim; c += 32) __builtin_prefetch(keys + ahead * args_.keys_step + c);
      for (int c = 0; c < args_.v_dim; c += 32) __builtin_prefetch(values + ahead * args_.values_step + c);
      std::memcpy(keys_ + t * width_, keys + t * args_.keys_step, args_.nope_dim * sizeof(bf16));
      std::memcpy(keys_ + t * width_ + args_.nope_dim, rest + t * args_.rest_step, args_.rope_dim * sizeof(bf16));
      std::memcpy(values_ + t * args_.v_dim, values + t * args_.values_step, args_.v_dim * sizeof(bf16));
    }
    for (int t = count; t % kScoreTokens != 0; ++t) std::memcpy(keys_ + t * width_, key_[count - 1], width_ * sizeof(bf16));
  }

  // seen: tokens of the round that lane 0 may see; each lane sees one more than the one before it.
  void round(int block, int lanes, std::int64_t seen, int count, bool is_first) {
    queries_[block].scores(key_, (count + kScoreTokens - 1) / kScoreTokens * kScoreTokens, scores_);
    for (int i = 0; i < lanes; ++i) {
      for (std::int64_t t = std::max<std::int64_t>(seen + i, 0); t < count; ++t) scores_[t * kLaneBlock + i] = -__builtin_inff();
    }
    Softmax& softmax = softmax_[block];
    softmax.round(scores_, count, args_.scale);
    float* sums[kLaneBlock];
    for (int i = 0; i < lanes; ++i) sums[i] = sums_ + (block * kLaneBlock + i) * args_.v_dim;
    Ahead nothing;
    add_round({value_, count, scores_, softmax.kept, sums, is_first}, lanes, args_.v_dim, nothing);
  }

  void write(std::int64_t head, std::int64_t first_query, std::int64_t queries) const {
    for (std::int64_t i = 0; i < queries; ++i) {
      const float total = softmax_[i / kLaneBlock].total[i % kLaneBlock];
      const float* const sums = sums_ + i * args_.v_dim;
      bf16* const out = args_.out + (first_query + i) * args_.out_step + head * args_.v_dim;
      for (int c = 0; c < args_.v_dim; ++c) out[c] = round_bf16(sums[c] / total);
    }
  }

  const PromptAttentionArgs& args_;
  const int width_;
  const bf16* key_[kTokenBlock];
  const bf16* value_[kTokenBlock];
  Softmax softmax_[kBlocks];
  QueryBlock queries_[kBlocks];
  alignas(64) float scores_[kTokenBlock * kLaneBlock] = {};
  alignas(64) float sums_[kUnitQueries * kMaxPromptWidth];
  alignas(64) bf16 keys_[kTokenBlock * kMaxPromptWidth];
  alignas(64) bf16 values_[kTokenBlock * kMaxPromptWidth];
};

}  // namespace

void prompt_attention(const PromptAttentionArgs& args) {
  const std::int64_t units = (args.tokens + kUnitQueries - 1) / kUnitQueries;
#pragma omp parallel
  {
    const auto unit = std::make_unique<PromptUnit>(args);
    // A head's later queries see more and come first, so that the threads finish together.
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t i = 0; i < args.heads * units; ++i) unit->run(i / units, (units - 1 - i % units) * kUnitQueries);
  }
}

}  // namespace kdecode::KD_NS
