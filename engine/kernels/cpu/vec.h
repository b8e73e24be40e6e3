// Sixteen float lanes, and the few operations the kernels need, on each instruction set.
//
// Every operation is exact or correctly rounded lane by lane, and reductions use one fixed tree, so
// a kernel written with F16 gives the same bits on every tier. Compile with -ffp-contract=off: a
// product and a sum are fused only where fma() says so. Knows nothing of models or layouts.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define PACELINE_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PACELINE_AVX2 1
#endif

#if defined(PACELINE_AVX512) || defined(PACELINE_AVX2)
#include <immintrin.h>
#elif defined(PACELINE_NEON)  // given by build.py: 64-bit ARM with dot products
#include "vec_neon.h"
#endif

// Before a loop over a few registers: they stay registers only if it is unrolled early.
#if defined(__clang__)
#define PACELINE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define PACELINE_UNROLL _Pragma("GCC unroll 16")
#endif
// A function whose array of registers would be memory if it were called; and one with a loop that
// would lack registers if it were not.
#define PACELINE_INLINE [[gnu::always_inline]] inline
#define PACELINE_CALLED [[gnu::noinline]]

namespace paceline {

constexpr int kLanes = 16;
using half = uint16_t;  // IEEE binary16 bits

#if defined(PACELINE_AVX512)

struct F16 {
  __m512 v;
};
struct I16 {
  __m512i v;
};

inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F16 load(const half* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline void store_bytes(int8_t* p, I16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
inline F16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline I16 splat(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline I16 operator+(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F16 abs(F16 a) { return {_mm512_abs_ps(a.v)}; }
inline F16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I16 round_to_int(F16 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline F16 rounded(F16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
template <int N>
inline I16 shift_left(I16 a) {
  return {_mm512_slli_epi32(a.v, N)};
}
inline F16 as_float(I16 a) { return {_mm512_castsi512_ps(a.v)}; }
// Lanes first <= i < last keep a, the others become fill.
inline F16 keep(F16 a, int first, int last, float fill) {
  const __mmask16 m = static_cast<__mmask16>((0xffffu << first) & ~(0xffffffffu << last));
  return {_mm512_mask_blend_ps(m, _mm512_set1_ps(fill), a.v)};
}
// Lane i becomes lane i ^ H, for H = 1, 2, 4 and 8.
template <int H>
inline F16 swap_lanes(F16 a) {
  constexpr int pairs = 0xb1, pairs_of_two = 0x4e;
  if constexpr (H >= 4) return {_mm512_shuffle_f32x4(a.v, a.v, H == 4 ? pairs : pairs_of_two)};
  return {_mm512_permute_ps(a.v, H == 1 ? pairs : pairs_of_two)};
}
inline void halves(F16 a, __m256& lo, __m256& hi) {
  lo = _mm512_castps512_ps256(a.v);
  hi = _mm512_extractf32x8_ps(a.v, 1);
}
inline F16 widen_bf16(const uint16_t* p) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
}

#elif defined(PACELINE_AVX2)

struct F16 {
  __m256 lo, hi;
};
struct I16 {
  __m256i lo, hi;
};

inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F16 load(const half* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline void store(float* p, F16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store_bytes(int8_t* p, I16 a) {
  // packs works within 128-bit halves: put the dwords back in order afterwards
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(words, words), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(bytes));
}
inline F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline I16 splat(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline F16 operator+(F16 a, F16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline F16 operator-(F16 a, F16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline F16 operator*(F16 a, F16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline F16 operator/(F16 a, F16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
inline I16 operator+(I16 a, I16 b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
inline F16 fma(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F16 abs(F16 a) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)};
}
inline F16 to_float(I16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline I16 round_to_int(F16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline F16 rounded(F16 a) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, nearest), _mm256_round_ps(a.hi, nearest)};
}
template <int N>
inline I16 shift_left(I16 a) {
  return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
}
inline F16 as_float(I16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline F16 keep(F16 a, int first, int last, float fill) {
  const __m256i i = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 other = _mm256_set1_ps(fill);
  const auto half_keep = [&](__m256 x, int from, int to) {
    const __m256i m = _mm256_and_si256(_mm256_cmpgt_epi32(i, _mm256_set1_epi32(from - 1)),
                                       _mm256_cmpgt_epi32(_mm256_set1_epi32(to), i));
    return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(m));
  };
  return {half_keep(a.lo, first, last), half_keep(a.hi, first - 8, last - 8)};
}
template <int H>
inline F16 swap_lanes(F16 a) {
  if constexpr (H == 8) return {a.hi, a.lo};
  const auto swap = [](__m256 x) {
    return H == 4 ? _mm256_permute2f128_ps(x, x, 1) : _mm256_permute_ps(x, H == 1 ? 0xb1 : 0x4e);
  };
  return {swap(a.lo), swap(a.hi)};
}
inline void halves(F16 a, __m256& lo, __m256& hi) {
  lo = a.lo;
  hi = a.hi;
}
inline F16 widen_bf16(const uint16_t* p) {
  const auto wide = [](const uint16_t* q) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  };
  return {wide(p), wide(p + 8)};
}

#elif !defined(PACELINE_NEON)  // portable: plain loops, which a compiler may vectorise

struct F16 {
  float v[kLanes];
};
struct I16 {
  int32_t v[kLanes];
};

// Half to float and back by the exponent trick: exact, and rounds to nearest even.
inline float half_to_float(half h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t mag = static_cast<uint32_t>(h & 0x7fffu) << 13;
  float f;
  uint32_t bits = mag;
  std::memcpy(&f, &bits, 4);
  f *= 0x1p112f;  // moves the exponent, and normalises subnormals
  std::memcpy(&bits, &f, 4);
  if ((h & 0x7c00u) == 0x7c00u) bits |= 0x7f800000u;  // inf and nan
  bits |= sign;
  std::memcpy(&f, &bits, 4);
  return f;
}

template <class V, class F>
inline V lanewise(F f) {
  V r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = f(i);
  return r;
}
inline F16 load(const float* p) {
  return lanewise<F16>([&](int i) { return p[i]; });
}
inline F16 load(const half* p) {
  return lanewise<F16>([&](int i) { return half_to_float(p[i]); });
}
inline void store(float* p, const F16& a) { std::memcpy(p, a.v, sizeof a.v); }
inline void store_bytes(int8_t* p, const I16& a) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(a.v[i]);
}
inline F16 splat(float x) {
  return lanewise<F16>([&](int) { return x; });
}
inline I16 splat(int32_t x) {
  return lanewise<I16>([&](int) { return x; });
}
inline F16 operator+(F16 a, F16 b) {
  return lanewise<F16>([&](int i) { return a.v[i] + b.v[i]; });
}
inline F16 operator-(F16 a, F16 b) {
  return lanewise<F16>([&](int i) { return a.v[i] - b.v[i]; });
}
inline F16 operator*(F16 a, F16 b) {
  return lanewise<F16>([&](int i) { return a.v[i] * b.v[i]; });
}
inline F16 operator/(F16 a, F16 b) {
  return lanewise<F16>([&](int i) { return a.v[i] / b.v[i]; });
}
inline I16 operator+(I16 a, I16 b) {
  return lanewise<I16>([&](int i) { return a.v[i] + b.v[i]; });
}
inline F16 fma(F16 a, F16 b, F16 c) {
  return lanewise<F16>([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
inline F16 max(F16 a, F16 b) {  // as maxps: the second operand wins unless the first is greater
  return lanewise<F16>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F16 min(F16 a, F16 b) {
  return lanewise<F16>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline F16 abs(F16 a) {
  return lanewise<F16>([&](int i) { return std::fabs(a.v[i]); });
}
inline F16 to_float(I16 a) {
  return lanewise<F16>([&](int i) { return static_cast<float>(a.v[i]); });
}
inline I16 round_to_int(F16 a) {  // out of range and nan become INT_MIN, as cvtps2dq does
  return lanewise<I16>([&](int i) {
    const bool fits = std::fabs(a.v[i]) < 0x1p31f;
    return fits ? static_cast<int32_t>(std::nearbyintf(a.v[i])) : INT32_MIN;
  });
}
inline F16 rounded(F16 a) {
  return lanewise<F16>([&](int i) { return std::nearbyintf(a.v[i]); });
}
template <int N>
inline I16 shift_left(I16 a) {
  return lanewise<I16>(
      [&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << N); });
}
inline F16 as_float(const I16& a) {
  F16 r;
  std::memcpy(r.v, a.v, sizeof r.v);
  return r;
}
inline F16 keep(F16 a, int first, int last, float fill) {
  return lanewise<F16>([&](int i) { return i >= first && i < last ? a.v[i] : fill; });
}
template <int H>
inline F16 swap_lanes(F16 a) {
  return lanewise<F16>([&](int i) { return a.v[i ^ H]; });
}
inline F16 widen_bf16(const uint16_t* p) {
  return as_float(lanewise<I16>(
      [&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16); }));
}

#endif

// Fixed tree: lanes i and i + 8, then i and i + 4, then i + 2, then i + 1.
#if defined(PACELINE_AVX512) || defined(PACELINE_AVX2)
template <class Op256, class Op128>
inline float reduce(F16 a, Op256 op8, Op128 op4) {
  __m256 lo, hi;
  halves(a, lo, hi);
  const __m256 s = op8(lo, hi);
  __m128 q = op4(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = op4(q, _mm_movehl_ps(q, q));
  q = op4(q, _mm_movehdup_ps(q));
  return _mm_cvtss_f32(q);
}
inline float reduce_add(F16 a) {
  return reduce(
      a, [](__m256 x, __m256 y) { return _mm256_add_ps(x, y); },
      [](__m128 x, __m128 y) { return _mm_add_ps(x, y); });
}
inline float reduce_max(F16 a) {
  return reduce(
      a, [](__m256 x, __m256 y) { return _mm256_max_ps(x, y); },
      [](__m128 x, __m128 y) { return _mm_max_ps(x, y); });
}
#elif !defined(PACELINE_NEON)
template <class Op>
inline float reduce(F16 a, Op op) {
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] = op(a.v[i], a.v[i + width]);
  return a.v[0];
}
inline float reduce_add(F16 a) {
  return reduce(a, [](float x, float y) { return x + y; });
}
inline float reduce_max(F16 a) {
  return reduce(a, [](float x, float y) { return x > y ? x : y; });
}
#endif

// The largest lane of two without negative ones, as its bits: an infinity is 0x7f800000, a nan more.
inline uint32_t largest_bits(F16 a, F16 b) {
#if defined(PACELINE_AVX512) || defined(PACELINE_AVX2)
  __m256 parts[4];
  halves(a, parts[0], parts[1]);
  halves(b, parts[2], parts[3]);
  const auto larger = [&](int i) {
    return _mm256_max_epi32(_mm256_castps_si256(parts[i]), _mm256_castps_si256(parts[i + 2]));
  };
  const __m256i s = _mm256_max_epi32(larger(0), larger(1));
  __m128i q = _mm_max_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(q));
#elif defined(PACELINE_NEON)
  const auto larger = [&](int i) {
    return vmaxq_u32(vreinterpretq_u32_f32(a.v[i]), vreinterpretq_u32_f32(b.v[i]));
  };
  return vmaxvq_u32(vmaxq_u32(vmaxq_u32(larger(0), larger(1)), vmaxq_u32(larger(2), larger(3))));
#else
  uint32_t bits[2 * kLanes], largest = 0;
  std::memcpy(bits, a.v, sizeof a.v);
  std::memcpy(bits + kLanes, b.v, sizeof b.v);
  for (const uint32_t x : bits) largest = x > largest ? x : largest;
  return largest;
#endif
}

// The sum of 32 bytes, read by sixteen as they are written.
inline int32_t sum_bytes(const int8_t* p) {
#if defined(PACELINE_AVX512) || defined(PACELINE_AVX2)
  const auto sums = [](const int8_t* q) {  // two of eight bytes, each larger by 128
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
    return _mm_sad_epu8(_mm_xor_si128(x, _mm_set1_epi8(static_cast<char>(0x80))), _mm_setzero_si128());
  };
  const __m128i two = _mm_add_epi64(sums(p), sums(p + 16));
  return _mm_cvtsi128_si32(_mm_add_epi64(two, _mm_unpackhi_epi64(two, two))) - 32 * 128;
#elif defined(PACELINE_NEON)
  return vaddlvq_s8(vld1q_s8(p)) + vaddlvq_s8(vld1q_s8(p + 16));
#else
  int32_t sum = 0;
  for (int i = 0; i < 32; ++i) sum += p[i];
  return sum;
#endif
}

inline float first_lane(F16 a) {
  float lanes[kLanes];
  store(lanes, a);
  return lanes[0];
}

// p * 2^n for whole numbers -126 <= n <= 127, where the result is a normal number.
inline F16 times_power(F16 p, F16 n) {
#if defined(PACELINE_AVX512)
  return {_mm512_scalef_ps(p.v, n.v)};
#else
  return p * as_float(shift_left<23>(round_to_int(n) + splat(127)));
#endif
}

// e^x for x <= 0 and moderately positive x, within 2 ulp: 2^n * p(r), |r| <= ln2 / 2 (Cephes expf).
// Below -87 the result is e^-87, so nothing underflows; nan stays nan.
inline F16 exp(F16 x) {
  x = min(splat(88.0f), max(splat(-87.0f), x));  // maxps and minps keep a nan in the second operand
  const F16 n = rounded(x * splat(1.44269504088896341f));
  F16 r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F16 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + splat(1.0f));
  return times_power(p, n);
}

// 2^x for x <= 0 and moderately positive x, within 3 ulp: 2^n * p(r), |r| <= 1/2, p of least relative
// error with p(0) = 1. Below -126 the result is 2^-126, so nothing underflows; nan stays nan.
inline F16 exp2(F16 x) {
  x = max(splat(-126.0f), x);
  const F16 n = rounded(x), r = x - n;
  F16 p = splat(1.326472731e-3f);
  p = fma(p, r, splat(9.671512991e-3f));
  p = fma(p, r, splat(5.550733581e-2f));
  p = fma(p, r, splat(2.402224243e-1f));
  p = fma(p, r, splat(6.931470037e-1f));
  p = fma(p, r, splat(1.0f));
  return times_power(p, n);
}

}  // namespace paceline
