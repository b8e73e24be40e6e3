// Exact integer dot products of one weight block (32 outputs x 32 k) with up to eight activation rows.
//
// Weight bytes come in groups of four k for each of 32 outputs, as vpdpbusd reads them, in the order
// in which they are used (a second stream of reads would halve the bandwidth):
//   8 bit: byte (k / 4) * 128 + output * 4 + k % 4, value + 128
//   4 bit: the same for k < 16 in the low nibbles, k + 16 in the high ones, value as in the file
// x: rows of 32 activations; start: -8 * (sum of a row). acc[row][half of the outputs] is added to, one
// half or both: many rows and a half unpack as few nibbles for a product as few rows and both, and
// need fewer registers. The sums are int32 and exact on every tier, so their order is free.
#pragma once

#include "activations.h"

namespace paceline {

// Rows that go through the registers together: of a panel with few rows all of them, so that the weights,
// which take longer to read than to multiply with then, are read once.
constexpr int kFewRows = 4;
#if defined(PACELINE_AVX512)
constexpr int kMaxRows = 8, kMaxDenseRows = 4;
#elif defined(PACELINE_NEON)
constexpr int kMaxRows = 4, kMaxDenseRows = 4;
#else
constexpr int kMaxRows = 2, kMaxDenseRows = 2;
#endif
// And with how many halves of a tile.
constexpr int halves_with(int rows) { return rows > kFewRows ? 1 : 2; }

constexpr int kGroupBytes = 4 * 32;  // of four k

inline int32_t four_bytes(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return x;
}

#if defined(PACELINE_AVX512)

// acc += the products of sixteen outputs, four k each, with four bytes of each row. Used once, those are
// an operand in memory, which the compiler would rather load by itself: an instruction more.
template <int Rows, int Halves>
PACELINE_INLINE void dot_step(const __m512i (&w)[Halves], const int8_t* x, I16 (&acc)[Rows][Halves]) {
  PACELINE_UNROLL for (int r = 0; r < Rows; ++r, x += kBlock) {
    if constexpr (Halves == 1) {
      const int32_t* four = reinterpret_cast<const int32_t*>(x);
      asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc[r][0].v) : "v"(w[0]), "m"(*four));
    } else {
      const __m512i four = _mm512_set1_epi32(four_bytes(x));
      PACELINE_UNROLL for (int h = 0; h < Halves; ++h)
        acc[r][h].v = _mm512_dpbusd_epi32(acc[r][h].v, w[h], four);
    }
  }
}

template <bool Nibbles, int Rows, int Halves>
PACELINE_INLINE void dot_block(const uint8_t* w, const int8_t* x, const int32_t*, I16 (&acc)[Rows][Halves]) {
  const __m512i low = _mm512_set1_epi8(15);
  PACELINE_UNROLL for (int j = 0; j < (Nibbles ? 4 : 8); ++j, w += kGroupBytes, x += 4) {
    __m512i first[Halves], second[Halves];
    PACELINE_UNROLL for (int h = 0; h < Halves; ++h) {
      first[h] = _mm512_loadu_si512(w + 64 * h);
      if constexpr (Nibbles) {
        second[h] = _mm512_and_si512(_mm512_srli_epi16(first[h], 4), low);
        first[h] = _mm512_and_si512(first[h], low);
      }
    }
    dot_step(first, x, acc);
    if constexpr (Nibbles) dot_step(second, x + 16, acc);
  }
}

// Of each lane: weights' low 16 bits times the low 16 bits of sum, and high ones times those of high.
inline I16 weigh(I16 sum, int32_t high, const int32_t* weights) {
  const __m512i pair = _mm512_ternarylogic_epi32(sum.v, _mm512_set1_epi32(0xffff),
                                                 _mm512_set1_epi32(high), 0xea);  // a & b | c
  return {_mm512_madd_epi16(pair, _mm512_loadu_si512(weights))};
}

#elif defined(PACELINE_AVX2)

inline I16 weigh(I16 sum, int32_t high, const int32_t* weights) {
  const __m256i* w = reinterpret_cast<const __m256i*>(weights);
  const __m256i h = _mm256_set1_epi32(high);
  return {_mm256_madd_epi16(_mm256_blend_epi16(sum.lo, h, 0xaa), _mm256_loadu_si256(w)),
          _mm256_madd_epi16(_mm256_blend_epi16(sum.hi, h, 0xaa), _mm256_loadu_si256(w + 1))};
}

