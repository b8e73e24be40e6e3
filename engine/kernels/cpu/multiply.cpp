// The product of one weight tile with one panel of activations.
#include "dot.h"
#include "linear.h"

namespace paceline {
namespace {

// out[r] = 16 outputs of row row0 + r. The order over K is the same for every row and any Rows.
template <Kind K, int Rows>
inline void quant_rows(const uint8_t* tile, const QuantBlock* a, int num_blocks, int row0,
                       F16 (&out)[Rows]) {
  constexpr bool nibbles = K != Kind::kQ8_0;
  constexpr bool has_min = K == Kind::kQ4_1;
  const half* scales =
      reinterpret_cast<const half*>(tile + static_cast<size_t>(num_blocks) * quant_bytes(K));
  for (int r = 0; r < Rows; ++r) out[r] = splat(0.0f);
  for (int b = 0; b < num_blocks; ++b) {
    I16 acc[Rows];
    for (int r = 0; r < Rows; ++r)
      acc[r] = has_min ? splat(0) : shift_left<nibbles ? 3 : 7>(splat(a[b].minus_sum[row0 + r]));
    dot_block<nibbles, Rows>(tile + static_cast<size_t>(b) * quant_bytes(K), a[b], row0, acc);
    const F16 scale = load(scales);
    for (int r = 0; r < Rows; ++r)
      out[r] = fma(to_float(acc[r]), scale * splat(a[b].scale[row0 + r]), out[r]);
    if constexpr (has_min) {
      const F16 minimum = load(scales + kLanes);
      for (int r = 0; r < Rows; ++r)
        out[r] = fma(minimum, splat(a[b].scaled_sum[row0 + r]), out[r]);
    }
    scales += scale_bytes(K) / 2;
  }
}

template <Kind K, int Rows>
inline void dense_rows(const uint8_t* tile, const float* a, int k, int row0, F16 (&out)[Rows]) {
  for (int r = 0; r < Rows; ++r) out[r] = splat(0.0f);
  for (int i = 0; i < k; ++i) {
    const F16 w = load_weights<K>(tile + static_cast<size_t>(i) * kLanes * dense_bytes(K));
    for (int r = 0; r < Rows; ++r) out[r] = fma(w, splat(a[i * kPanel + row0 + r]), out[r]);
  }
}

template <Kind K, int Rows>
void tile_rows(const Linear& w, int tile, const Activations& a, int panel, int row0,
                      float (*out)[kLanes]) {
  F16 acc[Rows];
  if constexpr (is_dense(K))
    dense_rows<K, Rows>(w.tile(tile), a.dense_panel(panel), w.k, row0, acc);
  else
    quant_rows<K, Rows>(w.tile(tile), a.quant_panel(panel), a.num_blocks, row0, acc);
  const F16 bias = w.bias ? load(w.bias + tile * kLanes) : splat(0.0f);
  for (int r = 0; r < Rows; ++r) store(out[row0 + r], w.bias ? acc[r] + bias : acc[r]);
}

template <Kind K>
void tile_panel(const Linear& w, int tile, const Activations& a, int panel, int rows,
                       float (*out)[kLanes]) {
  int row = 0;
  for (; rows - row >= kMaxRows; row += kMaxRows)
    tile_rows<K, kMaxRows>(w, tile, a, panel, row, out);
  switch (rows - row) {
    case 1: return tile_rows<K, 1>(w, tile, a, panel, row, out);
    case 2: return tile_rows<K, 2>(w, tile, a, panel, row, out);
    case 3: return tile_rows<K, 3>(w, tile, a, panel, row, out);
#if defined(PACELINE_AVX512)
    case 4: return tile_rows<K, 4>(w, tile, a, panel, row, out);
    case 5: return tile_rows<K, 5>(w, tile, a, panel, row, out);
    case 6: return tile_rows<K, 6>(w, tile, a, panel, row, out);
    case 7: return tile_rows<K, 7>(w, tile, a, panel, row, out);
#endif
    default: return;
  }
}

}  // namespace

void multiply(const Linear& w, int tile, const Activations& a, int panel, int rows,
                     float (*out)[kLanes]) {
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
