// Attention of a group of query rows over one range of 256 positions, and the merge of ranges.
//
// A range is computed from scratch and ranges are merged in ascending order, so a row's result
// depends on its own sequence only: not on the rows computed with it, nor on who computed a range.
// Over KV of integers the queries and a range's weights are rounded to integers too, each from its
// row's own values, and sums are exact. Source of the merge: online softmax (Milakov and
// Gimelshein, 2018). Knows no blocks.
#pragma once

#include "fetch.h"
#include "kv_tile.h"

namespace paceline {

constexpr int kRange = 256;  // positions of a range: of a short sequence all, without a merge
constexpr int kRangeTiles = kRange / kLanes;
constexpr int kGroup = 6;    // rows that go through registers together
#if defined(PACELINE_AVX512)
constexpr int kTiles = 4;    // tiles of 16 positions or dims at a time
#else
constexpr int kTiles = 1;
#endif
// At this rate a range of keys and values is fetched while another is computed with.
template <class T>
constexpr int kFetchLines = (static_cast<int>(sizeof(T)) * kTiles + 1) / 2;
constexpr float kLog2E = 1.44269504088896341f;  // scores are powers of two
// The largest weight, and what the weights of a range add up to at the most: so their sums with
// integers of T stay below 2^31. To those of 8 bits the sum sets no bound.
constexpr float kMostWeight = 32767.0f;
template <class T>
constexpr float kWeightSum = sizeof(T) == 1 ? kMostWeight * kRange : 65400.0f;

// What elements T are multiplied with, and what the products add up to.
template <class T>
using Factor = std::conditional_t<is_scaled<T>, int16_t, float>;
template <class T>
using Sums = std::conditional_t<is_scaled<T>, I16, F16>;
template <class T>
inline Sums<T> no_sums() {
  return splat(std::conditional_t<is_scaled<T>, int32_t, float>{0});
}

// One query row: it sees positions first <= p < last.
struct QueryRow {
  const float* query;  // [head_dim], already scaled
  float* out;          // [head_dim]
  int first, last;
};

// Queries as integers: row r is integers[r * head_dim ..] times scales[r].
struct RoundedQueries {
  int16_t* integers;
  float* scales;
};

// The keys and values of a range. A tile outside first <= t < last is not looked at.
template <class T>
struct RangeTiles {
  const T* keys[kRangeTiles];
  const T* values[kRangeTiles];
  int first, last;
};

// What rows make of one range, or of all so far. Only rows that see a position have it.
struct RangeResult {
  float* partial;  // [rows][head_dim] sum of 2^(score - peak) * value
  float* peak;     // [rows] the largest score
  float* sum;      // [rows] sum of 2^(score - peak)

  static size_t floats(int rows, int head_dim) {
    return static_cast<size_t>(rows) * (head_dim + 2);
  }
  RangeResult(float* memory, int rows, int head_dim)
      : partial(memory), peak(memory + static_cast<size_t>(rows) * head_dim), sum(peak + rows) {}
};

// Scores and weights of a group over a range.
struct RangeScratch {
  float* scores;     // [kGroup][kRange]
  int16_t* weights;  // [kGroup][kRange] the scores' weights as integers

