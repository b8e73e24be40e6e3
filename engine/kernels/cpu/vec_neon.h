// The sixteen lanes of vec.h as four vectors of 64-bit ARM; the same bits as every other tier.
//
// ARM's own maximum and minimum treat nans and signed zeros in another way than those of x86, so max
// and min here compare and select. Knows nothing of models or layouts.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace paceline {

using half = uint16_t;  // IEEE binary16 bits

struct F16 {
  float32x4_t v[4];
};
struct I16 {
  int32x4_t v[4];
};

// The vectors f(0) .. f(3).
template <class V, class F>
inline V vectorwise(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}

inline F16 load(const float* p) {
  return vectorwise<F16>([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline F16 load(const half* p) {
  return vectorwise<F16>(
      [&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline void store(float* p, F16 a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
inline void store_bytes(int8_t* p, I16 a) {
  const int16x8_t lo = vcombine_s16(vmovn_s32(a.v[0]), vmovn_s32(a.v[1]));
  const int16x8_t hi = vcombine_s16(vmovn_s32(a.v[2]), vmovn_s32(a.v[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(lo), vmovn_s16(hi)));
}
inline F16 splat(float x) {
  return vectorwise<F16>([&](int) { return vdupq_n_f32(x); });
}
inline I16 splat(int32_t x) {
  return vectorwise<I16>([&](int) { return vdupq_n_s32(x); });
}
inline F16 operator+(F16 a, F16 b) {
  return vectorwise<F16>([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
inline F16 operator-(F16 a, F16 b) {
  return vectorwise<F16>([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
inline F16 operator*(F16 a, F16 b) {
  return vectorwise<F16>([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline F16 operator/(F16 a, F16 b) {
  return vectorwise<F16>([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
inline I16 operator+(I16 a, I16 b) {
  return vectorwise<I16>([&](int i) { return vaddq_s32(a.v[i], b.v[i]); });
}
inline F16 fma(F16 a, F16 b, F16 c) {
  return vectorwise<F16>([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
// The second operand wins unless the first is greater.
inline float32x4_t max_of(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline float32x4_t min_of(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline F16 max(F16 a, F16 b) {
  return vectorwise<F16>([&](int i) { return max_of(a.v[i], b.v[i]); });
}
inline F16 min(F16 a, F16 b) {
  return vectorwise<F16>([&](int i) { return min_of(a.v[i], b.v[i]); });
}
inline F16 abs(F16 a) {
  return vectorwise<F16>([&](int i) { return vabsq_f32(a.v[i]); });
}
inline F16 to_float(I16 a) {
  return vectorwise<F16>([&](int i) { return vcvtq_f32_s32(a.v[i]); });
}
// Nan becomes 0 and what is out of range the nearest integer, where the other tiers have INT_MIN: no
// result depends on them, since a nan among floats stays one whatever it is multiplied with.
inline I16 round_to_int(F16 a) {
  return vectorwise<I16>([&](int i) { return vcvtnq_s32_f32(a.v[i]); });
}
inline F16 rounded(F16 a) {
  return vectorwise<F16>([&](int i) { return vrndnq_f32(a.v[i]); });
}
template <int N>
inline I16 shift_left(I16 a) {
  return vectorwise<I16>([&](int i) { return vshlq_n_s32(a.v[i], N); });
}
inline F16 as_float(I16 a) {
  return vectorwise<F16>([&](int i) { return vreinterpretq_f32_s32(a.v[i]); });
}
inline F16 keep(F16 a, int first, int last, float fill) {
  const int32x4_t low = vdupq_n_s32(first), high = vdupq_n_s32(last);
  const int32_t lanes[4] = {0, 1, 2, 3};
  return vectorwise<F16>([&](int i) {
    const int32x4_t lane = vaddq_s32(vld1q_s32(lanes), vdupq_n_s32(4 * i));
    const uint32x4_t kept = vandq_u32(vcgeq_s32(lane, low), vcltq_s32(lane, high));
    return vbslq_f32(kept, a.v[i], vdupq_n_f32(fill));
  });
}
template <int H>
inline F16 swap_lanes(F16 a) {
  return vectorwise<F16>([&](int i) {
    if constexpr (H >= 4) return a.v[i ^ (H / 4)];
    return H == 1 ? vrev64q_f32(a.v[i]) : vextq_f32(a.v[i], a.v[i], 2);
  });
}
inline F16 widen_bf16(const uint16_t* p) {
  return vectorwise<F16>(
      [&](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(p + 4 * i)), 16)); });
}

// The fixed tree of vec.h.
template <class Op>
inline float reduce(F16 a, Op op) {
  const float32x4_t four = op(op(a.v[0], a.v[2]), op(a.v[1], a.v[3]));
  const float32x4_t two = op(four, vextq_f32(four, four, 2));
  return vgetq_lane_f32(op(two, vdupq_laneq_f32(two, 1)), 0);
}
inline float reduce_add(F16 a) {
  return reduce(a, [](float32x4_t x, float32x4_t y) { return vaddq_f32(x, y); });
}
inline float reduce_max(F16 a) { return reduce(a, max_of); }

}  // namespace paceline
