// How keys and values lie in memory, and how they get there: tiles of 16 positions of one head.
//
//   key tile:   [head_dim / P][16 positions][P] T    scores of 16 positions at once, no reduction
//   value tile: [16 positions / P][head_dim][P] T
// The two tiles of the same positions lie side by side: memory gives longer pieces at a higher rate.
// T is float, with P = 1, or int16_t or int8_t, with P = 2: dims of a key and positions of a value
// lie in pairs, as pairs.h multiplies them. A tile of integers ends with 16 floats, what its
// positions' integers count in. A position is rounded from its own values only, so its bits never
// depend on a neighbour. Keys have a few channels of large values, beside which 8 bits would leave the
// others little: they are spread over all channels first, and queries in the same way.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>

#include "hadamard.h"
#include "pairs.h"

namespace paceline {

enum KvKind : int32_t { kKvFloat = 0, kKvInt16 = 1, kKvInt8 = 2 };

// Calls use(T{}) with the type of the elements.
template <class Use>
inline auto with_kv_type(int32_t kind, const Use& use) {
  if (kind == kKvInt16) return use(int16_t{});
  if (kind == kKvInt8) return use(int8_t{});
  return use(float{});
}

constexpr int kMaxHeadDim = 1024;  // see Rounding

template <class T>
constexpr bool is_scaled = !std::is_same_v<T, float>;
template <class T>
constexpr bool is_spread = std::is_same_v<T, int8_t>;  // its keys, see hadamard.h
template <class T>
constexpr int kPair = is_scaled<T> ? 2 : 1;

// The scales of a tile's 16 positions.
template <class T>
inline const float* tile_scales(const T* tile, int head_dim) {
  return reinterpret_cast<const float*>(tile + static_cast<size_t>(kLanes) * head_dim);
}

struct KvShape {
  int block_size, kv_heads, head_dim;

  template <class T>
  size_t tile_elements() const {
    return static_cast<size_t>(kLanes) * head_dim +
           (is_scaled<T> ? kLanes * sizeof(float) / sizeof(T) : 0);
  }
  // Offset of the key tile that holds position i of a block; its value tile is tile_elements later.
  template <class T>
  size_t tile_offset(int block, int head, int i) const {
    const size_t at = (static_cast<size_t>(block) * kv_heads + head) * (block_size / kLanes);
    return (at + i / kLanes) * 2 * tile_elements<T>();
  }
  template <class T>
  size_t block_elements() const {
    return static_cast<size_t>(kv_heads) * (block_size / kLanes) * 2 * tile_elements<T>();
  }
  size_t block_bytes(int32_t kind) const {
    return with_kv_type(kind, [this](auto t) { return block_elements<decltype(t)>() * sizeof t; });
  }
};

// What one head of a key, a value or a query is rounded to: integers of T times `scale`.
//
// In 16 bits their Euclidean norm is 46300 at most, so that the product of two such heads, of any
// width up to 1,024, stays below 46316^2 < 2^31, in all of its parts too (Cauchy and Schwarz).
// Values that are not finite, or too large to be squared, leave zeros and a nan as the scale: they
// spoil their own row.
template <class T>
class Rounding {
 public:
  Rounding(const float* x, int n) {
    F16 largest = splat(0.0f), squares = splat(0.0f);
    for (int i = 0; i < n; i += kLanes) {
      const F16 v = load(x + i);
      largest = max(largest, abs(v));
      squares = fma(v, v, squares);  // nan or infinite for such a value, which a maximum may lose
    }
    const float top = reduce_max(largest), square = reduce_add(squares);
    const bool finite = square - square == 0.0f;
    float inverse;
    if constexpr (sizeof(T) == 1) {
      keep_ = finite && top > 1e-35f;  // the inverse of less would be infinite
      scale_ = top / 127.0f;
      inverse = 127.0f / top;
    } else {
      keep_ = finite && square > 1e-30f;  // the square of less has lost digits
      scale_ = std::max(top * (1.0f / 32767.0f), std::sqrt(square) * (1.0f / 46300.0f));
      inverse = 1.0f / scale_;
    }
    if (!keep_) scale_ = finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    inverse_ = splat(keep_ ? inverse : 0.0f);
  }
  float scale() const { return scale_; }
  void put(const float* x, T* out) const {
    const I16 whole = round_to_int(keep_ ? load(x) * inverse_ : splat(0.0f));
    if constexpr (sizeof(T) == 1)
      store_bytes(out, whole);
    else
      store_words(out, whole);
  }

 private:
  float scale_;
  bool keep_;
  F16 inverse_;
};

// Writes key and value of position i % 16 of a tile.
template <class T>
inline void store_kv(const float* key, const float* value, int head_dim, int i, T* key_tile) {
  constexpr int P = kPair<T>;
  T* value_tile = key_tile + KvShape{0, 0, head_dim}.tile_elements<T>();
  i %= kLanes;
  T* key_out = key_tile + i * P;
  T* value_out = value_tile + static_cast<size_t>(i / P) * head_dim * P + i % P;
  const auto store_all = [&](const auto& put_key, const auto& put_value) {
    for (int d = 0; d < head_dim; d += kLanes) {
      T lanes[kLanes];
      put_key(key + d, lanes);
      for (int j = 0; j < kLanes; j += P)
        std::memcpy(key_out + (d + j) * kLanes, lanes + j, P * sizeof(T));
      put_value(value + d, lanes);
      for (int j = 0; j < kLanes; ++j) value_out[(d + j) * P] = lanes[j];
    }
  };
  float spread[kMaxHeadDim];
  if constexpr (is_spread<T>) {
    hadamard(key, head_dim, spread);
    key = spread;
  }
  if constexpr (is_scaled<T>) {
    const Rounding<T> of_key(key, head_dim), of_value(value, head_dim);
    store_all([&](const float* x, T* out) { of_key.put(x, out); },
              [&](const float* x, T* out) { of_value.put(x, out); });
    const_cast<float*>(tile_scales(key_tile, head_dim))[i] = of_key.scale();
    const_cast<float*>(tile_scales(value_tile, head_dim))[i] = of_value.scale();
  } else {
    const auto put = [](const float* x, T* out) { store(out, load(x)); };
    store_all(put, put);
  }
}

}  // namespace paceline
