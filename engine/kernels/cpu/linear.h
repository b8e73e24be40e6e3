// A weight matrix [n outputs, k inputs], packed once into tiles of 32 outputs, and its product with
// one panel of activations. Knows nothing of layers or threads.
//
//   quantised tile: [K/32] blocks of quants (512 or 1024 bytes, see dot.h) and 32 scales, half; so a
//                   matrix is one sequential stream
//   Q4_1:           w = (scale * (q - 8) + minimum) * unit: blocks of quants and 32 pairs of int16,
//                   scale and minimum, which multiply exact sums; after the blocks 32 fp32 units
//   dense tile:     [K][32] fp32, fp16 or bf16
//   spread, 8 bit:  each row was transformed (hadamard.h) and rounded again, so that its inputs, to be
//                   transformed too, lose less when they are rounded: some channels are far larger
#pragma once

#include "activations.h"

namespace paceline {

constexpr int kTile = 32;  // outputs

enum class Kind : int32_t { kQ4_0 = 0, kQ4_1 = 1, kQ8_0 = 2, kF32 = 3, kF16 = 4, kBF16 = 5 };

constexpr bool is_dense(Kind kind) { return kind >= Kind::kF32; }
constexpr int dense_bytes(Kind kind) { return kind == Kind::kF32 ? 4 : 2; }
constexpr int quant_bytes(Kind kind) { return kind == Kind::kQ8_0 ? 1024 : 512; }
constexpr int block_bytes(Kind kind) {
  return quant_bytes(kind) + (kind == Kind::kQ4_1 ? 128 : 64);
}

struct Linear {
  Kind kind = Kind::kF32;
  int n = 0, k = 0;
  const uint8_t* tiles = nullptr;
  const float* bias = nullptr;  // [n rounded up to 32] or null
  bool spread = false;

  int num_tiles() const { return (n + kTile - 1) / kTile; }
  size_t tile_bytes() const {
    const size_t blocks = static_cast<size_t>(k / kBlock);
    const size_t bytes = is_dense(kind)
                             ? static_cast<size_t>(k) * kTile * dense_bytes(kind)
                             : blocks * block_bytes(kind);
    return (bytes + (kind == Kind::kQ4_1 ? kTile * sizeof(float) : 0) + 63) / 64 * 64;
  }
  const float* units(const uint8_t* tile) const {
    return reinterpret_cast<const float*>(tile + static_cast<size_t>(k / kBlock) * block_bytes(kind));
  }
  const uint8_t* tile(int i) const { return tiles + tile_bytes() * static_cast<size_t>(i); }
};

template <Kind K>
inline F16 load_weights(const uint8_t* p) {
  if constexpr (K == Kind::kF32) return load(reinterpret_cast<const float*>(p));
  if constexpr (K == Kind::kF16) return load(reinterpret_cast<const half*>(p));
  return widen_bf16(reinterpret_cast<const uint16_t*>(p));
}

// A tile that is wanted soon, fetched some cache lines at a time while another is multiplied.
class Ahead {
 public:
  static constexpr int kBlocks = 6;  // between two fetches: one for each block would slow the loop

  Ahead() = default;  // nothing
  // The tile after this one, in the course of a product with `panels` panels, two passes each.
  Ahead(const Linear& w, int tile, int panels)
      : at_(w.tile(tile + 1)), end_(at_ + w.tile_bytes()) {
    const int64_t lines = static_cast<int64_t>(w.tile_bytes()) / kLine;
    const int64_t fetches = static_cast<int64_t>((w.k / kBlock + kBlocks - 1) / kBlocks) * panels * 2;
    size_ = static_cast<int>((lines + fetches - 1) / fetches) * kLine;
  }
  void fetch() {
    if (at_ >= end_) return;
    for (const uint8_t* const last = at_ + size_; at_ < last; at_ += kLine) __builtin_prefetch(at_, 0, 2);
  }

 private:
  static constexpr int kLine = 64;
  const uint8_t *at_ = nullptr, *end_ = nullptr;
  int size_ = 0;
};

// out[row of the panel][32] for one tile; `rows` of the panel's eight rows are in use. An output
// depends on its own row only, and its order over K is fixed.
void multiply(const Linear& w, int tile, const Activations& a, int panel, int rows, Ahead& ahead,
              float (*out)[kTile]);

// Packs tile `tile` from rows as the file has them: GGUF blocks, or plain fp32, fp16 or bf16.
// Outputs past n are zero.
void pack_tile(const Linear& w, int tile, const uint8_t* source, size_t row_bytes,
               uint8_t* out);

// Row `row` of the matrix as fp32, for embeddings; not spread.
void unpack_row(const Linear& w, int row, float* out);

}  // namespace paceline
