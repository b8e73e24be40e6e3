// Products of 16-bit integers, two at a time, added to sixteen int32 sums, on each instruction set.
//
// A sum wraps around as the instructions do; whoever keeps it within 31 bits gets the same exact
// integer on every tier, in any order. The float counterparts are here too, one term at a time, so
// that a loop can be written for both. Knows nothing of keys or values.
#pragma once

#include <type_traits>

#include "vec.h"

namespace paceline {

// load_terms: sixteen pairs in a row; splat_terms: sixteen times the same pair; add_products: lane
// i gets both products of pair i; store_words: sixteen integers that fit 16 bits.
#if defined(PACELINE_AVX512)

struct Pairs {
  __m512i v;
};
inline Pairs load_terms(const int16_t* p) { return {_mm512_loadu_si512(p)}; }
inline Pairs load_terms(const int8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Pairs splat_terms(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return {_mm512_set1_epi32(pair)};
}
inline I16 add_products(I16 sum, Pairs a, Pairs b) {
  // the intrinsic makes GCC 12 copy every sum before and after
  asm("vpdpwssd %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(b.v));
  return sum;
}
inline void store_words(int16_t* p, I16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}

#elif defined(PACELINE_AVX2)

struct Pairs {
  __m256i lo, hi;
};
inline Pairs load_terms(const int16_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline Pairs load_terms(const int8_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(q)), _mm256_cvtepi8_epi16(_mm_loadu_si128(q + 1))};
}
inline Pairs splat_terms(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
inline I16 add_products(I16 sum, Pairs a, Pairs b) {
#if defined(__AVXVNNI__)
  return {_mm256_dpwssd_avx_epi32(sum.lo, a.lo, b.lo), _mm256_dpwssd_avx_epi32(sum.hi, a.hi, b.hi)};
#else
  return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(a.lo, b.lo)),
          _mm256_add_epi32(sum.hi, _mm256_madd_epi16(a.hi, b.hi))};
#endif
}
inline void store_words(int16_t* p, I16 a) {
  // packs works within 128-bit halves: put the quarters back in order afterwards
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8));
}

#elif defined(PACELINE_NEON)

struct Pairs {
  int16x8_t v[4];
};
inline Pairs load_terms(const int16_t* p) {
  return {{vld1q_s16(p), vld1q_s16(p + 8), vld1q_s16(p + 16), vld1q_s16(p + 24)}};
}
inline Pairs load_terms(const int8_t* p) {
  const int8x16_t lo = vld1q_s8(p), hi = vld1q_s8(p + 16);
  return {{vmovl_s8(vget_low_s8(lo)), vmovl_high_s8(lo), vmovl_s8(vget_low_s8(hi)),
           vmovl_high_s8(hi)}};
}
inline Pairs splat_terms(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  const int16x8_t all = vreinterpretq_s16_s32(vdupq_n_s32(pair));
  return {{all, all, all, all}};
}
inline I16 add_products(I16 sum, Pairs a, Pairs b) {
  for (int i = 0; i < 4; ++i)
    sum.v[i] = vaddq_s32(sum.v[i], vpaddq_s32(vmull_s16(vget_low_s16(a.v[i]), vget_low_s16(b.v[i])),
                                              vmull_high_s16(a.v[i], b.v[i])));
  return sum;
}
inline void store_words(int16_t* p, I16 a) {
  for (int i = 0; i < 4; ++i) vst1_s16(p + 4 * i, vmovn_s32(a.v[i]));
}

#else

struct Pairs {
  int16_t v[2 * kLanes];
};
template <class T>
inline Pairs load_terms(const T* p) {
  Pairs r;
  for (int i = 0; i < 2 * kLanes; ++i) r.v[i] = p[i];
  return r;
}
inline Pairs splat_terms(const int16_t* p) {
  Pairs r;
  for (int i = 0; i < 2 * kLanes; ++i) r.v[i] = p[i % 2];
  return r;
}
inline I16 add_products(I16 sum, const Pairs& a, const Pairs& b) {
  for (int i = 0; i < kLanes; ++i) {
    const auto product = [&](int j) { return static_cast<uint32_t>(a.v[j] * b.v[j]); };
    sum.v[i] = static_cast<int32_t>(static_cast<uint32_t>(sum.v[i]) + product(2 * i) +
                                    product(2 * i + 1));
  }
  return sum;
}
inline void store_words(int16_t* p, const I16& a) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int16_t>(a.v[i]);
}

#endif

inline F16 load_terms(const float* p) { return load(p); }
inline F16 splat_terms(const float* p) { return splat(*p); }
inline F16 add_products(F16 sum, F16 a, F16 b) { return fma(b, a, sum); }
inline F16 to_float(F16 a) { return a; }

}  // namespace paceline
