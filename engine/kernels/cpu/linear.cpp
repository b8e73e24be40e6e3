// Packing weights into tiles at load, and reading one row back for embeddings.
#include "linear.h"

namespace paceline {
namespace {

// A block of 32 weights as GGUF stores it: half scale, half minimum (Q4_1 only), quants.
constexpr size_t file_block_bytes(Kind kind) {
  return kind == Kind::kQ4_0 ? 18 : kind == Kind::kQ4_1 ? 20 : 34;
}

// Where weight byte i of output `lane` lies in a block.
size_t quant_offset(int lane, int i) { return i / 4 * (4 * kTile) + lane * 4 + i % 4; }

void pack_quant_block(Kind kind, const uint8_t* block, int lane, uint8_t* quants) {
  uint8_t* scales = quants + quant_bytes(kind);
  const bool has_min = kind == Kind::kQ4_1;
  std::memcpy(scales + 2 * lane, block, 2);
  if (has_min) std::memcpy(scales + 2 * (kTile + lane), block + 2, 2);
  const uint8_t* q = block + (has_min ? 4 : 2);
  const uint8_t flip = kind == Kind::kQ8_0 ? 0x80 : 0;  // signed to offset 128
  for (int i = 0; i < quant_bytes(kind) / kTile; ++i) quants[quant_offset(lane, i)] = q[i] ^ flip;
}

float lane_of(const half* p, int lane) {
  float x[kLanes];
  store(x, load(p + lane / kLanes * kLanes));
  return x[lane % kLanes];
}

}  // namespace

void pack_tile(const Linear& w, int tile, const uint8_t* source, size_t row_bytes,
               uint8_t* out) {
  std::memset(out, 0, w.tile_bytes());
  const size_t num_blocks = static_cast<size_t>(w.k / kBlock);
  for (int lane = 0; lane < kTile && tile * kTile + lane < w.n; ++lane) {
    const int n = tile * kTile + lane;
    const uint8_t* row = source + static_cast<size_t>(n) * row_bytes;
    if (is_dense(w.kind)) {
      const size_t size = dense_bytes(w.kind);
      for (int k = 0; k < w.k; ++k)
        std::memcpy(out + (static_cast<size_t>(k) * kTile + lane) * size, row + k * size, size);
      continue;
    }
    for (size_t b = 0; b < num_blocks; ++b)
      pack_quant_block(w.kind, row + b * file_block_bytes(w.kind), lane,
                       out + b * block_bytes(w.kind));
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
    const float scale = lane_of(scales, lane);
    const float minimum = w.kind == Kind::kQ4_1 ? lane_of(scales + kTile, lane) : 0.0f;
    const int zero = w.kind == Kind::kQ4_0 ? 8 : w.kind == Kind::kQ8_0 ? 128 : 0;
    for (int k = 0; k < kBlock; ++k) {
      const int i = nibbles ? k % 16 : k;
      const int byte = quants[quant_offset(lane, i)];
      const int q = !nibbles ? byte : k < 16 ? byte & 15 : byte >> 4;
      out[b * kBlock + k] = scale * static_cast<float>(q - zero) + minimum;
    }
  }
}

}  // namespace paceline
