// Weights 0 <= w <= 1 as integers, so that sums of them are exact whatever the order.
//
// A weight counts in units of 2^-44, rounded to even; up to 2^19 of them fit 64 bits. The integer is
// read off the bits of 256 + w in double precision, whose last place is 2^-44. What rounding moves in
// a distribution over 2^17 tokens is below 10^-8.
#pragma once

#include "vec.h"

namespace paceline {

constexpr int kFixedBits = 44;
constexpr int kMaxWeights = 1 << 19;
constexpr uint64_t kFixedBase = uint64_t{0x4070000000000000};  // the bits of 256.0

inline uint64_t fixed(float w) {
  const double shifted = 256.0 + static_cast<double>(w);
  uint64_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  return bits - kFixedBase;
}

// A running sum of sixteen lanes of weights; the base is taken off at the end.
class FixedSum {
 public:
#if defined(PACELINE_AVX512)
  void add(F16 w) {
    __m256 lo, hi;
    halves(w, lo, hi);
    const __m512d base = _mm512_set1_pd(256.0);
    const auto bits = [&](__m256 x) {
      return _mm512_castpd_si512(_mm512_add_pd(_mm512_cvtps_pd(x), base));
    };
    even_ = _mm512_add_epi64(even_, bits(lo));
    odd_ = _mm512_add_epi64(odd_, bits(hi));
    count_ += kLanes;
  }
  uint64_t total() const {
    alignas(64) uint64_t lanes[8];
    _mm512_store_si512(lanes, _mm512_add_epi64(even_, odd_));
    uint64_t sum = 0;
    for (const uint64_t lane : lanes) sum += lane;
    return sum - kFixedBase * count_;
  }

 private:
  __m512i even_ = _mm512_setzero_si512(), odd_ = _mm512_setzero_si512();
#elif defined(PACELINE_AVX2)
  void add(F16 w) {
    const __m256d base = _mm256_set1_pd(256.0);
    const auto bits = [&](__m128 x) {
      return _mm256_castpd_si256(_mm256_add_pd(_mm256_cvtps_pd(x), base));
    };
    even_ = _mm256_add_epi64(even_, bits(_mm256_castps256_ps128(w.lo)));
    odd_ = _mm256_add_epi64(odd_, bits(_mm256_extractf128_ps(w.lo, 1)));
    even_ = _mm256_add_epi64(even_, bits(_mm256_castps256_ps128(w.hi)));
    odd_ = _mm256_add_epi64(odd_, bits(_mm256_extractf128_ps(w.hi, 1)));
    count_ += kLanes;
  }
  uint64_t total() const {
    alignas(32) uint64_t lanes[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi64(even_, odd_));
    return lanes[0] + lanes[1] + lanes[2] + lanes[3] - kFixedBase * count_;
  }

 private:
  __m256i even_ = _mm256_setzero_si256(), odd_ = _mm256_setzero_si256();
#elif defined(PACELINE_NEON)
  void add(F16 w) {
    const float64x2_t base = vdupq_n_f64(256.0);
    for (const float32x4_t x : w.v) {
      even_ = vaddq_u64(even_, vreinterpretq_u64_f64(vaddq_f64(vcvt_f64_f32(vget_low_f32(x)), base)));
      odd_ = vaddq_u64(odd_, vreinterpretq_u64_f64(vaddq_f64(vcvt_high_f64_f32(x), base)));
    }
    count_ += kLanes;
  }
  uint64_t total() const { return vaddvq_u64(vaddq_u64(even_, odd_)) - kFixedBase * count_; }

 private:
  uint64x2_t even_ = vdupq_n_u64(0), odd_ = vdupq_n_u64(0);
#else
  void add(const F16& w) {
    for (int i = 0; i < kLanes; ++i) sum_ += fixed(w.v[i]) + kFixedBase;
    count_ += kLanes;
  }
  uint64_t total() const { return sum_ - kFixedBase * count_; }

 private:
  uint64_t sum_ = 0;
#endif
  uint64_t count_ = 0;
};

// Lanes of `a` below `bound` become zero.
inline F16 zero_below(F16 a, F16 bound) {
#if defined(PACELINE_AVX512)
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, bound.v, _CMP_GE_OQ), a.v)};
#elif defined(PACELINE_AVX2)
  return {_mm256_and_ps(a.lo, _mm256_cmp_ps(a.lo, bound.lo, _CMP_GE_OQ)),
          _mm256_and_ps(a.hi, _mm256_cmp_ps(a.hi, bound.hi, _CMP_GE_OQ))};
#elif defined(PACELINE_NEON)
  return vectorwise<F16>([&](int i) {
    const uint32x4_t kept = vcgeq_f32(a.v[i], bound.v[i]);
    return vreinterpretq_f32_u32(vandq_u32(kept, vreinterpretq_u32_f32(a.v[i])));
  });
#else
  return lanewise<F16>([&](int i) { return a.v[i] >= bound.v[i] ? a.v[i] : 0.0f; });
#endif
}

// Bit i: lane i of `a` is at least that of `bound`.
inline uint32_t at_least(F16 a, F16 bound) {
#if defined(PACELINE_AVX512)
  return _mm512_cmp_ps_mask(a.v, bound.v, _CMP_GE_OQ);
#elif defined(PACELINE_AVX2)
  const auto mask = [](__m256 x, __m256 y) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_GE_OQ)));
  };
  return mask(a.lo, bound.lo) | mask(a.hi, bound.hi) << 8;
#elif defined(PACELINE_NEON)
  const uint32_t weights[4] = {1, 2, 4, 8};
  uint32_t bits = 0;
  for (int i = 0; i < 4; ++i)
    bits |= vaddvq_u32(vandq_u32(vcgeq_f32(a.v[i], bound.v[i]), vld1q_u32(weights))) << (4 * i);
  return bits;
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(a.v[i] >= bound.v[i]) << i;
  return bits;
#endif
}

}  // namespace paceline