  static constexpr size_t kFloats = static_cast<size_t>(kGroup) * kRange * 3 / 2;
  explicit RangeScratch(float* memory)
      : scores(memory), weights(reinterpret_cast<int16_t*>(memory + kGroup * kRange)) {}
};

// scores[r][position] of `Tiles` tiles; units[r] is what the factors of query r count in. Here and
// below not inlined: in one large function GCC keeps the sums in memory.
template <class T, int Rows, int Tiles>
[[gnu::noinline]] void score_tiles(const Factor<T>* const* queries, const float* units,
                                   const T* const* keys, int head_dim, float* scores,
                                   Fetch& fetch) {
  Fetch ahead = fetch;  // in registers
  Sums<T> acc[Rows][Tiles];
  for (int r = 0; r < Rows; ++r)
    for (int t = 0; t < Tiles; ++t) acc[r][t] = no_sums<T>();
  for (int d = 0; d < head_dim; d += kPair<T>) {
    decltype(load_terms(keys[0])) k[Tiles];
    for (int t = 0; t < Tiles; ++t) k[t] = load_terms(keys[t] + d * kLanes);
    ahead.lines<kFetchLines<T>>();
    for (int r = 0; r < Rows; ++r) {
      const auto q = splat_terms(queries[r] + d);
      for (int t = 0; t < Tiles; ++t) acc[r][t] = add_products(acc[r][t], k[t], q);
    }
  }
  for (int t = 0; t < Tiles; ++t) {
    F16 scale = splat(1.0f);
    if constexpr (is_scaled<T>) scale = load(tile_scales(keys[t], head_dim));
    for (int r = 0; r < Rows; ++r)
      store(scores + r * kRange + t * kLanes, to_float(acc[r][t]) * (splat(units[r]) * scale));
  }
  fetch = ahead;
}

template <class T, int Rows>
inline void score_range(const Factor<T>* const* queries, const float* units,
                        const RangeTiles<T>& tiles, int head_dim, float* scores, Fetch& fetch) {
  int t = tiles.first;
  for (; t + kTiles <= tiles.last; t += kTiles)
    score_tiles<T, Rows, kTiles>(queries, units, tiles.keys + t, head_dim, scores + t * kLanes,
                                 fetch);
  const int left = tiles.last - t;
  scores += t * kLanes;
  const T* const* keys = tiles.keys + t;
  if constexpr (kTiles > 3)
    if (left == 3) return score_tiles<T, Rows, 3>(queries, units, keys, head_dim, scores, fetch);
  if constexpr (kTiles > 2)
    if (left == 2) return score_tiles<T, Rows, 2>(queries, units, keys, head_dim, scores, fetch);
  if constexpr (kTiles > 1)
    if (left == 1) score_tiles<T, Rows, 1>(queries, units, keys, head_dim, scores, fetch);
}

// partial[r] = units[r] * sum of weights[r][p] * value[p] for first <= p < last, in ascending order
// of p. Integers come in whole pairs: there the weight of a position outside is 0.
template <class T, int Rows, int Tiles>
[[gnu::noinline]] void weigh_values(const Factor<T>* weights, const float* units,
                                    const T* const* values, int first, int last, int head_dim,
                                    float* partial, Fetch& fetch) {
  constexpr int P = kPair<T>;
  first = first / P * P;
  for (int d = 0; d < head_dim; d += Tiles * kLanes) {
    Fetch ahead = fetch;
    Sums<T> acc[Rows][Tiles];
    for (int r = 0; r < Rows; ++r)
      for (int t = 0; t < Tiles; ++t) acc[r][t] = no_sums<T>();
    for (int p = first; p < last;) {
      const int end = p / kLanes * kLanes + kLanes < last ? p / kLanes * kLanes + kLanes : last;
      const T* value = values[p / kLanes] + static_cast<size_t>(p % kLanes) * head_dim + d * P;
      for (; p < end; p += P, value += head_dim * P) {
        decltype(load_terms(value)) v[Tiles];
        for (int t = 0; t < Tiles; ++t) v[t] = load_terms(value + t * kLanes * P);
        ahead.lines<kFetchLines<T>>();
        for (int r = 0; r < Rows; ++r) {
          const auto w = splat_terms(weights + r * kRange + p);
          for (int t = 0; t < Tiles; ++t) acc[r][t] = add_products(acc[r][t], v[t], w);
        }
      }
    }
    for (int r = 0; r < Rows; ++r)
      for (int t = 0; t < Tiles; ++t)
        store(partial + static_cast<size_t>(r) * head_dim + d + t * kLanes,
              to_float(acc[r][t]) * splat(units[r]));
    fetch = ahead;
  }
}

template <class T, int Rows>
inline void weigh_range(const Factor<T>* weights, const float* units, const T* const* values,
                        int first, int last, int head_dim, float* partial, Fetch& fetch) {
  if (head_dim % (kTiles * kLanes) == 0)
    return weigh_values<T, Rows, kTiles>(weights, units, values, first, last, head_dim, partial,
                                         fetch);
  weigh_values<T, Rows, 1>(weights, units, values, first, last, head_dim, partial, fetch);
}

// What rows see of a range, relative to its start, and the tiles that all of them see in full.
template <int Rows>
struct Seen {
  int firsts[Rows], lasts[Rows];
  int first_full = 0, last_full = kRangeTiles;

