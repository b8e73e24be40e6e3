// Three phases for a block of rows: masks and maxima of ranges, sums over ranges, then a choice for
// each row.
// See sampling.h.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "mask.h"

namespace paceline {
namespace {

constexpr int kRows = 32;          // of a block
constexpr int kFewRows = 2;        // greedy ones: done before another thread is awake
constexpr int kChunk = 1024;       // tokens with one sum, and 16 maxima of 64 tokens each
constexpr int kRangeChunks = 12;   // chunks of a task
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kMaskBits = 32;      // of a word
// e^-33 and less weigh nothing in units of 2^-44.
constexpr float kDeepest = 33.0f;

int num_chunks(int vocab) { return (vocab + kChunk - 1) / kChunk; }

// SplitMix64, as in engine/random.py: 53 bits of uniform number `index` of a seed.
uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
uint64_t uniform53(uint64_t seed, uint64_t index) {
  constexpr uint64_t weyl = 0x9e3779b97f4a7c15u;
  return mix(mix(seed + weyl) + (index + 1) * weyl) >> 11;
}
// floor(u / 2^53 * total): always below total.
uint64_t share_of(uint64_t total, uint64_t u) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(total) * u) >> 53);
}

// Calls body(vector, lanes) over n floats; what is missing in the last vector is -inf.
template <class Body>
void each_vector(const float* x, int n, const Body& body) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) body(load(x + i));
  if (i == n) return;
  float rest[kLanes];
  std::fill(rest, rest + kLanes, -kInfinity);
  std::copy(x + i, x + n, rest);
  body(load(rest));
}

// Maxima lane by lane; a nan or +inf among x gives a nan in its lane.
F16 lane_maxima(const float* x, int n) {
  F16 best = splat(-kInfinity), spoilt = splat(0.0f);
  const F16 lowest = splat(-std::numeric_limits<float>::max()), zero = splat(0.0f);
  each_vector(x, n, [&](F16 v) {
    best = max(v, best);
    spoilt = fma(max(lowest, v), zero, spoilt);  // max keeps a nan in its second operand
  });
  return best + spoilt;
}

uint64_t sum_of_weights(const float* x, int n, float peak, float temperature, float min_p) {
  const F16 top = splat(peak), scale = splat(1.0f / temperature), least = splat(min_p);
  FixedSum sum;
  each_vector(x, n, [&](F16 v) { sum.add(zero_below(exp((v - top) * scale), least)); });
  return sum.total();
}

}  // namespace

bool Sampling::is_ranked(const Rule& c, int vocab) {
  return (c.top_k > 0 && c.top_k < vocab) || c.top_p < 1;
}

bool Sampling::sums_at_temperature(const Rule& c, int vocab) {
  return is_random(c) && !(c.top_k > 0 && c.top_k < vocab);
}

Sampling::Rule Sampling::rule_of(const paceline_choice& call, int row) {
  paceline_parameters p;
  std::memcpy(&p, static_cast<const char*>(call.parameters) + row * call.parameter_bytes, sizeof p);
  return {static_cast<uint64_t>(p.seed),
          call.given ? 0 : static_cast<uint64_t>(call.indices[row]),
          p.top_k,
          p.top_p,
          p.greedy ? 0.0f : p.temperature,
          p.min_p,
          static_cast<int>(std::min<int64_t>(p.num_logprobs, call.vocab)),
          call.given ? static_cast<int>(call.given[row]) : -1,
          call.mask_rows ? call.mask_rows[row] : -1};
}

struct Sampling::Block {
  paceline_choice call;
  const Rule* rules;
  int first, rows, chunks;
};

struct Sampling::Row {
  float* logits;
  int vocab, chunks;
  const Rule& rule;
  int index;  // in the call
  float* maxima;
  uint64_t* sums;      // at the temperature
  uint64_t* one_sums;  // at temperature 1
  float peak;          // after find_peak; nan or infinite if the row is broken

