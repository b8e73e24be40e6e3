// Paged causal attention for a few query rows of one sequence that share a KV head.
//
// Keys and values of one layer are [block][kv head][block_size / 16] tiles each, see kv_tile.h.
// Positions are cut into fixed ranges, see attention_range.h. While one range is computed with, the
// next is fetched.
#pragma once

#include "attention_range.h"

namespace paceline {

// One head's keys and values of a sequence: block_table maps position / block_size to a block, and
// keys and values are the layer's pools.
template <class T>
struct HeadKv {
  const T* keys;
  const T* values;
  KvShape shape;
  int head;
  const int32_t* block_table;

  // The tiles of the range from `start` on that hold positions first <= p < last.
  RangeTiles<T> tiles(int start, int first, int last) const {
    RangeTiles<T> found;
    found.first = first > start ? (first - start) / kLanes : 0;
    found.last = last - start < kRange ? (last - start + kLanes - 1) / kLanes : kRangeTiles;
    for (int t = found.first; t < found.last; ++t) {
      const int p = start + t * kLanes;
      const size_t at =
          shape.tile_offset<T>(block_table[p / shape.block_size], head, p % shape.block_size);
      found.keys[t] = keys + at;
      found.values[t] = values + at;
    }
    return found;
  }
};

// Pieces of memory for a Fetch: those of a range.
template <class T>
class RangePieces {
 public:
  RangePieces(const RangeTiles<T>& tiles, int head_dim)
      : bytes_(sizeof(T) * KvShape{0, 0, head_dim}.tile_elements<T>()) {
    for (const T* const* of : {tiles.keys, tiles.values})
      for (int t = tiles.first; t < tiles.last; ++t) pieces_[count_++] = of[t];
  }
  Fetch fetch() const { return {pieces_, count_, bytes_}; }

 private:
  const void* pieces_[2 * kRangeTiles];
  int count_ = 0;
  size_t bytes_;
};

// What one thread needs for up to `max_rows` query rows.
struct AttentionScratch {
  float* scores;      // [kGroup][128]
  float* peak;        // [max_rows] largest score so far
  float* sum;         // [max_rows] sum of exp(score - peak) so far
  RangeResult range;  // of a group

  static size_t floats(int max_rows, int head_dim) {
    return static_cast<size_t>(kGroup) * kRange + 2 * static_cast<size_t>(max_rows) +
           RangeResult::floats(kGroup, head_dim);
  }
  AttentionScratch(float* memory, int max_rows, int head_dim)
      : scores(memory),
        peak(scores + kGroup * kRange),
        sum(peak + max_rows),
        range(sum + max_rows, kGroup, head_dim) {}
};

struct Span {
  int first, last;
};

// The positions that any of the rows sees.
inline Span seen_by(const QueryRow* rows, int num_rows) {
  Span span{rows[0].first, rows[0].last};
  for (int r = 1; r < num_rows; ++r) {
    span.first = rows[r].first < span.first ? rows[r].first : span.first;
    span.last = rows[r].last > span.last ? rows[r].last : span.last;
  }
  return span;
}

template <class T>
bool attend_rows(const QueryRow* rows, int num_rows, const RangeTiles<T>& tiles, int start,
                 int head_dim, float* scores, const RangeResult& out, Fetch& fetch) {
  switch (num_rows) {
    case 1: return attend_group<T, 1>(rows, tiles, start, head_dim, scores, out, fetch);
    case 2: return attend_group<T, 2>(rows, tiles, start, head_dim, scores, out, fetch);
    case 3: return attend_group<T, 3>(rows, tiles, start, head_dim, scores, out, fetch);
    case 4: return attend_group<T, 4>(rows, tiles, start, head_dim, scores, out, fetch);
    case 5: return attend_group<T, 5>(rows, tiles, start, head_dim, scores, out, fetch);
    default: return attend_group<T, 6>(rows, tiles, start, head_dim, scores, out, fetch);
  }
}

// Attention of all rows over one KV head. Every row sees at least one position. `after`: what this
// thread is likely to need next.
template <class T>
void attend(const QueryRow* rows, int num_rows, const HeadKv<T>& kv,
            const AttentionScratch& scratch, const Fetch& after) {
  const Span seen = seen_by(rows, num_rows);
  const int head_dim = kv.shape.head_dim;
  int start = seen.first / kRange * kRange;
  RangeTiles<T> tiles = kv.tiles(start, seen.first, seen.last);
  for (; start < seen.last; start += kRange) {
    RangeTiles<T> next = tiles;
    const bool more = start + kRange < seen.last;
    if (more) next = kv.tiles(start + kRange, seen.first, seen.last);
    const RangePieces<T> pieces(next, head_dim);
    Fetch fetch = more ? pieces.fetch() : after;
    for (int r = 0; r < num_rows; r += kGroup) {
      const int n = num_rows - r < kGroup ? num_rows - r : kGroup;
      if (attend_rows(rows + r, n, tiles, start, head_dim, scratch.scores, scratch.range, fetch))
        merge(rows + r, n, start, head_dim, scratch.range, scratch.peak + r, scratch.sum + r);
    }
    fetch.rest();
    tiles = next;
  }
  for (int r = 0; r < num_rows; ++r) {
    const F16 inverse = splat(1.0f) / splat(scratch.sum[r]);
    for (int d = 0; d < head_dim; d += kLanes)
      store(rows[r].out + d, load(rows[r].out + d) * inverse);
  }
}

}  // namespace paceline