// acc[r] += the products of eight outputs, four k each, with row r. One call a group of four k.
#if defined(__AVXVNNI__)
template <int Rows>
PACELINE_INLINE void dot_step(__m256i w, const int8_t* x, __m256i (&acc)[Rows]) {
  PACELINE_UNROLL for (int r = 0; r < Rows; ++r)
    acc[r] = _mm256_dpbusd_avx_epi32(acc[r], w, _mm256_set1_epi32(four_bytes(x + r * kBlock)));
}
#else
// Sums stay in int16: eight steps of two products of at most 15 * 127 make 30480.
template <int Rows>
PACELINE_INLINE void dot_step(__m256i w, const int8_t* x, __m256i (&acc)[Rows]) {
  PACELINE_UNROLL for (int r = 0; r < Rows; ++r) {
    const __m256i four = _mm256_set1_epi32(four_bytes(x + r * kBlock));
    acc[r] = _mm256_add_epi16(acc[r], _mm256_maddubs_epi16(w, four));
  }
}
// 8 x 8 bits would overflow int16, but |w| * (x with the sign of w) does not, for signed w: two
// products make at most 2 * 128 * 127 = 32512. Sums are int32.
template <int Rows>
PACELINE_INLINE void signed_dot_step(__m256i w, const int8_t* x, __m256i (&acc)[Rows]) {
  const __m256i size = _mm256_abs_epi8(w);
  PACELINE_UNROLL for (int r = 0; r < Rows; ++r) {
    const __m256i four = _mm256_set1_epi32(four_bytes(x + r * kBlock));
    const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(four, w));
    acc[r] = _mm256_add_epi32(acc[r], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
}
#endif

// Products of eight outputs with each row, added to acc.
template <bool Nibbles, int Rows>
PACELINE_INLINE void dot_eight(const uint8_t* w, const int8_t* x, [[maybe_unused]] const int32_t* start,
                      __m256i (&acc)[Rows]) {
  const __m256i low = _mm256_set1_epi8(15);
  asm volatile("" ::: "memory");  // or GCC loads the rows' bytes once for all outputs, and spills them
  __m256i sums[Rows];
  PACELINE_UNROLL for (int r = 0; r < Rows; ++r) sums[r] = _mm256_setzero_si256();

  PACELINE_UNROLL for (int j = 0; j < (Nibbles ? 4 : 8); ++j, w += kGroupBytes, x += 4) {
    const __m256i weights = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
    if constexpr (Nibbles) {
      dot_step(_mm256_and_si256(weights, low), x, sums);
      dot_step(_mm256_and_si256(_mm256_srli_epi16(weights, 4), low), x + 16, sums);
    } else {
#if defined(__AVXVNNI__)
      dot_step(weights, x, sums);
#else
      signed_dot_step(_mm256_xor_si256(weights, _mm256_set1_epi8(static_cast<char>(0x80))), x, sums);
#endif
    }
  }
  PACELINE_UNROLL for (int r = 0; r < Rows; ++r) {
#if !defined(__AVXVNNI__)
    if constexpr (Nibbles)
      sums[r] = _mm256_madd_epi16(sums[r], _mm256_set1_epi16(1));
    else  // the caller takes off 128 * sum(x) for weights that are 128 too large; these were not
      sums[r] = _mm256_sub_epi32(sums[r], _mm256_set1_epi32(16 * start[r]));
#endif
    acc[r] = _mm256_add_epi32(acc[r], sums[r]);
  }
}

template <bool Nibbles, int Rows, int Halves>
PACELINE_INLINE void dot_block(const uint8_t* w, const int8_t* x, const int32_t* start,
                      I16 (&acc)[Rows][Halves]) {
  PACELINE_UNROLL for (int half = 0; half < Halves; ++half, w += 64) {
    __m256i lo[Rows], hi[Rows];
    PACELINE_UNROLL for (int r = 0; r < Rows; ++r) lo[r] = acc[r][half].lo, hi[r] = acc[r][half].hi;
    dot_eight<Nibbles, Rows>(w, x, start, lo);
    dot_eight<Nibbles, Rows>(w + 32, x, start, hi);
    PACELINE_UNROLL for (int r = 0; r < Rows; ++r) acc[r][half] = {lo[r], hi[r]};
  }
}

#elif defined(PACELINE_NEON)

inline I16 weigh(I16 sum, int32_t high, const int32_t* weights) {
  const int16_t factor = static_cast<int16_t>(high >> 16);
  return vectorwise<I16>([&](int i) {
    const int32x4_t w = vld1q_s32(weights + 4 * i);
    const int32x4_t low = vmull_s16(vmovn_s32(w), vmovn_s32(sum.v[i]));
    return vmlal_n_s16(low, vshrn_n_s32(w, 16), factor);
  });
}

// acc[r] += the products of sixteen outputs, four k each, with four bytes of row r: those of lane
// `Lane` of its sixteen. An instruction takes signed bytes on both sides.
template <int Lane, int Rows>
PACELINE_INLINE void dot_step(const int8x16_t (&w)[4], const int8x16_t (&x)[Rows], I16 (&acc)[Rows]) {
  for (int r = 0; r < Rows; ++r)
    for (int i = 0; i < 4; ++i) acc[r].v[i] = vdotq_laneq_s32(acc[r].v[i], w[i], x[r], Lane);
}

// The group of four k at w, or with nibbles two of them: those in `low` and, 16 further, in `high`.
template <bool Nibbles, int Lane, int Rows>
PACELINE_INLINE void dot_group(const uint8_t* w, const int8x16_t (&low)[Rows],
                      const int8x16_t (&high)[Rows], I16 (&acc)[Rows]) {
  int8x16_t first[4], second[4];
  for (int i = 0; i < 4; ++i) {
    const uint8x16_t bytes = vld1q_u8(w + 16 * i);
    if constexpr (Nibbles) {
      first[i] = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15)));
      second[i] = vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4));
    } else {
      first[i] = vreinterpretq_s8_u8(veorq_u8(bytes, vdupq_n_u8(0x80)));
    }
  }
  dot_step<Lane>(first, low, acc);
  if constexpr (Nibbles) dot_step<Lane>(second, high, acc);
}