  void find_peak();
  // Whether the tokens of a chunk weigh nothing.
  bool is_deep(int chunk, float temperature) const {
    return (reduce_max(load(maxima + chunk * kLanes)) - peak) * (1.0f / temperature) <= -kDeepest;
  }
  int first_best() const;  // the lowest id with the peak
  int chunk_size(int chunk) const { return std::min(kChunk, vocab - chunk * kChunk); }
};

bool Sampling::allocate(int vocab, int num_threads) {
  max_vocab_ = vocab;
  const size_t chunks = num_chunks(vocab);
  maxima_.resize(kRows * chunks * kLanes);
  sums_.resize(kRows * chunks * 2);
  rules_.resize(kRows);
  rankings_.resize(num_threads);
  return std::all_of(rankings_.begin(), rankings_.end(),
                     [&](Ranking& ranking) { return ranking.allocate(vocab); });
}

int Sampling::choose(Team& team, const paceline_choice& call) {
  if (call.vocab < 1 || call.vocab > max_vocab_ || call.stride < call.vocab || call.rows < 0)
    return PACELINE_BAD_SHAPE;
  if (call.mask_rows && call.mask_words < (call.vocab + kMaskBits - 1) / kMaskBits)
    return PACELINE_BAD_SHAPE;
  for (int row = 0; row < call.rows; ++row)
    if (rule_of(call, row).num_top > call.max_top ||
        (call.given && (call.given[row] < 0 || call.given[row] >= call.vocab)) ||
        (call.mask_rows && (call.mask_rows[row] < -1 || call.mask_rows[row] >= call.num_masks)))
      return PACELINE_BAD_BATCH;
  for (int first = 0; first < call.rows; first += kRows) {
    const int rows = std::min(kRows, call.rows - first);
    for (int row = 0; row < rows; ++row) rules_[row] = rule_of(call, first + row);
    const Block block{call, rules_.data(), first, rows, num_chunks(call.vocab)};
    const int ranges = (block.chunks + kRangeChunks - 1) / kRangeChunks;
    const bool any_sums =
        std::any_of(block.rules, block.rules + rows, [&](const Rule& c) {
          return c.num_top >= 0 || sums_at_temperature(c, call.vocab);
        });
    const auto work = [this, block, ranges, any_sums](Phases& phases) {
      phases.each(block.rows * ranges, [&](int i) { scan(block, i / ranges, i % ranges); });
      phases.each(any_sums ? block.rows * ranges : 0,
                  [&](int i) { sum(block, i / ranges, i % ranges); });
      phases.each(block.rows, [&](int row) { finish(block, row, rankings_[phases.thread()]); });
    };
    if (any_sums || rows > kFewRows)
      team.run(work);
    else
      team.run_alone(work);
  }
  return 0;
}

Sampling::Row Sampling::row_of(const Block& block, int row) {
  const size_t chunks = block.chunks;
  Row r{block.call.logits + static_cast<size_t>(block.first + row) * block.call.stride,
        block.call.vocab,
        block.chunks,
        block.rules[row],
        block.first + row,
        &maxima_[row * chunks * kLanes],
        &sums_[row * chunks * 2],
        &sums_[row * chunks * 2 + chunks],
        0.0f};
  return r;
}

void Sampling::scan(const Block& block, int row, int range) {
  const Row r = row_of(block, row);
  const int last = std::min(r.chunks, (range + 1) * kRangeChunks), mask = r.rule.mask;
  const uint32_t* words = block.call.masks;
  if (mask >= 0) words += static_cast<size_t>(mask) * block.call.mask_words;
  for (int chunk = range * kRangeChunks; chunk < last; ++chunk) {
    float* x = r.logits + chunk * kChunk;
    if (mask >= 0) ban(x, r.chunk_size(chunk), words + chunk * (kChunk / kMaskBits));
    store(r.maxima + chunk * kLanes, lane_maxima(x, r.chunk_size(chunk)));
  }
}

