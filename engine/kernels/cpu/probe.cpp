// Single kernels behind the C interface, for tests and measurement; they allocate as they like.
#include <algorithm>
#include <vector>

#include "api.h"
#include "model.h"

using namespace paceline;

namespace {

// Writes dense keys and values [num_keys][kv_heads][head_dim] into a pool by the block table.
template <class T>
void fill_pool(const KvShape& s, int num_keys, const float* keys, const float* values,
               const int32_t* block_table, T* pool) {
  for (int p = 0; p < num_keys; ++p)
    for (int h = 0; h < s.kv_heads; ++h) {
      const size_t from = (static_cast<size_t>(p) * s.kv_heads + h) * s.head_dim;
      const int block = block_table[p / s.block_size], i = p % s.block_size;
      store_kv(keys + from, values + from, s.head_dim, i, pool + s.tile_offset<T>(block, h, i));
    }
}

template <class T>
void attend_all(const KvShape& s, int num_blocks, int group, int num_keys, const float* keys,
                const float* values, const int32_t* block_table, int num_queries,
                const float* queries, const int32_t* first, const int32_t* last, float* out) {
  // blocks that the table does not name hold nans: they must never be read into a result
  std::vector<T> pool(s.block_elements<T>() * num_blocks);
  std::memset(pool.data(), 0xff, pool.size() * sizeof(T));
  fill_pool(s, num_keys, keys, values, block_table, pool.data());
  const int num_rows = num_queries * group;
  std::vector<float> memory(AttentionScratch::floats(num_rows, s.head_dim));
  const AttentionScratch scratch(memory.data(), num_rows, s.head_dim);
  std::vector<QueryRow> rows(num_rows);
  for (int h = 0; h < s.kv_heads; ++h) {
    for (int r = 0; r < num_rows; ++r) {
      const int q = r / group;
      const size_t at =
          (static_cast<size_t>(q) * s.kv_heads * group + h * group + r % group) * s.head_dim;
      rows[r] = {queries + at, out + at, first[q], last[q]};
    }
    attend(rows.data(), num_rows, HeadKv<T>{pool.data(), s, h, block_table}, scratch, Fetch());
  }
}

}  // namespace

extern "C" {

int32_t paceline_multiply(int32_t kind, int32_t n, int32_t k, const void* weight,
                          uint64_t row_bytes, const float* bias, int32_t rows, const float* x,
                          float* out) {
  if (kind < 0 || kind > static_cast<int32_t>(Kind::kBF16) || n <= 0 || k <= 0 || k % kBlock != 0 || rows < 0) return PACELINE_BAD_SHAPE;
  Linear w;
  w.kind = static_cast<Kind>(kind);
  w.n = n;
  w.k = k;
  std::vector<float> padded_bias(static_cast<size_t>(w.num_tiles()) * kTile);
  if (bias) {
    std::memcpy(padded_bias.data(), bias, sizeof(float) * n);
    w.bias = padded_bias.data();
  }
  Activations a;
  a.num_blocks = k / kBlock;
  a.dense = is_dense(w.kind);
  a.refined = !a.dense;
  Buffer tiles, memory;
  if (!tiles.allocate(w.tile_bytes() * w.num_tiles()) ||
      !memory.allocate(activation_bytes(rows, a) + 1))
    return PACELINE_NO_MEMORY;
  for (int t = 0; t < w.num_tiles(); ++t)
    pack_tile(w, t, static_cast<const uint8_t*>(weight), row_bytes,
              tiles.data.get() + t * w.tile_bytes());
  w.tiles = tiles.data.get();
  a.data = memory.data.get();
  for (int r = 0; r < rows; ++r) a.put_row(r, x + static_cast<size_t>(r) * k);
  for (int panel = 0; panel * kPanel < rows; ++panel)
    for (int t = 0; t < w.num_tiles(); ++t) {
      float tile[kPanel][kTile];
      const int num_rows = std::min(kPanel, rows - panel * kPanel);
      Ahead nothing;
      multiply(w, t, a, panel, num_rows, nothing, tile);
      for (int r = 0; r < num_rows; ++r)
        std::memcpy(out + (static_cast<size_t>(panel) * kPanel + r) * n + t * kTile, tile[r],
                    sizeof(float) * std::min(kTile, n - t * kTile));
    }
  return 0;
}

int32_t paceline_attend(int32_t kv_kind, int32_t block_size, int32_t num_blocks, int32_t kv_heads,
                        int32_t group, int32_t head_dim, int32_t num_keys, const float* keys,
                        const float* values, const int32_t* block_table, int32_t num_queries,
                        const float* queries, const int32_t* first, const int32_t* last,
                        float* out) {
  if (block_size % kLanes != 0 || head_dim % kLanes != 0 || head_dim > kMaxHeadDim || num_queries <= 0 ||
      kv_kind < kKvFloat || kv_kind > kKvInt8)
    return PACELINE_BAD_SHAPE;
  const KvShape s{block_size, kv_heads, head_dim};
  with_kv_type(kv_kind, [&](auto t) {
    attend_all<decltype(t)>(s, num_blocks, group, num_keys, keys, values, block_table, num_queries,
                            queries, first, last, out);
  });
  return 0;
}

int32_t paceline_choose_alone(int32_t num_threads, const paceline_choice* choice) {
  Sampling sampling;
  Team team(num_threads, kSamplingPhases);
  if (!sampling.allocate(choice->vocab, num_threads)) return PACELINE_NO_MEMORY;
  return sampling.choose(team, *choice);
}

void paceline_exp(const float* x, float* out, int32_t count) {
  for (int32_t i = 0; i + kLanes <= count; i += kLanes) store(out + i, exp(load(x + i)));
}

void paceline_widen_half(const uint16_t* x, float* out, int32_t count) {
  for (int32_t i = 0; i + kLanes <= count; i += kLanes) store(out + i, load(x + i));
}

}  // extern "C"