  Seen(const QueryRow* rows, int start) {
    for (int r = 0; r < Rows; ++r) {
      firsts[r] = rows[r].first > start ? rows[r].first - start : 0;
      lasts[r] = rows[r].last - start < kRange ? rows[r].last - start : kRange;
      const int first = (firsts[r] + kLanes - 1) / kLanes, last = lasts[r] / kLanes;
      first_full = first > first_full ? first : first_full;
      last_full = last < last_full ? last : last_full;
    }
  }
  // Lanes of tile t that row r does not see become `fill`.
  F16 masked(F16 a, int r, int t, float fill) const {
    const auto clamped = [](int i) { return i < 0 ? 0 : i > kLanes ? kLanes : i; };
    return keep(a, clamped(firsts[r] - t * kLanes), clamped(lasts[r] - t * kLanes), fill);
  }
};

// Scores become weights: 2^(score - peak) over the positions that their row sees, times the scale
// of the position's value, and 0 elsewhere, whatever lies there. Rows side by side, since one alone
// is all latency. top, total: of the weights, where there are scales.
template <class T, int Rows>
[[gnu::noinline]] void soften(float* scores, const RangeTiles<T>& tiles, int head_dim,
                              const Seen<Rows>& seen, float* peak, float* sum, float* top,
                              float* total) {
  F16 tops[Rows], sums[Rows], totals[Rows], peaks[Rows];
  // body(tile, whether rows see only part of it) for all tiles
  const auto each_tile = [&](const auto& body) {
    for (int t = tiles.first; t < tiles.last; ++t)
      if (t >= seen.first_full && t < seen.last_full)
        body(t, std::false_type());
      else
        body(t, std::true_type());
  };
  for (int r = 0; r < Rows; ++r) tops[r] = splat(-INFINITY), sums[r] = totals[r] = splat(0.0f);
  each_tile([&](int t, auto partly) {
    for (int r = 0; r < Rows; ++r) {
      const F16 s = load(scores + r * kRange + t * kLanes);
      tops[r] = max(tops[r], partly ? seen.masked(s, r, t, -INFINITY) : s);
    }
  });
  for (int r = 0; r < Rows; ++r) {
    peaks[r] = splat(peak[r] = reduce_max(tops[r]));
    tops[r] = splat(0.0f);
  }
  each_tile([&](int t, auto partly) {
    F16 scale = splat(1.0f);
    if constexpr (is_scaled<T>) scale = load(tile_scales(tiles.values[t], head_dim));
    for (int r = 0; r < Rows; ++r) {
      float* s = scores + r * kRange + t * kLanes;
      const F16 power = exp2(load(s) - peaks[r]);
      F16 weight = partly ? seen.masked(power, r, t, 0.0f) : power;
      sums[r] = sums[r] + weight;
      if constexpr (is_scaled<T>) {
        weight = partly ? seen.masked(power * scale, r, t, 0.0f) : power * scale;
        tops[r] = max(tops[r], weight);
        totals[r] = totals[r] + weight;
      }
      store(s, weight);
    }
  });
  for (int r = 0; r < Rows; ++r) {
    sum[r] = reduce_add(sums[r]);
    if constexpr (is_scaled<T>) top[r] = reduce_max(tops[r]), total[r] = reduce_add(totals[r]);
  }
}

// Weights as integers times units[r], such that they add up to what they did; a row that met a nan
// gets zeros times nan.
template <class T, int Rows>
inline void round_weights(const float* weights, int first, int last, const float* top,
                          const float* total, int16_t* out, float* units) {
  F16 inverse[Rows];
  I16 sums[Rows];
  bool some[Rows];
  for (int r = 0; r < Rows; ++r) {
    const float unit = std::max(top[r] * (1.0f / kMostWeight), total[r] * (1.0f / kWeightSum<T>));
    some[r] = total[r] - total[r] == 0.0f && unit > 1e-37f;
    inverse[r] = splat(some[r] ? 1.0f / unit : 0.0f);
    sums[r] = splat(0);
  }
  for (int t = first; t < last; ++t)
    for (int r = 0; r < Rows; ++r) {
      const int at = r * kRange + t * kLanes;
      const I16 whole = round_to_int(some[r] ? load(weights + at) * inverse[r] : splat(0.0f));
      sums[r] = sums[r] + whole;
      store_words(out + at, whole);
    }
  for (int r = 0; r < Rows; ++r)
    units[r] = some[r] ? total[r] / reduce_add(to_float(sums[r])) : total[r] * 0.0f;
}

// The range from `start` on for a group of rows. False if none of them sees any of it.
template <class T, int Rows>
bool attend_group(const QueryRow* rows, const RoundedQueries& rounded, RangeTiles<T> tiles,
                  int start, int head_dim, const RangeScratch& scratch, const RangeResult& out,
                  Fetch& fetch) {
  int first = kRange, last = 0;  // of the whole group, relative to the range
  const Seen<Rows> seen(rows, start);
  for (int r = 0; r < Rows; ++r) {
    if (seen.firsts[r] >= seen.lasts[r]) continue;
    first = seen.firsts[r] < first ? seen.firsts[r] : first;
    last = seen.lasts[r] > last ? seen.lasts[r] : last;
  }
  if (first >= last) return false;
  tiles.first = first / kLanes;
  tiles.last = (last + kLanes - 1) / kLanes;
  const Factor<T>* queries[Rows];
  float units[Rows], top[Rows], total[Rows];
  for (int r = 0; r < Rows; ++r) {
    if constexpr (is_scaled<T>) {
      queries[r] = rounded.integers + static_cast<size_t>(r) * head_dim;
      units[r] = rounded.scales[r] * kLog2E;
    } else {
      queries[r] = rows[r].query;
      units[r] = kLog2E;
    }
  }
  float* scores = scratch.scores;
  score_range<T, Rows>(queries, units, tiles, head_dim, scores, fetch);
  soften<T, Rows>(scores, tiles, head_dim, seen, out.peak, out.sum, top, total);
  const Factor<T>* weights;
  if constexpr (is_scaled<T>) {
    round_weights<T, Rows>(scores, tiles.first, tiles.last, top, total, scratch.weights, units);
    weights = scratch.weights;
  } else {
    for (float& unit : units) unit = 1.0f;
    weights = scores;
  }
  weigh_range<T, Rows>(weights, units, tiles.values, first, last, head_dim, out.partial, fetch);
  return true;
}

// Adds what `rows` (as many as lanes, at most) made of the range from `start` on to what they made
// of those before. A row's own first range is its beginning.
inline void merge(const QueryRow* rows, int num_rows, int start, int head_dim,
                  const RangeResult& range, float* peak, float* sum) {
  float old_delta[kLanes] = {}, new_delta[kLanes] = {}, old_sum[kLanes] = {}, new_sum[kLanes] = {};
  const auto sees = [&](int r) {
    return rows[r].last > start && rows[r].first < start + kRange;
  };
  bool any = false;
  for (int r = 0; r < num_rows; ++r) {
    if (!sees(r)) continue;
    if (rows[r].first >= start) {
      std::memcpy(rows[r].out, range.partial + static_cast<size_t>(r) * head_dim,
                  sizeof(float) * head_dim);
      peak[r] = range.peak[r];
      sum[r] = range.sum[r];
      continue;
    }
    const float top = range.peak[r] > peak[r] ? range.peak[r] : peak[r];
    old_delta[r] = peak[r] - top;
    new_delta[r] = range.peak[r] - top;
    old_sum[r] = sum[r];
    new_sum[r] = range.sum[r];
    peak[r] = top;
    any = true;
  }
  if (!any) return;
  const F16 old_weights = exp2(load(old_delta)), new_weights = exp2(load(new_delta));
  float sums[kLanes];
  store(sums, fma(load(new_sum), new_weights, load(old_sum) * old_weights));
  store(old_delta, old_weights);
  store(new_delta, new_weights);
  for (int r = 0; r < num_rows; ++r) {
    if (!sees(r) || rows[r].first >= start) continue;
    sum[r] = sums[r];
    const float* partial = range.partial + static_cast<size_t>(r) * head_dim;
    const F16 old_weight = splat(old_delta[r]), new_weight = splat(new_delta[r]);
    for (int d = 0; d < head_dim; d += kLanes)
      store(rows[r].out + d, fma(load(partial + d), new_weight, load(rows[r].out + d) * old_weight));
  }
}

}  // namespace paceline