void Sampling::Row::find_peak() {
  F16 best = splat(-kInfinity), spoilt = splat(0.0f);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const F16 v = load(maxima + chunk * kLanes);
    best = max(v, best);
    spoilt = fma(max(splat(-std::numeric_limits<float>::max()), v), splat(0.0f), spoilt);
  }
  peak = reduce_max(best) + reduce_add(spoilt);
}

void Sampling::sum(const Block& block, int row, int range) {
  Row r = row_of(block, row);
  const bool at_temperature = sums_at_temperature(r.rule, r.vocab), at_one = r.rule.num_top >= 0;
  if (!at_temperature && !at_one) return;
  r.find_peak();
  if (!std::isfinite(r.peak)) return;
  const float min_p = is_ranked(r.rule, r.vocab) ? 0.0f : r.rule.min_p;
  const int last = std::min(r.chunks, (range + 1) * kRangeChunks);
  for (int chunk = range * kRangeChunks; chunk < last; ++chunk) {
    const float* x = r.logits + chunk * kChunk;
    const int n = r.chunk_size(chunk);
    const auto sum_at = [&](float temperature, float least) {
      return r.is_deep(chunk, temperature) ? 0 : sum_of_weights(x, n, r.peak, temperature, least);
    };
    if (at_temperature) r.sums[chunk] = sum_at(r.rule.temperature, min_p);
    if (at_one) r.one_sums[chunk] = sum_at(1.0f, 0.0f);
  }
}

void Sampling::finish(const Block& block, int row, Ranking& ranking) {
  Row r = row_of(block, row);
  r.find_peak();
  int token = std::max(r.rule.token, 0);
  if (std::isfinite(r.peak) && r.rule.token < 0)
    token = is_random(r.rule) ? draw(r, ranking) : r.first_best();
  block.call.peaks[r.index] = r.peak;
  block.call.tokens[r.index] = token;
  if (r.rule.num_top >= 0) write_logprobs(r, token, ranking, block.call);
}

int Sampling::Row::first_best() const {
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (reduce_max(load(maxima + chunk * kLanes)) != peak) continue;
    const float* x = logits + chunk * kChunk;
    return chunk * kChunk + static_cast<int>(std::find(x, x + chunk_size(chunk), peak) - x);
  }
  return 0;
}

int Sampling::draw(const Row& row, Ranking& ranking) const {
  return is_ranked(row.rule, row.vocab) ? draw_along_ranking(row, ranking) : draw_along_ids(row);
}

// The chunk where the weight before exceeds the share, then the token in it.
int Sampling::draw_along_ids(const Row& row) const {
  const Rule& c = row.rule;
  uint64_t total = 0, before = 0;
  for (int chunk = 0; chunk < row.chunks; ++chunk) total += row.sums[chunk];
  const uint64_t target = share_of(total, uniform53(c.seed, c.index));
  int chunk = 0;
  while (before + row.sums[chunk] <= target) before += row.sums[chunk++];
  const F16 top = splat(row.peak), scale = splat(1.0f / c.temperature), least = splat(c.min_p);
  int found = -1, i = chunk * kChunk;
  each_vector(row.logits + i, row.chunk_size(chunk), [&](F16 v) {
    float weights[kLanes];
    store(weights, zero_below(exp((v - top) * scale), least));
    for (int j = 0; j < kLanes && found < 0; ++j) {
      before += fixed(weights[j]);
      if (before > target) found = i + j;
    }
    i += kLanes;
  });
  return found;
}

// A logit that exactly or nearly `count` tokens reach, and no fewer: as many sets of 64 tokens have
// a maximum like this. -inf where the sets are too few to tell.
float Sampling::bound_of_best(const Row& row, int64_t count, Ranking& ranking) const {
  const int sets = row.chunks * kLanes;
  if (count > sets / 2) return -kInfinity;
  float* maxima = ranking.spare();
  std::copy(row.maxima, row.maxima + sets, maxima);
  std::nth_element(maxima, maxima + count - 1, maxima + sets, std::greater<>());
  return maxima[count - 1];
}

