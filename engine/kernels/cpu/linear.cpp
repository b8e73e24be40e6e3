// Packing weights into tiles at load, and reading one row back for embeddings.
#include <algorithm>
#include <vector>

#include "hadamard.h"
#include "linear.h"

namespace paceline {
namespace {

// A block of 32 weights as GGUF stores it: half scale, half minimum (Q4_1 only), quants.
constexpr size_t file_block_bytes(Kind kind) {
  return kind == Kind::kQ4_0 ? 18 : kind == Kind::kQ4_1 ? 20 : 34;
}

// Where weight byte i of output `lane` lies in a block.
size_t quant_offset(int lane, int i) { return i / 4 * (4 * kTile) + lane * 4 + i % 4; }

// Scale and minimum of a block of Q4_1, the latter for nibbles less 8.
struct Range {
  float scale, minimum;
  explicit Range(const uint8_t* block) {
    half bits[kLanes] = {};
    std::memcpy(bits, block, 2 * sizeof(half));
    float values[kLanes];
    store(values, load(bits));
    scale = values[0];
    minimum = values[1] + 8.0f * scale;
  }
};

// One output's unit: such that all its scales and minima fit int16. Of a nan or an infinity, a nan.
float unit_of(const uint8_t* row, size_t num_blocks) {
  float largest = 0.0f, poison = 0.0f;
  for (size_t b = 0; b < num_blocks; ++b) {
    const Range range(row + b * file_block_bytes(Kind::kQ4_1));
    largest = std::fmax(largest, std::fmax(std::fabs(range.scale), std::fabs(range.minimum)));
    poison += 0.0f * range.minimum;
  }
  return largest / 32767.0f + poison;
}

int16_t in_units(float x, float unit) {
  return unit > 0.0f ? static_cast<int16_t>(std::lrint(x / unit)) : int16_t{0};
}

void pack_range(const uint8_t* block, float unit, int lane, uint8_t* pairs) {
  const Range range(block);
  const int16_t pair[2] = {in_units(range.scale, unit), in_units(range.minimum, unit)};
  std::memcpy(pairs + sizeof pair * static_cast<size_t>(lane), pair, sizeof pair);
}

void pack_quant_block(Kind kind, const uint8_t* block, int lane, uint8_t* quants) {
  if (kind != Kind::kQ4_1) std::memcpy(quants + quant_bytes(kind) + 2 * lane, block, 2);
  const uint8_t* q = block + (kind == Kind::kQ4_1 ? 4 : 2);
  const uint8_t flip = kind == Kind::kQ8_0 ? 0x80 : 0;  // signed to offset 128
  for (int i = 0; i < quant_bytes(kind) / kTile; ++i) quants[quant_offset(lane, i)] = q[i] ^ flip;
}

// The least half that is no less than x, which is not negative; of a nan, a nan.
half half_above(float x) {
  if (x == 0.0f) return 0;
  if (!(x <= 65504.0f)) return x != x ? 0x7e00 : 0x7c00;
  int exponent;
  std::frexp(x, &exponent);
  const int last = std::max(exponent - 11, -24);  // of the last bit; a carry counts the exponent up
  return static_cast<half>(((last + 24) << 10) + static_cast<int>(std::ceil(std::ldexp(x, -last))));
}

float lane_of(const half* p, int lane) {
  float x[kLanes];
  store(x, load(p + lane / kLanes * kLanes));
  return x[lane % kLanes];
}

float scale_of(const uint8_t* block) {
  half bits[kLanes] = {};
  std::memcpy(bits, block, sizeof(half));
  return lane_of(bits, 0);
}

// 32 values as a block of 8 bits.
void round_block(const float* x, uint8_t* block) {
  const half bits = half_above(largest_in(x) / 127.0f);
  std::memcpy(block, &bits, sizeof bits);
  const float scale = scale_of(block);
  const bool some = scale > 0.0f && std::isfinite(scale);
  for (int k = 0; k < kBlock; k += kLanes) {
    const F16 whole = some ? load(x + k) * splat(1.0f / scale) : splat(0.0f);
    store_bytes(reinterpret_cast<int8_t*>(block) + sizeof(half) + k, round_to_int(whole));
  }
}

// A row of 8-bit blocks, transformed and rounded again.
void spread_row(const uint8_t* row, int k, std::vector<uint8_t>& out) {
  constexpr size_t size = file_block_bytes(Kind::kQ8_0);
  std::vector<float> x(k);
  for (int b = 0; b < k / kBlock; ++b) {
    const float scale = scale_of(row + b * size);
    for (int i = 0; i < kBlock; ++i)
      x[b * kBlock + i] = scale * static_cast<int8_t>(row[b * size + sizeof(half) + i]);
  }
  spread(x.data(), k, x.data());
  out.resize(k / kBlock * size);
  for (int b = 0; b < k / kBlock; ++b) round_block(&x[b * kBlock], &out[b * size]);
}

}  // namespace

void pack_tile(const Linear& w, int tile, const uint8_t* source, size_t row_bytes,
               uint8_t* out) {
  std::memset(out, 0, w.tile_bytes());
  const size_t num_blocks = static_cast<size_t>(w.k / kBlock);
  std::vector<uint8_t> spread_blocks;
  for (int lane = 0; lane < kTile && tile * kTile + lane < w.n; ++lane) {
    const int n = tile * kTile + lane;
    const uint8_t* row = source + static_cast<size_t>(n) * row_bytes;
    if (is_dense(w.kind)) {
      const size_t size = dense_bytes(w.kind);
      for (int k = 0; k < w.k; ++k)
        std::memcpy(out + (static_cast<size_t>(k) * kTile + lane) * size, row + k * size, size);
      continue;
    }
    if (w.spread) {
      spread_row(row, w.k, spread_blocks);
      row = spread_blocks.data();
    }
    const bool has_unit = w.kind == Kind::kQ4_1;
    const float unit = has_unit ? unit_of(row, num_blocks) : 0.0f;
    for (size_t b = 0; b < num_blocks; ++b) {
      const uint8_t* block = row + b * file_block_bytes(w.kind);
      uint8_t* quants = out + b * block_bytes(w.kind);
      pack_quant_block(w.kind, block, lane, quants);
      if (has_unit) pack_range(block, unit, lane, quants + quant_bytes(w.kind));
    }
    if (has_unit)
      std::memcpy(out + num_blocks * block_bytes(w.kind) + sizeof unit * lane, &unit, sizeof unit);
  }
}

void unpack_row(const Linear& w, int row, float* out) {
  const uint8_t* tile = w.tile(row / kTile);
  const int lane = row % kTile;
  if (is_dense(w.kind)) {
    for (int k = 0; k < w.k; ++k) {
      const uint8_t* p = tile + (static_cast<size_t>(k) * kTile + lane / kLanes * kLanes) * dense_bytes(w.kind);
      float x[kLanes];
      store(x, w.kind == Kind::kF32   ? load_weights<Kind::kF32>(p)
               : w.kind == Kind::kF16 ? load_weights<Kind::kF16>(p)
                                      : load_weights<Kind::kBF16>(p));
      out[k] = x[lane % kLanes];
    }
    return;
  }
  const int num_blocks = w.k / kBlock;
  const bool nibbles = w.kind != Kind::kQ8_0;
  for (int b = 0; b < num_blocks; ++b) {
    const uint8_t* quants = tile + static_cast<size_t>(b) * block_bytes(w.kind);
    const half* scales = reinterpret_cast<const half*>(quants + quant_bytes(w.kind));
    float scale, minimum = 0.0f;
    if (w.kind == Kind::kQ4_1) {
      const float unit = w.units(tile)[lane];
      int16_t pair[2];
      std::memcpy(pair, reinterpret_cast<const uint8_t*>(scales) + sizeof pair * lane, sizeof pair);
      scale = unit * static_cast<float>(pair[0]);
      minimum = unit * static_cast<float>(pair[1]);
    } else {
      scale = lane_of(scales, lane);
    }
    const int zero = nibbles ? 8 : 128;
    for (int k = 0; k < kBlock; ++k) {
      const int i = nibbles ? k % 16 : k;
      const int byte = quants[quant_offset(lane, i)];
      const int q = !nibbles ? byte : k < 16 ? byte & 15 : byte >> 4;
      out[b * kBlock + k] = scale * static_cast<float>(q - zero) + minimum;
    }
  }
  if (w.spread) spread(out, w.k, out);
}

}  // namespace paceline
