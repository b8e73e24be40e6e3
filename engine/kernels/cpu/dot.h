// Exact integer dot products of one weight block (32 x 16 outputs) with up to eight activation rows.
//
// Weight bytes come in groups of four k for each of 16 outputs, as vpdpbusd reads them:
//   8 bit: byte (k / 4) * 64 + output * 4 + k % 4, value + 128
//   4 bit: the same for k < 16 in the low nibbles, k + 16 in the high ones, value as in the file
// The sums are int32 and exact on every tier, so their order is free.
#pragma once

#include "activations.h"

namespace paceline {

// Rows per pass: what the registers of the tier hold.
#if defined(PACELINE_AVX512)
constexpr int kMaxRows = 8;
#else
constexpr int kMaxRows = 4;
#endif

inline int32_t four_bytes(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return x;
}

#if defined(PACELINE_AVX512)

template <bool Nibbles, int Rows>
inline void dot_block(const uint8_t* w, const QuantBlock& a, int row0, I16 (&acc)[Rows]) {
  __m512i weights[8];
  if constexpr (Nibbles) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int j = 0; j < 4; ++j) {
      const __m512i x = _mm512_loadu_si512(w + 64 * j);
      weights[j] = _mm512_and_si512(x, low);
      weights[j + 4] = _mm512_and_si512(_mm512_srli_epi16(x, 4), low);
    }
  } else {
    for (int j = 0; j < 8; ++j) weights[j] = _mm512_loadu_si512(w + 64 * j);
  }
  for (int j = 0; j < 8; ++j)
    for (int r = 0; r < Rows; ++r)
      acc[r].v = _mm512_dpbusd_epi32(acc[r].v, weights[j],
                                     _mm512_set1_epi32(four_bytes(a.q[row0 + r] + 4 * j)));
}

#elif defined(PACELINE_AVX2) && defined(__AVXVNNI__)

template <bool Nibbles, int Rows>
inline void dot_block(const uint8_t* w, const QuantBlock& a, int row0, I16 (&acc)[Rows]) {
  const __m256i low = _mm256_set1_epi8(15);
  const __m256i* p = reinterpret_cast<const __m256i*>(w);
  for (int j = 0; j < 8; ++j) {
    __m256i w0 = _mm256_loadu_si256(p + 2 * (Nibbles ? j % 4 : j));
    __m256i w1 = _mm256_loadu_si256(p + 2 * (Nibbles ? j % 4 : j) + 1);
    if constexpr (Nibbles) {
      if (j >= 4) w0 = _mm256_srli_epi16(w0, 4), w1 = _mm256_srli_epi16(w1, 4);
      w0 = _mm256_and_si256(w0, low);
      w1 = _mm256_and_si256(w1, low);
    }
    for (int r = 0; r < Rows; ++r) {
      const __m256i x = _mm256_set1_epi32(four_bytes(a.q[row0 + r] + 4 * j));
      acc[r].lo = _mm256_dpbusd_avx_epi32(acc[r].lo, w0, x);
      acc[r].hi = _mm256_dpbusd_avx_epi32(acc[r].hi, w1, x);
    }
  }
}

#elif defined(PACELINE_AVX2)

template <bool Nibbles, int Rows>
inline void dot_block(const uint8_t* w, const QuantBlock& a, int row0, I16 (&acc)[Rows]) {
  const __m256i* p = reinterpret_cast<const __m256i*>(w);
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (Nibbles) {
    // A block fits in int16: eight sums of two products of at most 15 * 127 make 30480.
    const __m256i low = _mm256_set1_epi8(15);
    __m256i lo[Rows], hi[Rows];
    for (int r = 0; r < Rows; ++r) lo[r] = hi[r] = _mm256_setzero_si256();
    for (int j = 0; j < 8; ++j) {
      __m256i w0 = _mm256_loadu_si256(p + 2 * (j % 4)), w1 = _mm256_loadu_si256(p + 2 * (j % 4) + 1);
      if (j >= 4) w0 = _mm256_srli_epi16(w0, 4), w1 = _mm256_srli_epi16(w1, 4);
      w0 = _mm256_and_si256(w0, low);
      w1 = _mm256_and_si256(w1, low);
      for (int r = 0; r < Rows; ++r) {
        const __m256i x = _mm256_set1_epi32(four_bytes(a.q[row0 + r] + 4 * j));
        lo[r] = _mm256_add_epi16(lo[r], _mm256_maddubs_epi16(w0, x));
        hi[r] = _mm256_add_epi16(hi[r], _mm256_maddubs_epi16(w1, x));
      }
    }
    for (int r = 0; r < Rows; ++r) {
      acc[r].lo = _mm256_add_epi32(acc[r].lo, _mm256_madd_epi16(lo[r], ones));
      acc[r].hi = _mm256_add_epi32(acc[r].hi, _mm256_madd_epi16(hi[r], ones));
    }
  } else {
    // w * x = |w| * (x with the sign of w): two products make at most 2 * 128 * 127 = 32512. The
    // zero point 128 is taken off the weights here and put back as 128 * sum(x) by the caller's
    // correction, so it is added once more below.
    const __m256i offset = _mm256_set1_epi8(static_cast<char>(0x80));
    for (int j = 0; j < 8; ++j) {
      const __m256i w0 = _mm256_xor_si256(_mm256_loadu_si256(p + 2 * j), offset);
      const __m256i w1 = _mm256_xor_si256(_mm256_loadu_si256(p + 2 * j + 1), offset);
      const __m256i m0 = _mm256_abs_epi8(w0), m1 = _mm256_abs_epi8(w1);
      for (int r = 0; r < Rows; ++r) {
        const __m256i x = _mm256_set1_epi32(four_bytes(a.q[row0 + r] + 4 * j));
        const __m256i s0 = _mm256_maddubs_epi16(m0, _mm256_sign_epi8(x, w0));
        const __m256i s1 = _mm256_maddubs_epi16(m1, _mm256_sign_epi8(x, w1));
        acc[r].lo = _mm256_add_epi32(acc[r].lo, _mm256_madd_epi16(s0, ones));
        acc[r].hi = _mm256_add_epi32(acc[r].hi, _mm256_madd_epi16(s1, ones));
      }
    }
    for (int r = 0; r < Rows; ++r) {
      const __m256i back = _mm256_set1_epi32(-128 * a.minus_sum[row0 + r]);
      acc[r].lo = _mm256_add_epi32(acc[r].lo, back);
      acc[r].hi = _mm256_add_epi32(acc[r].hi, back);
    }
  }
}

#else

template <bool Nibbles, int Rows>
inline void dot_block(const uint8_t* w, const QuantBlock& a, int row0, I16 (&acc)[Rows]) {
  for (int k = 0; k < kBlock; ++k) {
    const int byte = Nibbles ? k % 16 : k;
    const uint8_t* p = w + byte / 4 * 64 + byte % 4;
    const int shift = Nibbles && k >= 16 ? 4 : 0;
    for (int r = 0; r < Rows; ++r) {
      const int x = a.q[row0 + r][k];
      for (int n = 0; n < kLanes; ++n)
        acc[r].v[n] += (Nibbles ? (p[4 * n] >> shift) & 15 : p[4 * n]) * x;
    }
  }
}

#endif

}  // namespace paceline
