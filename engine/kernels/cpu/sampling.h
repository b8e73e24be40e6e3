// The next token of each row of logits, by temperature, top_k, top_p and min_p, and log-probabilities.
//
// The rules are those of engine/draw.py: candidates rank by logit and then by the lower id; a row
// with top_k or top_p draws along that ranking, any other along the ids. Sums of weights are exact
// (fixed.h), so tiers, threads and ranges of the vocabulary share one answer. Knows no model.
#pragma once

#include <vector>

#include "api.h"
#include "ranking.h"
#include "team.h"

namespace paceline {

class Sampling {
 public:
  bool allocate(int vocab, int num_threads);
  // Needs a team of at most num_threads, with at least kSamplingPhases phases. 0 or an error.
  int choose(Team& team, const paceline_logits_view& logits, const paceline_choice* choices,
             const paceline_chosen& out);

 private:
  struct Block;  // rows worked on together
  struct Row;

  void scan(const Block& block, int row, int range);
  void sum(const Block& block, int row, int range);
  void finish(const Block& block, int row, Ranking& ranking);
  int draw(const Row& row, Ranking& ranking) const;
  int draw_along_ids(const Row& row) const;
  int draw_along_ranking(const Row& row, Ranking& ranking) const;
  void write_logprobs(const Row& row, int token, Ranking& ranking,
                      const paceline_chosen& out) const;
  void gather(const Row& row, float bound, Ranking& ranking) const;
  float bound_of_best(const Row& row, int64_t count, Ranking& ranking) const;
  Row row_of(const Block& block, int row);

  int max_vocab_ = 0;
  // by row of a block
  std::vector<float> maxima_;    // [chunks][lanes]
  std::vector<uint64_t> sums_;   // [2][chunks]: at the row's temperature; at 1 for log-probabilities
  std::vector<Ranking> rankings_;  // by thread
};

constexpr int kSamplingPhases = 3;

}  // namespace paceline