void Sampling::gather(const Row& row, float bound, Ranking& ranking) const {
  ranking.clear();
  for (int chunk = 0; chunk < row.chunks; ++chunk)
    if (reduce_max(load(row.maxima + chunk * kLanes)) >= bound)
      ranking.gather(row.logits + chunk * kChunk, row.chunk_size(chunk), chunk * kChunk, bound);
}

int Sampling::draw_along_ranking(const Row& row, Ranking& ranking) const {
  const Rule& c = row.rule;
  const bool has_top_k = c.top_k > 0 && c.top_k < row.vocab;
  uint64_t total = 0;
  double depth = kDeepest;
  float bound = -kInfinity;
  if (has_top_k) {
    bound = bound_of_best(row, c.top_k, ranking);
  } else {
    for (int chunk = 0; chunk < row.chunks; ++chunk) total += row.sums[chunk];
    // All tokens of less than an equal part of what top_p leaves out are less than that together.
    const double part = (1 - c.top_p) * 0x1p-44 * static_cast<double>(total) / row.vocab;
    if (part > 0x1p-42) depth = std::min(depth, -std::log(part * 0.99));
  }
  const float deepest = row.peak - static_cast<float>(depth * c.temperature);
  gather(row, std::max(bound, std::nextafter(deepest, -kInfinity)), ranking);
  ranking.weigh(row.peak, c.temperature);

  uint64_t wanted = ranking.total(), last = 0;  // the weight of the candidates; the last one's key
  const auto end_at = [&](const Found& found) {
    wanted = found.before + ranking.weight(found.place);
    last = ranking.key(found.place);
  };
  if (has_top_k) {
    if (c.top_k < ranking.size()) {
      const Found found = ranking.by_count(c.top_k - 1);
      last = ranking.key(found.place);
      wanted = ranking.total_from(last);
    }
    total = wanted;
  }
  if (c.top_p < 1) {
    const double enough = std::ceil(std::max(c.top_p, 0.0) * static_cast<double>(total));
    const uint64_t least = std::max<uint64_t>(static_cast<uint64_t>(enough), 1);
    end_at(ranking.by_weight(std::min(least, wanted) - 1));
  }
  if (c.min_p > 0) {
    ranking.cut(last, std::min(c.min_p, 1.0f));
    wanted = ranking.total();
  }
  const uint64_t target = share_of(wanted, uniform53(c.seed, c.index));
  return ranking.id(ranking.by_weight(target).place);
}

void Sampling::write_logprobs(const Row& row, int token, Ranking& ranking,
                              const paceline_choice& out) const {
  const int count = row.rule.num_top;
  float* top = out.top + static_cast<size_t>(row.index) * out.max_top;
  int64_t* top_ids = out.top_ids + static_cast<size_t>(row.index) * out.max_top;
  if (!std::isfinite(row.peak)) {
    out.logprobs[row.index] = row.peak;
    std::fill(top, top + count, row.peak);
    std::fill(top_ids, top_ids + count, 0);
    return;
  }
  uint64_t total = 0;
  for (int chunk = 0; chunk < row.chunks; ++chunk) total += row.one_sums[chunk];
  const double log_sum = std::log(static_cast<double>(total)) - kFixedBits * std::log(2.0);
  const float normaliser = row.peak + static_cast<float>(log_sum);
  out.logprobs[row.index] = row.logits[token] - normaliser;
  if (count == 0) return;
  gather(row, bound_of_best(row, count, ranking), ranking);
  const uint64_t* keys = ranking.best(count);
  for (int i = 0; i < count; ++i) {
    top_ids[i] = id_of(keys[i]);
    top[i] = row.logits[top_ids[i]] - normaliser;
  }
}

}  // namespace paceline
