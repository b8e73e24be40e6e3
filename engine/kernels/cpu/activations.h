// Layout of the activations that a linear reads: panels of eight rows, quantised or fp32.
//
//   quantised: panel p, block b (32 values of K) -> QuantBlock, eight rows side by side
//   dense:     panel p, value k                  -> eight floats, one per row
//
// A row is quantised from its own values only, so it never depends on its neighbours.
#pragma once

#include <cstddef>
#include <limits>

#include "vec.h"

namespace paceline {

constexpr int kBlock = 32;  // values of K that share a scale
constexpr int kPanel = 8;   // rows of a panel

struct QuantBlock {
  int8_t q[kPanel][kBlock];      // round(x / scale), |q| <= 127
  float scale[kPanel];           // max |x| / 127; nan if the block holds a nan or an infinity
  int32_t start[kPanel];         // -8 * (sum of q): takes off the zero point of 4-bit weights
  int32_t high_sum[kPanel];      // (sum of q) << 16: meets the minimum of Q4_1 weights
};

inline void quantise_block(const float* x, QuantBlock& out, int row) {
  const F16 a = load(x), b = load(x + kLanes);
  const uint32_t bits = largest_bits(abs(a), abs(b));
  const bool finite = bits < 0x7f800000;
  float largest;
  std::memcpy(&largest, &bits, sizeof largest);
  // a subnormal maximum would make the inverse infinite; such a block is zero
  const bool some = finite && largest > 1e-35f;
  const F16 inverse = splat(some ? 127.0f / largest : 0.0f);
  int8_t* q = out.q[row];
  store_bytes(q, round_to_int((finite ? a : splat(0.0f)) * inverse));
  store_bytes(q + kLanes, round_to_int((finite ? b : splat(0.0f)) * inverse));
  const int32_t sum = sum_bytes(q);
  out.scale[row] = some ? largest / 127.0f
                   : finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  out.start[row] = -8 * sum;
  out.high_sum[row] = sum * 65536;
}

// A matrix of activations in one of the two layouts; a view, the memory is the caller's.
struct Activations {
  uint8_t* data = nullptr;
  int num_blocks = 0;  // K / 32
  bool dense = false;

  size_t panel_bytes() const {
    return static_cast<size_t>(num_blocks) *
           (dense ? sizeof(float) * kBlock * kPanel : sizeof(QuantBlock));
  }
  QuantBlock* quant_panel(int panel) const {
    return reinterpret_cast<QuantBlock*>(data + panel * panel_bytes());
  }
  float* dense_panel(int panel) const {
    return reinterpret_cast<float*>(data + panel * panel_bytes());
  }
  // Stores 32 values of one row.
  void put(int row, int block, const float* x) const {
    const int panel = row / kPanel, r = row % kPanel;
    if (!dense) {
      quantise_block(x, quant_panel(panel)[block], r);
      return;
    }
    float* out = dense_panel(panel) + static_cast<size_t>(block) * kBlock * kPanel + r;
    for (int k = 0; k < kBlock; ++k) out[k * kPanel] = x[k];
  }
};

inline size_t activation_bytes(int rows, int k, bool dense) {
  Activations a;
  a.num_blocks = k / kBlock;
  a.dense = dense;
  return a.panel_bytes() * static_cast<size_t>((rows + kPanel - 1) / kPanel);
}

}  // namespace paceline
