// How keys and values lie in memory, and how they get there: tiles of 16 positions of one head.
//
//   key tile:   [head_dim][16 positions] T     scores of 16 positions at once, without a reduction
//   value tile: [16 positions][head_dim] T
// T is float, half or int8_t. An int8_t tile ends with 16 floats, what its positions' integers count
// in. A position is rounded from its own values only, so its bits never depend on a neighbour.
#pragma once

#include <cstddef>
#include <limits>
#include <type_traits>

#include "vec.h"

namespace paceline {

enum KvKind : int32_t { kKvFloat = 0, kKvHalf = 1, kKvInt8 = 2 };

// Calls use(T{}) with the type of the elements.
template <class Use>
inline auto with_kv_type(int32_t kind, const Use& use) {
  if (kind == kKvHalf) return use(half{});
  if (kind == kKvInt8) return use(int8_t{});
  return use(float{});
}

template <class T>
constexpr bool is_scaled = std::is_same_v<T, int8_t>;

// The scales of a tile's 16 positions.
template <class T>
inline const float* tile_scales(const T* tile, int head_dim) {
  return reinterpret_cast<const float*>(tile + static_cast<size_t>(kLanes) * head_dim);
}
// What sixteen sums over a tile's elements stand for, one a position.
template <class T>
inline F16 scaled(F16 sums, const T* tile, int head_dim) {
  if constexpr (is_scaled<T>) return sums * load(tile_scales(tile, head_dim));
  return sums;
}

struct KvShape {
  int block_size, kv_heads, head_dim;

  template <class T>
  size_t tile_elements() const {
    return static_cast<size_t>(kLanes) * head_dim + (is_scaled<T> ? kLanes * sizeof(float) : 0);
  }
  // Offset of the tile that holds position i of a block.
  template <class T>
  size_t tile_offset(int block, int head, int i) const {
    const size_t at = (static_cast<size_t>(block) * kv_heads + head) * (block_size / kLanes);
    return (at + i / kLanes) * tile_elements<T>();
  }
  template <class T>
  size_t block_elements() const {
    return static_cast<size_t>(kv_heads) * (block_size / kLanes) * tile_elements<T>();
  }
  size_t block_bytes(int32_t kind) const {
    return with_kv_type(kind, [this](auto t) { return block_elements<decltype(t)>() * sizeof t; });
  }
};

// What one position of one head is rounded to: integers of magnitude 127 at most, times `scale`.
// Values that are not finite leave zeros and a nan as the scale: they spoil their own row.
struct Rounding {
  float scale;
  F16 inverse;

  Rounding(const float* x, int n) {
    F16 largest = splat(0.0f), poison = splat(0.0f);
    for (int i = 0; i < n; i += kLanes) {
      const F16 v = load(x + i);
      largest = max(largest, abs(v));
      poison = poison + v * splat(0.0f);  // nan for a nan or an infinity, where a maximum may lose it
    }
    const float top = reduce_max(largest);
    const bool finite = reduce_add(poison) == 0.0f, zero = !(top > 1e-35f);
    scale = !finite ? std::numeric_limits<float>::quiet_NaN() : zero ? 0.0f : top / 127.0f;
    inverse = splat(!finite || zero ? 0.0f : 127.0f / top);
  }
  void put(const float* x, int8_t* out) const {
    store_bytes(out, round_to_int(scale == scale ? load(x) * inverse : splat(0.0f)));
  }
};

// Writes key and value of position i % 16 of a tile; consecutive dims of a key are 16 apart.
template <class T>
inline void store_kv(const float* key, const float* value, int head_dim, int i, T* key_tile,
                     T* value_tile) {
  T* key_out = key_tile + i % kLanes;
  T* value_out = value_tile + static_cast<size_t>(i % kLanes) * head_dim;
  const auto store_all = [&](const auto& put_key, const auto& put_value) {
    for (int d = 0; d < head_dim; d += kLanes) {
      T lanes[kLanes];
      put_key(key + d, lanes);
      for (int j = 0; j < kLanes; ++j) key_out[(d + j) * kLanes] = lanes[j];
      put_value(value + d, value_out + d);
    }
  };
  if constexpr (is_scaled<T>) {
    const Rounding of_key(key, head_dim), of_value(value, head_dim);
    store_all([&](const float* x, T* out) { of_key.put(x, out); },
              [&](const float* x, T* out) { of_value.put(x, out); });
    const_cast<float*>(tile_scales(key_tile, head_dim))[i % kLanes] = of_key.scale;
    const_cast<float*>(tile_scales(value_tile, head_dim))[i % kLanes] = of_value.scale;
  } else {
    const auto put = [](const float* x, T* out) { store(out, load(x)); };
    store_all(put, put);
  }
}

}  // namespace paceline
