// Paged causal attention for a few query rows of one sequence that share a KV head.
//
// Keys and values of one layer are [block][kv head][block_size / 16] tiles each, see kv_tile.h.
//
// Positions are cut into fixed ranges of 128. Each range is computed from scratch and ranges are
// merged in ascending order, so a row's result depends on its own sequence only: not on the other
// rows computed with it, nor on where a prefill was cut. Source of the merge: online softmax
// (Milakov and Gimelshein, 2018).
#pragma once

#include <cstdlib>

#include "kv_tile.h"

namespace paceline {

constexpr int kRange = 128;                          // positions of a range
constexpr int kRangeTiles = kRange / kLanes;
constexpr int kGroup = 4;                            // rows that go through registers together
#if defined(PACELINE_AVX512)
constexpr int kTiles = 4;                            // tiles of 16 positions or dims at a time
#else
constexpr int kTiles = 1;
#endif

// One query row: it sees positions first <= p < last.
struct QueryRow {
  const float* query;  // [head_dim], already scaled
  float* out;          // [head_dim]
  int first, last;
};

// What one thread needs for up to `max_rows` query rows.
struct AttentionScratch {
  float* scores;   // [4][128]
  float* partial;  // [4][head_dim]
  float* peak;     // [max_rows] largest score so far
  float* sum;      // [max_rows] sum of exp(score - peak) so far

