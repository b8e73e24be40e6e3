// The next token of each row of logits, by temperature, top_k, top_p and min_p, and log-probabilities.
//
// The rules are those of engine/draw.py: candidates rank by logit and then by the lower id; a row
// with top_k or top_p draws along that ranking, any other along the ids. Sums of weights are exact
// (fixed.h), so tiers, threads and ranges of the vocabulary share one answer. Masks (mask.h) are put
// on rows on the way. Knows no model.
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
  int choose(Team& team, const paceline_choice& call);

 private:
  struct Rule {  // for one row
    uint64_t seed, index;
    int64_t top_k;
    double top_p;
    float temperature, min_p;  // temperature 0: the best token
    int num_top, token, mask;  // -1: no log-probabilities; not given; none
  };
  struct Block;  // rows worked on together
  struct Row;

  void scan(const Block& block, int row, int range);
  void sum(const Block& block, int row, int range);
  void finish(const Block& block, int row, Ranking& ranking);
  int draw(const Row& row, Ranking& ranking) const;
  int draw_along_ids(const Row& row) const;
  int draw_along_ranking(const Row& row, Ranking& ranking) const;
  void write_logprobs(const Row& row, int token, Ranking& ranking,
                      const paceline_choice& out) const;
  void gather(const Row& row, float bound, Ranking& ranking) const;
  float bound_of_best(const Row& row, int64_t count, Ranking& ranking) const;
  Row row_of(const Block& block, int row);

  static Rule rule_of(const paceline_choice& call, int row);
  static bool is_ranked(const Rule& rule, int vocab);
  static bool is_random(const Rule& rule) { return rule.token < 0 && rule.temperature > 0; }
  static bool sums_at_temperature(const Rule& rule, int vocab);

  int max_vocab_ = 0;
  std::vector<Rule> rules_;      // of a block
  // by row of a block
  std::vector<float> maxima_;    // [chunks][lanes]
  std::vector<uint64_t> sums_;   // [2][chunks]: at the row's temperature; at 1 for log-probabilities
  std::vector<Ranking> rankings_;  // by thread
};

constexpr int kSamplingPhases = 3;

}  // namespace paceline
