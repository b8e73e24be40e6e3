// Paged causal attention for a few query rows of one sequence that share a KV head.
//
// Keys and values of one layer are [block][kv head][block_size / 16] pairs of tiles, see kv_tile.h.
// Positions are cut into fixed ranges, see attention_range.h. While one range is computed with, the
// next is fetched.
#pragma once

#include "attention_range.h"

namespace paceline {

// One head's keys and values of a sequence: block_table maps position / block_size to a block of
// the layer's pool.
template <class T>
struct HeadKv {
  const T* pool;
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
      found.keys[t] = pool + at;
      found.values[t] = found.keys[t] + shape.tile_elements<T>();
    }
    return found;
  }
};

// Pieces of memory for a Fetch: those of a range.
template <class T>
class RangePieces {
 public:
  RangePieces(const RangeTiles<T>& tiles, int head_dim)
      : bytes_(2 * sizeof(T) * KvShape{0, 0, head_dim}.tile_elements<T>()) {
    for (int t = tiles.first; t < tiles.last; ++t) pieces_[count_++] = tiles.keys[t];
  }
  Fetch fetch() const { return {pieces_, count_, bytes_}; }

 private:
  const void* pieces_[kRangeTiles];
  int count_ = 0;
  size_t bytes_;
};

// What one thread needs for up to `max_rows` query rows.
struct AttentionScratch {
  RangeScratch group;
  RangeResult range;       // of a group
  RoundedQueries queries;  // of all rows
  float* peak;             // [max_rows] largest score so far
  float* sum;              // [max_rows] sum of 2^(score - peak) so far

  static size_t floats(int max_rows, int head_dim) {
    return RangeScratch::kFloats + RangeResult::floats(kGroup, head_dim) +
           static_cast<size_t>(max_rows) * (3 + head_dim / 2);
  }
  AttentionScratch(float* memory, int max_rows, int head_dim)
      : group(memory), range(memory + RangeScratch::kFloats, kGroup, head_dim) {
    memory += RangeScratch::kFloats + RangeResult::floats(kGroup, head_dim);
    peak = memory;
    sum = peak + max_rows;
    queries.scales = sum + max_rows;
    queries.integers = reinterpret_cast<int16_t*>(queries.scales + max_rows);
  }
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
bool attend_rows(const QueryRow* rows, int num_rows, const RoundedQueries& rounded,
                 const RangeTiles<T>& tiles, int start, int head_dim,
                 const AttentionScratch& scratch, Fetch& fetch) {
  const auto attend = [&](auto count) {
    return attend_group<T, decltype(count)::value>(rows, rounded, tiles, start, head_dim,
                                                   scratch.group, scratch.range, fetch);
  };
  switch (num_rows) {
    case 1: return attend(std::integral_constant<int, 1>());
    case 2: return attend(std::integral_constant<int, 2>());
    case 3: return attend(std::integral_constant<int, 3>());
    case 4: return attend(std::integral_constant<int, 4>());
    case 5: return attend(std::integral_constant<int, 5>());
    default: return attend(std::integral_constant<int, 6>());
  }
}

// A query is rounded from its own values, once for all ranges; for keys that are spread it is too.
template <class T>
void round_queries(const QueryRow* rows, int num_rows, int head_dim, const RoundedQueries& out) {
  float spread[kMaxHeadDim];
  for (int r = 0; r < num_rows; ++r) {
    const float* query = rows[r].query;
    if constexpr (is_spread<T>) {
      hadamard(query, head_dim, spread);
      query = spread;
    }
    const Rounding<int16_t> rounding(query, head_dim);
    const int growth = is_spread<T> ? hadamard_block(head_dim) : 1;  // a power of two
    out.scales[r] = rounding.scale() * (1.0f / static_cast<float>(growth));
    for (int d = 0; d < head_dim; d += kLanes)
      rounding.put(query + d, out.integers + static_cast<size_t>(r) * head_dim + d);
  }
}

// Attention of all rows over one KV head. Every row sees at least one position. `after`: what this
// thread is likely to need next.
template <class T>
void attend(const QueryRow* rows, int num_rows, const HeadKv<T>& kv,
            const AttentionScratch& scratch, const Fetch& after) {
  const Span seen = seen_by(rows, num_rows);
  const int head_dim = kv.shape.head_dim;
  if constexpr (is_scaled<T>) round_queries<T>(rows, num_rows, head_dim, scratch.queries);
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
      const RoundedQueries rounded{scratch.queries.integers + static_cast<size_t>(r) * head_dim,
                                   scratch.queries.scales + r};
      if (attend_rows(rows + r, n, rounded, tiles, start, head_dim, scratch, fetch))
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

// In attention.cpp: they take long to compile.
extern template void attend(const QueryRow*, int, const HeadKv<float>&, const AttentionScratch&,
                            const Fetch&);
extern template void attend(const QueryRow*, int, const HeadKv<int16_t>&, const AttentionScratch&,
                            const Fetch&);
extern template void attend(const QueryRow*, int, const HeadKv<int8_t>&, const AttentionScratch&,
                            const Fetch&);

}  // namespace paceline
