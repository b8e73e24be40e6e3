// The product of one weight tile with one panel of activations.
#include "dot.h"
#include "linear.h"

namespace paceline {
namespace {

// out[r] = 32 outputs of row row0 + r. The order over K is the same for every row and any Rows:
// for each block, fma of the exact integer sum with the product of scales, then of the minimum.
template <Kind K, int Rows>
inline void quant_rows(const uint8_t* tile, const QuantBlock* a, int num_blocks, int row0,
                       F16 (&out)[Rows][2]) {
  constexpr bool nibbles = K != Kind::kQ8_0;
  constexpr bool has_min = K == Kind::kQ4_1;
  for (int b = 0; b < num_blocks; ++b, ++a, tile += block_bytes(K)) {
    const int32_t* minus_sum = a->minus_sum + row0;
    I16 acc[Rows][2];
    for (int r = 0; r < Rows; ++r)
      acc[r][0] = acc[r][1] =
          has_min ? splat(0) : shift_left<nibbles ? 3 : 7>(splat(minus_sum[r]));
    dot_block<nibbles, Rows>(tile, a->q[row0], minus_sum, acc);
    const half* scales = reinterpret_cast<const half*>(tile + quant_bytes(K));
    for (int i = 0; i < 2; ++i) {
      const F16 scale = load(scales + i * kLanes);
      for (int r = 0; r < Rows; ++r)
        out[r][i] = fma(to_float(acc[r][i]), scale * splat(a->scale[row0 + r]), out[r][i]);
      if constexpr (has_min) {
        const F16 minimum = load(scales + kTile + i * kLanes);
        for (int r = 0; r < Rows; ++r)
          out[r][i] = fma(minimum, splat(a->scaled_sum[row0 + r]), out[r][i]);
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
void tile_rows(const Linear& w, int tile, const Activations& a, int panel, int row0,
               float (*out)[kTile]) {
  F16 acc[Rows][2];
  for (int r = 0; r < Rows; ++r) acc[r][0] = acc[r][1] = splat(0.0f);
  if constexpr (is_dense(K))
    dense_rows<K, Rows>(w.tile(tile), a.dense_panel(panel), w.k, row0, acc);
  else
    quant_rows<K, Rows>(w.tile(tile), a.quant_panel(panel), a.num_blocks, row0, acc);
  for (int i = 0; i < 2; ++i)
    for (int r = 0; r < Rows; ++r) {
      if (w.bias) acc[r][i] = acc[r][i] + load(w.bias + tile * kTile + i * kLanes);
      store(out[row0 + r] + i * kLanes, acc[r][i]);
    }
}

template <Kind K>
void tile_panel(const Linear& w, int tile, const Activations& a, int panel, int rows,
                float (*out)[kTile]) {
  int row = 0;
  for (; rows - row >= kMaxRows; row += kMaxRows)
    tile_rows<K, kMaxRows>(w, tile, a, panel, row, out);
  if constexpr (kMaxRows > 2) {
    if (rows - row == 3) return tile_rows<K, 3>(w, tile, a, panel, row, out);
    if (rows - row == 2) return tile_rows<K, 2>(w, tile, a, panel, row, out);
  }
  if (rows - row == 1) tile_rows<K, 1>(w, tile, a, panel, row, out);
}

}  // namespace

void multiply(const Linear& w, int tile, const Activations& a, int panel, int rows,
              float (*out)[kTile]) {
  switch (w.kind) {
    case Kind::kQ4_0: return tile_panel<Kind::kQ4_0>(w, tile, a, panel, rows, out);
    case Kind::kQ4_1: return tile_panel<Kind::kQ4_1>(w, tile, a, panel, rows, out);
    case Kind::kQ8_0: return tile_panel<Kind::kQ8_0>(w, tile, a, panel, rows, out);
    case Kind::kF32: return tile_panel<Kind::kF32>(w, tile, a, panel, rows, out);
    case Kind::kF16: return tile_panel<Kind::kF16>(w, tile, a, panel, rows, out);
    case Kind::kBF16: return tile_panel<Kind::kBF16>(w, tile, a, panel, rows, out);
  }
}

}  // namespace paceline
