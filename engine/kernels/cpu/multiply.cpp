// The product of one weight tile with one panel of activations.
#include "dot.h"
#include "linear.h"

namespace paceline {
namespace {

// out[r] = outputs of row row0 + r, from the tile's half `part` on, of Q4_1 in units of the output. The
// order over K is the same for every row and any Rows: for each block one fma of an exact integer sum,
// weighed or not, and a scale. `ahead` is fetched on the way.
template <Kind K, int Rows, int Halves>
PACELINE_INLINE void quant_rows(const uint8_t* tile, const QuantBlock* a, int num_blocks, int row0,
                                int part, Ahead& ahead, F16 (&out)[Rows][Halves]) {
  constexpr bool nibbles = K != Kind::kQ8_0;
  if constexpr (Rows > kPanel / 2) row0 = 0;  // it is, and the compiler should know
  for (int b = 0; b < num_blocks; ++b, ++a, tile += block_bytes(K)) {
    if (b % Ahead::kBlocks == 0) ahead.fetch();
    const int32_t* start = a->start + row0;
    I16 acc[Rows][Halves];
    PACELINE_UNROLL for (int r = 0; r < Rows; ++r) {
      const I16 first = splat(start[r]);
      PACELINE_UNROLL for (int h = 0; h < Halves; ++h)  // the zero of 8 bits is 128
        acc[r][h] = nibbles ? first : shift_left<4>(first);
    }
    dot_block<nibbles>(tile + part * kGroupBytes / 2, a->q[row0], start, acc);
    const uint8_t* weights = tile + quant_bytes(K);
    PACELINE_UNROLL for (int i = 0; i < Halves; ++i) {
      if constexpr (K == Kind::kQ4_1) {
        const int32_t* pairs = reinterpret_cast<const int32_t*>(weights) + (part + i) * kLanes;
        PACELINE_UNROLL for (int r = 0; r < Rows; ++r)
          out[r][i] = fma(to_float(weigh(acc[r][i], a->high_sum[row0 + r], pairs)),
                          splat(a->scale[row0 + r]), out[r][i]);
      } else {
        const F16 scale = load(reinterpret_cast<const half*>(weights) + (part + i) * kLanes);
        PACELINE_UNROLL for (int r = 0; r < Rows; ++r)
          out[r][i] = fma(to_float(acc[r][i]), scale * splat(a->scale[row0 + r]), out[r][i]);
      }
    }
  }
}

template <Kind K, int Rows, int Halves>
inline void dense_rows(const uint8_t* tile, const float* a, int k, int row0, int part,
                       F16 (&out)[Rows][Halves]) {
  constexpr int half_tile = kLanes * dense_bytes(K);
  a += row0;
  tile += part * half_tile;
  for (int i = 0; i < k; ++i, a += kPanel, tile += 2 * half_tile) {
    F16 weights[Halves];
    PACELINE_UNROLL for (int h = 0; h < Halves; ++h)
      weights[h] = load_weights<K>(tile + h * half_tile);
    PACELINE_UNROLL for (int r = 0; r < Rows; ++r) {
      const F16 x = splat(a[r]);
      PACELINE_UNROLL for (int h = 0; h < Halves; ++h) out[r][h] = fma(weights[h], x, out[r][h]);
    }
  }
}

// Rows row0 .. row0 + Rows - 1 of the panel, and the tile's halves from `part` on.
template <Kind K, int Rows, int Halves>
PACELINE_CALLED void tile_rows(const Linear& w, int tile, const Activations& a, int panel, int row0,
                               int part, Ahead& ahead, float (*out)[kTile]) {
  F16 acc[Rows][Halves];
  PACELINE_UNROLL for (int r = 0; r < Rows; ++r)
    PACELINE_UNROLL for (int h = 0; h < Halves; ++h) acc[r][h] = splat(0.0f);
  if constexpr (is_dense(K))
    dense_rows<K>(w.tile(tile), a.dense_panel(panel), w.k, row0, part, acc);
  else
    quant_rows<K>(w.tile(tile), a.quant_panel(panel), a.num_blocks, row0, part, ahead, acc);
  PACELINE_UNROLL for (int h = 0; h < Halves; ++h) {
    const int first = (part + h) * kLanes;
    if constexpr (K == Kind::kQ4_1) {
      const F16 unit = load(w.units(w.tile(tile)) + first);
      PACELINE_UNROLL for (int r = 0; r < Rows; ++r) acc[r][h] = acc[r][h] * unit;
    }
    if (w.bias) {
      const F16 added = load(w.bias + tile * kTile + first);
      PACELINE_UNROLL for (int r = 0; r < Rows; ++r) acc[r][h] = acc[r][h] + added;
    }
    PACELINE_UNROLL for (int r = 0; r < Rows; ++r) store(out[row0 + r] + first, acc[r][h]);
  }
}

// Adds the second terms of rows row0 .. row0 + Rows - 1 to their outputs.
template <Kind K, int Rows>
PACELINE_CALLED void refine_rows(const Linear& w, int tile, const Activations& a, int panel, int row0,
                                 float (*out)[kTile]) {
  F16 acc[Rows][2];
  PACELINE_UNROLL for (int r = 0; r < Rows; ++r) acc[r][0] = acc[r][1] = splat(0.0f);
  Ahead nothing;
  a.each_second_term(panel, [&](int block, const QuantBlock& term) {
    quant_rows<K>(w.tile(tile) + block * block_bytes(K), &term, 1, row0, 0, nothing, acc);
  });
  PACELINE_UNROLL for (int h = 0; h < 2; ++h) {
    const int first = h * kLanes;
    const F16 unit = K == Kind::kQ4_1 ? load(w.units(w.tile(tile)) + first) : splat(1.0f);
    PACELINE_UNROLL for (int r = 0; r < Rows; ++r) {
      float* const sum = out[row0 + r] + first;
      store(sum, fma(acc[r][h], unit, load(sum)));
    }
  }
}

// Rows from `row` on, `Most` or fewer of them together.
template <Kind K, int Most>
void tile_panel(const Linear& w, int tile, const Activations& a, int panel, int row, int rows,
                Ahead& ahead, float (*out)[kTile]) {
  constexpr int halves = halves_with(Most);
  for (; rows - row >= Most; row += Most)
    for (int part = 0; part < 2; part += halves)
      tile_rows<K, Most, halves>(w, tile, a, panel, row, part, ahead, out);
  if constexpr (Most > 1) tile_panel<K, Most - 1>(w, tile, a, panel, row, rows, ahead, out);
}

template <Kind K>
void refine_panel(const Linear& w, int tile, const Activations& a, int panel, int rows,
                  float (*out)[kTile]) {
  int row = 0;
  for (; row + kFewRows <= rows; row += kFewRows)
    refine_rows<K, kFewRows>(w, tile, a, panel, row, out);
  for (; row < rows; ++row) refine_rows<K, 1>(w, tile, a, panel, row, out);
}

template <Kind K>
void tile_panel(const Linear& w, int tile, const Activations& a, int panel, int rows, Ahead& ahead,
                float (*out)[kTile]) {
  constexpr int most = is_dense(K) ? kMaxDenseRows : kMaxRows;
  constexpr int few = is_dense(K) ? kMaxDenseRows : kFewRows;
  if (rows <= few) tile_panel<K, few>(w, tile, a, panel, 0, rows, ahead, out);
  else tile_panel<K, most>(w, tile, a, panel, 0, rows, ahead, out);
  if constexpr (!is_dense(K))
    if (a.has_second_terms(panel)) refine_panel<K>(w, tile, a, panel, rows, out);
}

}  // namespace

void multiply(const Linear& w, int tile, const Activations& a, int panel, int rows,
              Ahead& ahead, float (*out)[kTile]) {
  switch (w.kind) {
    case Kind::kQ4_0: return tile_panel<Kind::kQ4_0>(w, tile, a, panel, rows, ahead, out);
    case Kind::kQ4_1: return tile_panel<Kind::kQ4_1>(w, tile, a, panel, rows, ahead, out);
    case Kind::kQ8_0: return tile_panel<Kind::kQ8_0>(w, tile, a, panel, rows, ahead, out);
    case Kind::kF32: return tile_panel<Kind::kF32>(w, tile, a, panel, rows, ahead, out);
    case Kind::kF16: return tile_panel<Kind::kF16>(w, tile, a, panel, rows, ahead, out);
    case Kind::kBF16: return tile_panel<Kind::kBF16>(w, tile, a, panel, rows, ahead, out);
  }
}

}  // namespace paceline
