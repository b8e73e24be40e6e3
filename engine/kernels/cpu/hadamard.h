// The Hadamard transform: spreads what one channel holds over all, and leaves scalar products alone
// but for a factor. Knows nothing of keys, queries or weights.
#pragma once

#include <cmath>

#include "vec.h"

namespace paceline {

// Values are transformed by blocks of the largest power of two that divides their number, a multiple
// of kLanes; scalar products of two transformed vectors grow by as much.
constexpr int hadamard_block(int n) { return n & -n; }

// Lane i becomes the sum of lanes i and i ^ H where bit H of i is clear, else their difference.
template <int H>
inline F16 butterfly(F16 a) {
  alignas(64) static constexpr float kSigns[2][kLanes] = {
      {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
      {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1}};
  alignas(64) static constexpr float kLongSigns[2][kLanes] = {
      {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
      {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1}};
  const float* signs = H < 4 ? kSigns[H / 2] : kLongSigns[H / 8];
  return fma(a, load(signs), swap_lanes<H>(a));
}

// out = the transform of x, both [n]; n: a multiple of kLanes. They may be the same.
inline void hadamard(const float* x, int n, float* out) {
  for (int i = 0; i < n; i += kLanes)
    store(out + i, butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load(x + i))))));
  for (int h = kLanes; h < hadamard_block(n); h *= 2)
    for (int i = 0; i < n; i += 2 * h)
      for (int j = i; j < i + h; j += kLanes) {
        const F16 a = load(out + j), b = load(out + j + h);
        store(out + j, a + b);
        store(out + j + h, a - b);
      }
}

// The same, so scaled that scalar products stay what they are; done twice it gives x again.
inline void spread(const float* x, int n, float* out) {
  hadamard(x, n, out);
  const F16 factor = splat(1.0f / std::sqrt(static_cast<float>(hadamard_block(n))));
  for (int i = 0; i < n; i += kLanes) store(out + i, load(out + i) * factor);
}

}  // namespace paceline
