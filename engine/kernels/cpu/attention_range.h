// Attention of a group of query rows over one range of 128 positions, and the merge of ranges.
//
// A range is computed from scratch and ranges are merged in ascending order, so a row's result
// depends on its own sequence only: not on the rows computed with it, nor on who computed a range.
// Source of the merge: online softmax (Milakov and Gimelshein, 2018). Knows no blocks.
#pragma once

#include "fetch.h"
#include "kv_tile.h"

namespace paceline {

constexpr int kRange = 128;  // positions of a range
constexpr int kRangeTiles = kRange / kLanes;
constexpr int kGroup = 6;    // rows that go through registers together
#if defined(PACELINE_AVX512)
constexpr int kTiles = 4;    // tiles of 16 positions or dims at a time
#else
constexpr int kTiles = 1;
#endif
// At this rate a range of keys and values is fetched while another is computed with.
template <class T>
constexpr int kFetchLines = (sizeof(T) * kRange * 2 + kLanes * 8 - 1) / (kLanes * 8);

// One query row: it sees positions first <= p < last.
struct QueryRow {
  const float* query;  // [head_dim], already scaled
  float* out;          // [head_dim]
  int first, last;
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
  float* partial;  // [rows][head_dim] sum of exp(score - peak) * value
  float* peak;     // [rows] the largest score
  float* sum;      // [rows] sum of exp(score - peak)

