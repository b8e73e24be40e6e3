// The product of one weight tile with one panel of activations.
#include "dot.h"
#include "linear.h"

namespace paceline {
namespace {

// out[r] = 32 outputs of row row0 + r, of Q4_1 in units of the output. The order over K is the same for
// every row and any Rows: for each block one fma of an exact integer sum, weighed or not, and a scale.
// `ahead` is fetched on the way.
template <Kind K, int Rows>
inline void quant_rows(const uint8_t* tile, const QuantBlock* a, int num_blocks, int row0,
                       Ahead& ahead, F16 (&out)[Rows][2]) {
  constexpr bool nibbles = K != Kind::kQ8_0;
  for (int b = 0; b < num_blocks; ++b, ++a, tile += block_bytes(K)) {
    ahead.fetch();
    const int32_t* start = a->start + row0;
    I16 acc[Rows][2];
    for (int r = 0; r < Rows; ++r) {
      const I16 first = splat(start[r]);
      acc[r][0] = acc[r][1] = nibbles ? first : shift_left<4>(first);  // the zero of 8 bits is 128
    }
    dot_block<nibbles, Rows>(tile, a->q[row0], start, acc);
    const uint8_t* weights = tile + quant_bytes(K);
    for (int i = 0; i < 2; ++i) {
      if constexpr (K == Kind::kQ4_1) {
        const int32_t* pairs = reinterpret_cast<const int32_t*>(weights) + i * kLanes;
        for (int r = 0; r < Rows; ++r)
          out[r][i] = fma(to_float(weigh(acc[r][i], a->high_sum[row0 + r], pairs)),
                          splat(a->scale[row0 + r]), out[r][i]);
      } else {
        const F16 scale = load(reinterpret_cast<const half*>(weights) + i * kLanes);
        for (int r = 0; r < Rows; ++r)
          out[r][i] = fma(to_float(acc[r][i]), scale * splat(a->scale[row0 + r]), out[r][i]);
      }
    }
  }
}

template <Kind K, int Rows>
inline void dense_rows(const uint8_t* tile, const float* a, int k, int row0, F16 (&out)[Rows][2]) {
  constexpr int half_tile = kLanes * dense_bytes(K);
  a += row0;
  for (int i = 0; i < k; ++i, a += kPanel, tile += 2 * half_tile) {
    const F16 w0 = load_weights<K>(tile), w1 = load_weights<K>(tile + half_tile);
    for (int r = 0; r < Rows; ++r) {
      const F16 x = splat(a[r]);
      out[r][0] = fma(w0, x, out[r][0]);
      out[r][1] = fma(w1, x, out[r][1]);
    }
  }
}

template <Kind K, int Rows>
void tile_rows(const Linear& w, int tile, const Activations& a, int panel, int row0, Ahead& ahead,
               float (*out)[kTile]) {
  F16 acc[Rows][2];
  for (int r = 0; r < Rows; ++r) acc[r][0] = acc[r][1] = splat(0.0f);
  if constexpr (is_dense(K))
    dense_rows<K, Rows>(w.tile(tile), a.dense_panel(panel), w.k, row0, acc);
  else
    quant_rows<K, Rows>(w.tile(tile), a.quant_panel(panel), a.num_blocks, row0, ahead, acc);
  if constexpr (K == Kind::kQ4_1) {
    const float* units = w.units(w.tile(tile));
    const F16 unit[2] = {load(units), load(units + kLanes)};
    for (auto& row : acc) row[0] = row[0] * unit[0], row[1] = row[1] * unit[1];
  }
  if (w.bias) {
    const float* bias = w.bias + tile * kTile;
    const F16 added[2] = {load(bias), load(bias + kLanes)};
    for (auto& row : acc) row[0] = row[0] + added[0], row[1] = row[1] + added[1];
  }
  for (int r = 0; r < Rows; ++r) {
    store(out[row0 + r], acc[r][0]);
    store(out[row0 + r] + kLanes, acc[r][1]);
  }
}

template <Kind K>
void tile_panel(const Linear& w, int tile, const Activations& a, int panel, int rows,
                Ahead& ahead, float (*out)[kTile]) {
  int row = 0;
  for (; rows - row >= kMaxRows; row += kMaxRows)
    tile_rows<K, kMaxRows>(w, tile, a, panel, row, ahead, out);
  if constexpr (kMaxRows > 2) {
    if (rows - row == 3) return tile_rows<K, 3>(w, tile, a, panel, row, ahead, out);
    if (rows - row == 2) return tile_rows<K, 2>(w, tile, a, panel, row, ahead, out);
  }
  if (rows - row == 1) tile_rows<K, 1>(w, tile, a, panel, row, ahead, out);
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
