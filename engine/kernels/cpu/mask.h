// Logits under a mask of bits: what may not come gets -inf added, so that a nan stays one.
//
// What may come keeps its bits. Knows no rows and no rules.
#pragma once

#include <limits>

#include "vec.h"

namespace paceline {

// Lane i of `a` plus -inf where bit i of `allowed` is 0; bits from kLanes on are ignored.
inline F16 banned(F16 a, uint32_t allowed) {
  const F16 other = a + splat(-std::numeric_limits<float>::infinity());
#if defined(PACELINE_AVX512)
  return {_mm512_mask_mov_ps(other.v, static_cast<__mmask16>(allowed), a.v)};
#elif defined(PACELINE_AVX2)
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const auto chosen = [&](uint32_t bits, __m256 without, __m256 with) {
    const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), each);
    return _mm256_blendv_ps(without, with, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, each)));
  };
  return {chosen(allowed, other.lo, a.lo), chosen(allowed >> 8, other.hi, a.hi)};
#elif defined(PACELINE_NEON)
  const uint32_t weights[4] = {1, 2, 4, 8};
  return vectorwise<F16>([&](int i) {
    const uint32x4_t set = vtstq_u32(vdupq_n_u32(allowed >> (4 * i)), vld1q_u32(weights));
    return vbslq_f32(set, a.v[i], other.v[i]);
  });
#else
  return lanewise<F16>([&](int i) { return allowed >> i & 1 ? a.v[i] : other.v[i]; });
#endif
}

// n logits, and a bit for each, the lowest of a word first.
inline void ban(float* logits, int n, const uint32_t* mask) {
  constexpr uint32_t all = (1u << kLanes) - 1;
  const auto bits = [&](int i) { return mask[i / 32] >> (i % 32); };
  int i = 0;
  for (; i + kLanes <= n; i += kLanes)
    if ((bits(i) & all) != all) store(logits + i, banned(load(logits + i), bits(i)));
  for (; i < n; ++i)
    if (!(bits(i) & 1)) logits[i] += -std::numeric_limits<float>::infinity();
}

}  // namespace paceline
