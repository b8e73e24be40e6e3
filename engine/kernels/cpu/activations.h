// Layout of the activations that a linear reads: panels of eight rows, quantised or fp32.
//
//   quantised: panel p, block b (32 values of K) -> QuantBlock, eight rows side by side
//   dense:     panel p, value k                  -> eight floats, one per row
//
// Some channels of a model are far larger than the others, and 8 bits of a block with such a one say
// little of its 31 others. So a block may have a second term, which holds what rounding left over:
//   refined:   after the blocks of panel p as many second terms, and a bit for each that is there
//
// A row is quantised from its own values only, so it never depends on its neighbours.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

#include "vec.h"

namespace paceline {

constexpr int kBlock = 32;  // values of K that share a scale
constexpr int kPanel = 8;   // rows of a panel
// A value this many times its row's root mean square gives its block a second term.
constexpr float kOutlier = 16.0f;

struct QuantBlock {
  int8_t q[kPanel][kBlock];      // round(x / scale), |q| <= 127
  float scale[kPanel];           // max |x| / 127; nan if the block holds a nan or an infinity
  int32_t start[kPanel];         // -8 * (sum of q): takes off the zero point of 4-bit weights
  int32_t high_sum[kPanel];      // (sum of q) << 16: meets the minimum of Q4_1 weights
};

// The largest |x| of a block; a nan if it holds a nan or an infinity.
inline float largest_in(const float* x) {
  const uint32_t bits = largest_bits(abs(load(x)), abs(load(x + kLanes)));
  float largest;
  std::memcpy(&largest, &bits, sizeof largest);
  return bits < 0x7f800000 ? largest : std::numeric_limits<float>::quiet_NaN();
}

// Returns the scale.
inline float quantise_block(const float* x, QuantBlock& out, int row) {
  const float largest = largest_in(x);
  // a subnormal maximum would make the inverse infinite; such a block is zero
  const bool some = largest > 1e-35f, finite = largest == largest;
  const F16 inverse = splat(some ? 127.0f / largest : 0.0f);
  int8_t* q = out.q[row];
  for (int k = 0; k < kBlock; k += kLanes)
    store_bytes(q + k, round_to_int((finite ? load(x + k) : splat(0.0f)) * inverse));
  const int32_t sum = sum_bytes(q);
  out.scale[row] = some ? largest / 127.0f : 0.0f * largest;
  out.start[row] = -8 * sum;
  out.high_sum[row] = sum * 65536;
  return out.scale[row];
}

inline float mean_square(const float* x, int n) {
  F16 sum = splat(0.0f);
  for (int i = 0; i < n; i += kLanes) {
    const F16 v = load(x + i);
    sum = fma(v, v, sum);
  }
  return reduce_add(sum) / static_cast<float>(n);
}

// A matrix of activations in one of these layouts; a view, the memory is the caller's.
struct Activations {
  uint8_t* data = nullptr;
  int num_blocks = 0;  // K / 32
  bool dense = false;
  bool refined = false;  // and not dense: blocks may have second terms

  size_t panel_bytes() const {
    const size_t blocks = static_cast<size_t>(num_blocks);
    if (dense) return sizeof(float) * kBlock * kPanel * blocks;
    return refined ? (2 * sizeof(QuantBlock) * blocks + mark_words() * sizeof(uint64_t) + 63) / 64 * 64
                   : sizeof(QuantBlock) * blocks;
  }
  size_t mark_words() const { return static_cast<size_t>(num_blocks + 63) / 64; }
  QuantBlock* quant_panel(int panel) const {
    return reinterpret_cast<QuantBlock*>(data + panel * panel_bytes());
  }
  float* dense_panel(int panel) const {
    return reinterpret_cast<float*>(data + panel * panel_bytes());
  }
  QuantBlock* second_terms(int panel) const { return quant_panel(panel) + num_blocks; }
  // Bit b: some row of the panel has a second term in block b; it is zero in the others.
  uint64_t* marks(int panel) const {
    return reinterpret_cast<uint64_t*>(quant_panel(panel) + 2 * num_blocks);
  }
  bool has_second_terms(int panel) const {
    return refined && std::any_of(marks(panel), marks(panel) + mark_words(),
                                  [](uint64_t word) { return word != 0; });
  }
  // visit(block, term) for the second terms of a panel, in their order.
  template <class Visit>
  void each_second_term(int panel, const Visit& visit) const {
    for (size_t word = 0; word < mark_words(); ++word)
      for (uint64_t left = marks(panel)[word]; left; left &= left - 1) {
        const int block = static_cast<int>(word) * 64 + __builtin_ctzll(left);
        visit(block, second_terms(panel)[block]);
      }
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
  // The same, refined where a value is beyond `limit`. All blocks of a row in their order, and the
  // rows of a panel in theirs, by one thread.
  void put_refined(int row, int block, const float* x, float limit) const {
    if (!refined) return put(row, block, x);
    const int panel = row / kPanel, r = row % kPanel;
    QuantBlock& first = quant_panel(panel)[block];
    const float scale = quantise_block(x, first, r);  // or nan
    uint64_t* const words = marks(panel);
    if (r == 0 && block == 0) std::memset(words, 0, mark_words() * sizeof *words);
    if (!(scale * 127.0f > limit)) return;
    QuantBlock& second = second_terms(panel)[block];
    const uint64_t bit = uint64_t{1} << block % 64;
    if (!(words[block / 64] & bit)) std::memset(&second, 0, sizeof second);
    words[block / 64] |= bit;
    float left[kBlock];
    for (int k = 0; k < kBlock; ++k) left[k] = x[k] - scale * static_cast<float>(first.q[r][k]);
    quantise_block(left, second, r);
  }
  void put_row(int row, const float* x) const {
    const float limit = kOutlier * std::sqrt(mean_square(x, num_blocks * kBlock));
    for (int b = 0; b < num_blocks; ++b) put_refined(row, b, x + b * kBlock, limit);
  }
};

inline size_t activation_bytes(int rows, const Activations& a) {
  return a.panel_bytes() * static_cast<size_t>((rows + kPanel - 1) / kPanel);
}

}  // namespace paceline