template <bool Nibbles, int Rows>
PACELINE_INLINE void dot_four_groups(const uint8_t* w, const int8x16_t (&low)[Rows],
                            const int8x16_t (&high)[Rows], I16 (&acc)[Rows]) {
  dot_group<Nibbles, 0>(w, low, high, acc);
  dot_group<Nibbles, 1>(w + kGroupBytes, low, high, acc);
  dot_group<Nibbles, 2>(w + 2 * kGroupBytes, low, high, acc);
  dot_group<Nibbles, 3>(w + 3 * kGroupBytes, low, high, acc);
}

template <bool Nibbles, int Rows, int Halves>
PACELINE_INLINE void dot_block(const uint8_t* w, const int8_t* x, const int32_t* start,
                      I16 (&acc)[Rows][Halves]) {
  int8x16_t low[Rows], high[Rows];  // the first sixteen k of a row, and the others
  for (int r = 0; r < Rows; ++r) {
    low[r] = vld1q_s8(x + r * kBlock);
    high[r] = vld1q_s8(x + r * kBlock + 16);
  }
  for (int half = 0; half < Halves; ++half, w += 64) {
    I16 sums[Rows];
    for (int r = 0; r < Rows; ++r) {  // the caller takes off 128 * sum(x), see dot_eight
      sums[r] = acc[r][half];
      if constexpr (!Nibbles) sums[r] = sums[r] + splat(-16 * start[r]);
    }
    dot_four_groups<Nibbles>(w, low, high, sums);
    if constexpr (!Nibbles) dot_four_groups<Nibbles>(w + 4 * kGroupBytes, high, high, sums);
    for (int r = 0; r < Rows; ++r) acc[r][half] = sums[r];
  }
}

#else

inline I16 weigh(I16 sum, int32_t high, const int32_t* weights) {
  for (int i = 0; i < kLanes; ++i) {
    const int32_t w = weights[i];
    sum.v[i] = static_cast<int16_t>(w) * static_cast<int16_t>(sum.v[i]) + (w >> 16) * (high >> 16);
  }
  return sum;
}

template <bool Nibbles, int Rows, int Halves>
PACELINE_INLINE void dot_block(const uint8_t* w, const int8_t* x, const int32_t*, I16 (&acc)[Rows][Halves]) {
  for (int half = 0; half < Halves; ++half, w += 64)
    for (int k = 0; k < kBlock; ++k) {
      const int byte = Nibbles ? k % 16 : k;
      const uint8_t* p = w + byte / 4 * kGroupBytes + byte % 4;
      const int shift = Nibbles && k >= 16 ? 4 : 0, mask = Nibbles ? 15 : 255;
      for (int r = 0; r < Rows; ++r)
        for (int n = 0; n < kLanes; ++n)
          acc[r][half].v[n] += ((p[4 * n] >> shift) & mask) * x[r * kBlock + k];
    }
}

#endif

}  // namespace paceline