  static size_t floats(int max_rows, int head_dim) {
    return static_cast<size_t>(kGroup) * (kRange + head_dim) + 2 * static_cast<size_t>(max_rows);
  }
  AttentionScratch(float* memory, int max_rows, int head_dim)
      : scores(memory),
        partial(scores + kGroup * kRange),
        peak(partial + static_cast<size_t>(kGroup) * head_dim),
        sum(peak + max_rows) {}
};

// scores[r][position] of `Tiles` tiles. Meanwhile fetches the tiles' values, which come next.
template <class T, int Rows, int Tiles>
inline void score_tiles(const QueryRow* rows, const T* const* keys, const T* const* values,
                        int head_dim, float* scores) {
  F16 acc[Rows][Tiles];
  for (int r = 0; r < Rows; ++r)
    for (int t = 0; t < Tiles; ++t) acc[r][t] = splat(0.0f);
  for (int d = 0; d < head_dim; ++d)
    for (int t = 0; t < Tiles; ++t) {
      const F16 k = load(keys[t] + d * kLanes);
      if (d % (64 / kLanes / sizeof(T)) == 0) __builtin_prefetch(values[t] + d * kLanes);
      for (int r = 0; r < Rows; ++r) acc[r][t] = fma(splat(rows[r].query[d]), k, acc[r][t]);
    }
  for (int t = 0; t < Tiles; ++t)
    for (int r = 0; r < Rows; ++r)
      store(scores + r * kRange + t * kLanes, scaled(acc[r][t], keys[t], head_dim));
}

// partial[r] = sum of scores[r][p] * value[p] for first <= p < last, in ascending order of p.
// Meanwhile fetches the tiles of keys in `next`, if there are any.
template <class T, int Rows, int Tiles>
inline void weigh_values(const float* scores, const T* const* values, const T* const* next,
                         int first, int last, int head_dim, float* partial) {
  for (int d = 0; d < head_dim; d += Tiles * kLanes) {
    F16 acc[Rows][Tiles];
    for (int r = 0; r < Rows; ++r)
      for (int t = 0; t < Tiles; ++t) acc[r][t] = splat(0.0f);
    for (int p = first; p < last; ++p) {
      const size_t at = static_cast<size_t>(p % kLanes) * head_dim + d;
      const T* value = values[p / kLanes] + at;
      if (next) {
        __builtin_prefetch(next[p / kLanes] + at);
        if (sizeof(T) * Tiles * kLanes > 64) __builtin_prefetch(next[p / kLanes] + at + Tiles * kLanes / 2);
      }
      for (int t = 0; t < Tiles; ++t) {
        const F16 v = load(value + t * kLanes);
        for (int r = 0; r < Rows; ++r)
          acc[r][t] = fma(splat(scores[r * kRange + p]), v, acc[r][t]);
      }
    }
    for (int r = 0; r < Rows; ++r)
      for (int t = 0; t < Tiles; ++t)
        store(partial + static_cast<size_t>(r) * head_dim + d + t * kLanes, acc[r][t]);
  }
}

// scores[0 .. 128) become exp(score - max) over first <= p < last and 0 elsewhere.
inline void soften(float* scores, int first, int last, float& peak, float& sum) {
  const float none = -INFINITY;
  F16 top = splat(none);
  const int num_tiles = (last + kLanes - 1) / kLanes;
  for (int t = 0; t < num_tiles; ++t) {
    const int from = first - t * kLanes, to = last - t * kLanes;
    const F16 s = keep(load(scores + t * kLanes), from < 0 ? 0 : from > 16 ? 16 : from,
                       to > 16 ? 16 : to, none);
    store(scores + t * kLanes, s);
    top = max(top, s);
  }
  peak = reduce_max(top);
  F16 total = splat(0.0f);
  for (int t = 0; t < num_tiles; ++t) {
    const int from = first - t * kLanes, to = last - t * kLanes;
    const F16 e = keep(exp(load(scores + t * kLanes) - splat(peak)),
                       from < 0 ? 0 : from > 16 ? 16 : from, to > 16 ? 16 : to, 0.0f);
    store(scores + t * kLanes, e);
    total = total + e;
  }
  for (int t = num_tiles; t < kRangeTiles; ++t) store(scores + t * kLanes, splat(0.0f));
  sum = reduce_add(total);
}

// Adds the range (peak, sum, partial) to the running result of one row.
inline void merge(float* out, float& out_peak, float& out_sum, const float* partial, float peak,
                  float sum, int head_dim) {
  const float top = peak > out_peak ? peak : out_peak;
  const F16 old_weight = exp(splat(out_peak - top)), new_weight = exp(splat(peak - top));
  for (int d = 0; d < head_dim; d += kLanes)
    store(out + d, fma(load(partial + d), new_weight, load(out + d) * old_weight));
  out_sum = first_lane(fma(splat(sum), new_weight, splat(out_sum) * old_weight));
  out_peak = top;
}

template <class T, int Rows>
inline void group_scores(const QueryRow* rows, const T* const* keys, const T* const* values,
                         int num_tiles, int head_dim, float* scores) {
  int t = 0;
  for (; t + kTiles <= num_tiles; t += kTiles)
    score_tiles<T, Rows, kTiles>(rows, keys + t, values + t, head_dim, scores + t * kLanes);
  for (; t < num_tiles; ++t)
    score_tiles<T, Rows, 1>(rows, keys + t, values + t, head_dim, scores + t * kLanes);
}

template <class T, int Rows>
inline void group_values(const float* scores, const T* const* values, const T* const* next,
                         int first, int last, int head_dim, float* partial) {
  if (head_dim % (kTiles * kLanes) == 0)
    return weigh_values<T, Rows, kTiles>(scores, values, next, first, last, head_dim, partial);
  weigh_values<T, Rows, 1>(scores, values, next, first, last, head_dim, partial);
}

// One range for up to four rows. keys and values point at its tiles of 16 positions.
template <class T, int Rows>
void attend_group(QueryRow* rows, const T* const* keys, const T* const* values,
                  const T* const* next, int start, int head_dim, int index, const AttentionScratch& scratch) {
  int first = kRange, last = 0;  // of the whole group, relative to the range
  int firsts[Rows], lasts[Rows];
  for (int r = 0; r < Rows; ++r) {
    firsts[r] = rows[r].first > start ? rows[r].first - start : 0;
    lasts[r] = rows[r].last - start < kRange ? rows[r].last - start : kRange;
    if (firsts[r] >= lasts[r]) continue;
    first = firsts[r] < first ? firsts[r] : first;
    last = lasts[r] > last ? lasts[r] : last;
  }
  if (first >= last) return;
  float* scores = scratch.scores;
  float* partial = scratch.partial;
  float peak[Rows], sum[Rows];
  const int skipped = first / kLanes;  // tiles before a sliding window
  group_scores<T, Rows>(rows, keys + skipped, values + skipped, (last + kLanes - 1) / kLanes - skipped, head_dim,
                        scores + skipped * kLanes);
  for (int r = 0; r < Rows; ++r) {
    if (firsts[r] < lasts[r]) {
      soften(scores + r * kRange, firsts[r], lasts[r], peak[r], sum[r]);
    } else {
      for (int p = 0; p < kRange; ++p) scores[r * kRange + p] = 0.0f;
    }
    if constexpr (is_scaled<T>)
      for (int t = skipped; t * kLanes < last; ++t) {
        float* s = scores + r * kRange + t * kLanes;
        store(s, scaled(load(s), values[t], head_dim));
      }
  }
  group_values<T, Rows>(scores, values, next, first, last, head_dim, partial);
  for (int r = 0; r < Rows; ++r) {
    if (firsts[r] >= lasts[r]) continue;
    const float* new_part = partial + static_cast<size_t>(r) * head_dim;
    if (rows[r].first >= start) {  // the row's first range: nothing to merge with
      std::memcpy(rows[r].out, new_part, sizeof(float) * head_dim);
      scratch.peak[index + r] = peak[r];
      scratch.sum[index + r] = sum[r];
    } else {
      merge(rows[r].out, scratch.peak[index + r], scratch.sum[index + r], new_part, peak[r], sum[r],
            head_dim);
    }
  }
}

// Attention of all rows over one KV head. block_table maps position / block_size to a block;
// keys and values are the layer's pools. Every row sees at least one position.
template <class T>
void attend(QueryRow* rows, int num_rows, const T* keys, const T* values, const KvShape& shape,
            int kv_head, const int32_t* block_table, const AttentionScratch& scratch) {
  int first = rows[0].first, last = rows[0].last;
  for (int r = 1; r < num_rows; ++r) {
    first = rows[r].first < first ? rows[r].first : first;
    last = rows[r].last > last ? rows[r].last : last;
  }
  // Tiles of this range and of the next; a tile that no row looks at points at one that some does.
  const T* key_tiles[2][kRangeTiles];
  const T* value_tiles[kRangeTiles];
  const auto find_tiles = [&](int start, const T* pool, const T** tiles) {
    for (int t = 0; t < kRangeTiles; ++t) {
      int p = start + t * kLanes;
      p = p > last - 1 ? last - 1 : p < first ? first : p;
      const int block = block_table[p / shape.block_size];
      const int i = p % shape.block_size;
      tiles[t] = pool + shape.tile_offset<T>(block, kv_head, i);
    }
  };
  int start = first / kRange * kRange;
  find_tiles(start, keys, key_tiles[0]);
  for (int turn = 0; start < last; start += kRange, turn ^= 1) {
    find_tiles(start, values, value_tiles);
    const bool more = start + kRange < last;
    if (more) find_tiles(start + kRange, keys, key_tiles[turn ^ 1]);
    const T* const* now = key_tiles[turn];
    for (int r = 0; r < num_rows; r += kGroup) {
      const T* const* next = more && r == 0 ? key_tiles[turn ^ 1] : nullptr;
      const int n = num_rows - r < kGroup ? num_rows - r : kGroup;
      const int d = shape.head_dim;
      if (n == 4) attend_group<T, 4>(rows + r, now, value_tiles, next, start, d, r, scratch);
      if (n == 3) attend_group<T, 3>(rows + r, now, value_tiles, next, start, d, r, scratch);
      if (n == 2) attend_group<T, 2>(rows + r, now, value_tiles, next, start, d, r, scratch);
      if (n == 1) attend_group<T, 1>(rows + r, now, value_tiles, next, start, d, r, scratch);
    }
  }
  for (int r = 0; r < num_rows; ++r) {
    const F16 inverse = splat(1.0f) / splat(scratch.sum[r]);
    for (int d = 0; d < shape.head_dim; d += kLanes)
      store(rows[r].out + d, load(rows[r].out + d) * inverse);
  }
}

}  // namespace paceline