  static size_t floats(int rows, int head_dim) {
    return static_cast<size_t>(rows) * (head_dim + 2);
  }
  RangeResult(float* memory, int rows, int head_dim)
      : partial(memory), peak(memory + static_cast<size_t>(rows) * head_dim), sum(peak + rows) {}
};

// scores[r][position] of `Tiles` tiles.
template <class T, int Rows, int Tiles>
inline void score_tiles(const QueryRow* rows, const T* const* keys, int head_dim, float* scores,
                        Fetch& fetch) {
  Fetch ahead = fetch;  // in registers
  F16 acc[Rows][Tiles];
  const float* queries[Rows];
  for (int r = 0; r < Rows; ++r) {
    queries[r] = rows[r].query;
    for (int t = 0; t < Tiles; ++t) acc[r][t] = splat(0.0f);
  }
  for (int d = 0; d < head_dim; ++d) {
    F16 k[Tiles];
    for (int t = 0; t < Tiles; ++t) k[t] = load(keys[t] + d * kLanes);
    ahead.lines<kFetchLines<T>>();
    for (int r = 0; r < Rows; ++r) {
      const F16 q = splat(queries[r][d]);
      for (int t = 0; t < Tiles; ++t) acc[r][t] = fma(q, k[t], acc[r][t]);
    }
  }
  for (int t = 0; t < Tiles; ++t)
    for (int r = 0; r < Rows; ++r)
      store(scores + r * kRange + t * kLanes, scaled(acc[r][t], keys[t], head_dim));
  fetch = ahead;
}

template <class T, int Rows>
inline void score_range(const QueryRow* rows, const RangeTiles<T>& tiles, int head_dim,
                        float* scores, Fetch& fetch) {
  int t = tiles.first;
  for (; t + kTiles <= tiles.last; t += kTiles)
    score_tiles<T, Rows, kTiles>(rows, tiles.keys + t, head_dim, scores + t * kLanes, fetch);
  const int left = tiles.last - t;
  scores += t * kLanes;
  const T* const* keys = tiles.keys + t;
  if constexpr (kTiles > 3)
    if (left == 3) return score_tiles<T, Rows, 3>(rows, keys, head_dim, scores, fetch);
  if constexpr (kTiles > 2)
    if (left == 2) return score_tiles<T, Rows, 2>(rows, keys, head_dim, scores, fetch);
  if constexpr (kTiles > 1)
    if (left == 1) score_tiles<T, Rows, 1>(rows, keys, head_dim, scores, fetch);
}

// partial[r] = sum of scores[r][p] * value[p] for first <= p < last, in ascending order of p.
template <class T, int Rows, int Tiles>
inline void weigh_values(const float* scores, const T* const* values, int first, int last,
                         int head_dim, float* partial, Fetch& fetch) {
  for (int d = 0; d < head_dim; d += Tiles * kLanes) {
    Fetch ahead = fetch;
    F16 acc[Rows][Tiles];
    for (int r = 0; r < Rows; ++r)
      for (int t = 0; t < Tiles; ++t) acc[r][t] = splat(0.0f);
    for (int p = first; p < last;) {
      const int end = p / kLanes * kLanes + kLanes < last ? p / kLanes * kLanes + kLanes : last;
      const T* value = values[p / kLanes] + static_cast<size_t>(p % kLanes) * head_dim + d;
      for (; p < end; ++p, value += head_dim) {
        F16 v[Tiles];
        for (int t = 0; t < Tiles; ++t) v[t] = load(value + t * kLanes);
        ahead.lines<kFetchLines<T>>();
        for (int r = 0; r < Rows; ++r) {
          const F16 s = splat(scores[r * kRange + p]);
          for (int t = 0; t < Tiles; ++t) acc[r][t] = fma(s, v[t], acc[r][t]);
        }
      }
    }
    for (int r = 0; r < Rows; ++r)
      for (int t = 0; t < Tiles; ++t)
        store(partial + static_cast<size_t>(r) * head_dim + d + t * kLanes, acc[r][t]);
    fetch = ahead;
  }
}

template <class T, int Rows>
inline void weigh_range(const float* scores, const T* const* values, int first, int last,
                        int head_dim, float* partial, Fetch& fetch) {
  if (head_dim % (kTiles * kLanes) == 0)
    return weigh_values<T, Rows, kTiles>(scores, values, first, last, head_dim, partial, fetch);
  weigh_values<T, Rows, 1>(scores, values, first, last, head_dim, partial, fetch);
}

// Scores of tiles first <= t < last become exp(score - peak) over the positions that their row sees,
// and 0 elsewhere. Rows side by side, since one alone is all latency.
template <int Rows, bool Masked>
inline void soften(float* scores, int first, int last, const int* firsts, const int* lasts,
                   float* peak, float* sum) {
  const auto clamped = [](int i) { return i < 0 ? 0 : i > kLanes ? kLanes : i; };
  const auto masked = [&](F16 a, int r, int t, float fill) {
    if constexpr (!Masked) return a;
    return keep(a, clamped(firsts[r] - t * kLanes), clamped(lasts[r] - t * kLanes), fill);
  };
  F16 top[Rows], total[Rows], peaks[Rows];
  for (int r = 0; r < Rows; ++r) top[r] = splat(-INFINITY), total[r] = splat(0.0f);
  for (int t = first; t < last; ++t)
    for (int r = 0; r < Rows; ++r)
      top[r] = max(top[r], masked(load(scores + r * kRange + t * kLanes), r, t, -INFINITY));
  for (int r = 0; r < Rows; ++r) peaks[r] = splat(peak[r] = reduce_max(top[r]));
  for (int t = first; t < last; ++t)
    for (int r = 0; r < Rows; ++r) {
      float* s = scores + r * kRange + t * kLanes;
      const F16 e = masked(exp(load(s) - peaks[r]), r, t, 0.0f);
      store(s, e);
      total[r] = total[r] + e;
    }
  for (int r = 0; r < Rows; ++r) sum[r] = reduce_add(total[r]);
}

// The range from `start` on for a group of rows. False if none of them sees any of it.
template <class T, int Rows>
bool attend_group(const QueryRow* rows, RangeTiles<T> tiles, int start, int head_dim, float* scores,
                  const RangeResult& out, Fetch& fetch) {
  int first = kRange, last = 0;  // of the whole group, relative to the range
  int firsts[Rows], lasts[Rows];
  bool all_see_all = true;
  for (int r = 0; r < Rows; ++r) {
    firsts[r] = rows[r].first > start ? rows[r].first - start : 0;
    lasts[r] = rows[r].last - start < kRange ? rows[r].last - start : kRange;
    all_see_all = all_see_all && firsts[r] == 0 && lasts[r] == kRange;
    if (firsts[r] >= lasts[r]) continue;
    first = firsts[r] < first ? firsts[r] : first;
    last = lasts[r] > last ? lasts[r] : last;
  }
  if (first >= last) return false;
  tiles.first = first / kLanes;
  tiles.last = (last + kLanes - 1) / kLanes;
  score_range<T, Rows>(rows, tiles, head_dim, scores, fetch);
  if (all_see_all)
    soften<Rows, false>(scores, tiles.first, tiles.last, firsts, lasts, out.peak, out.sum);
  else
    soften<Rows, true>(scores, tiles.first, tiles.last, firsts, lasts, out.peak, out.sum);
  if constexpr (is_scaled<T>)
    for (int t = tiles.first; t < tiles.last; ++t)
      for (int r = 0; r < Rows; ++r) {
        float* s = scores + r * kRange + t * kLanes;
        store(s, scaled(load(s), tiles.values[t], head_dim));
      }
  weigh_range<T, Rows>(scores, tiles.values, first, last, head_dim, out.partial, fetch);
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
  const F16 old_weights = exp(load(old_delta)), new_weights = exp(load(new_delta));
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
