/* Eight fp32 lanes, written with the compiler's vector types so that one text serves x86-64 and AArch64. Sixteen where a
 * file says so, for what is computed lane by lane alone: the width of a vector is then no part of a result.
 *
 * Every multiply-add is explicit (vfma) and the files are compiled with -ffp-contract=off: where the compiler chose
 * what to fuse, two copies of a loop could round differently, and a row's bits would depend on its company.
 * Lengths that LANES does not divide go through zero-filled vectors, so that a tail element is computed like any other. */
#ifndef STRATAGATE_SIMD_H
#define STRATAGATE_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef LANES
#define LANES 8
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef float vf_unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE vf vload(const float *p) { return *(const vf_unaligned *)p; }
INLINE void vstore(float *p, vf v) { *(vf_unaligned *)p = v; }
#if LANES == 16
INLINE vf vset(float x) { return (vf)_mm512_set1_ps(x); }
#else
INLINE vf vset(float x) { return (vf){x, x, x, x, x, x, x, x}; }
#endif

/* The first n < LANES elements, zeros behind them. */
INLINE vf vload_part(const float *p, int n) {
#if LANES == 16
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
    float part[LANES] = {0};
    memcpy(part, p, (size_t)n * sizeof(float));
    return vload(part);
#endif
}

INLINE void vstore_part(float *p, vf v, int n) {
#if LANES == 16
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#else
    float part[LANES];
    vstore(part, v);
    memcpy(p, part, (size_t)n * sizeof(float));
#endif
}

INLINE vf vload_n(const float *p, int left) { return left >= LANES ? vload(p) : vload_part(p, left); }

INLINE void vstore_n(float *p, vf v, int left) {
    if (left >= LANES)
        vstore(p, v);
    else
        vstore_part(p, v, left);
}

/* a * b + c, rounded once. */
INLINE vf vfma(vf a, vf b, vf c) {
#if LANES == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    union { vf v; float32x4_t half[2]; } x = {a}, y = {b}, z = {c};
    z.half[0] = vfmaq_f32(z.half[0], x.half[0], y.half[0]);
    z.half[1] = vfmaq_f32(z.half[1], x.half[1], y.half[1]);
    return z.v;
#else
    for (int i = 0; i < LANES; i++)
        c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

INLINE vf vselect(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
INLINE vf vmax(vf a, vf b) { return vselect(a > b, a, b); }

#if LANES == 8
/* Sum of the lanes, always in the same order. */
INLINE float vsum(vf v) {
    float a = v[0] + v[4], b = v[1] + v[5], c = v[2] + v[6], d = v[3] + v[7];
    return (a + c) + (b + d);
}

/* Lane i: the sum of v[i]'s lanes. */
INLINE vf vsum8(const vf *v) {
    vf pair[4], quad[2];
    for (int i = 0; i < 4; i++)
        pair[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
                  __builtin_shufflevector(v[2 * i], v[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    for (int i = 0; i < 2; i++)
        quad[i] = __builtin_shufflevector(pair[2 * i], pair[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                  __builtin_shufflevector(pair[2 * i], pair[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return __builtin_shufflevector(quad[0], quad[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(quad[0], quad[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

INLINE float vmax_lane(vf v) {
    float best = v[0];
    for (int i = 1; i < LANES; i++)
        best = v[i] > best ? v[i] : best;
    return best;
}

INLINE vf vload_i8(const int8_t *p) {
#if defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    int8_t v __attribute__((vector_size(8)));
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, vf);
#endif
}

#endif

/* Sixteen codes times CODE_UNIT, which the row's scale takes back without rounding. A code in the top byte of an integer
 * is one shuffle away; sign extension would take two. */
#if defined(__AVX2__)
#define CODE_UNIT 16777216.0f
#else
#define CODE_UNIT 1.0f
#endif

INLINE void vload_codes(const int8_t *p, vf *value) {
#if LANES == 16
    value[0] = (vf)_mm512_cvtepi32_ps(_mm512_slli_epi32(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)), 24));
#elif defined(__AVX2__)
    const __m256i first = _mm256_setr_epi8(-1, -1, -1, 0, -1, -1, -1, 1, -1, -1, -1, 2, -1, -1, -1, 3,
                                           -1, -1, -1, 4, -1, -1, -1, 5, -1, -1, -1, 6, -1, -1, -1, 7);
    const __m256i second = _mm256_setr_epi8(-1, -1, -1, 8, -1, -1, -1, 9, -1, -1, -1, 10, -1, -1, -1, 11,
                                            -1, -1, -1, 12, -1, -1, -1, 13, -1, -1, -1, 14, -1, -1, -1, 15);
    __m256i codes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
    value[0] = (vf)_mm256_cvtepi32_ps(_mm256_shuffle_epi8(codes, first));
    value[1] = (vf)_mm256_cvtepi32_ps(_mm256_shuffle_epi8(codes, second));
#else
    value[0] = vload_i8(p);
    value[1] = vload_i8(p + LANES);
#endif
}

INLINE vf vload_bf16(const uint16_t *p) {
#if LANES == 16
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
    __m128i half = _mm_loadu_si128((const __m128i *)p);
    return (vf)_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
#else
    uint16_t v __attribute__((vector_size(16)));
    memcpy(&v, p, sizeof v);
    return (vf)(__builtin_convertvector(v, vi) << 16);
#endif
}

/* Nearest bf16, ties to even. */
INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 64); /* not a number stays one */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* e^x within 2 ulp; below -87.3 the smallest normal number, above 88.3 the last finite one. */
INLINE vf vexp(vf x) {
    const vf low = vset(-87.33654f), high = vset(88.3f), magic = vset(12582912.0f);
    x = vselect(x < low, low, x);
    x = vselect(x > high, high, x);
    /* Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits. */
    vf shifted = vfma(x, vset(1.44269504f), magic);
    vf n = shifted - magic;
    vf r = vfma(n, vset(-0.693359375f), x);
    r = vfma(n, vset(2.12194440e-4f), r);
    vf p = vset(1.9875691e-4f);
    p = vfma(p, r, vset(1.3981999e-3f));
    p = vfma(p, r, vset(8.3334519e-3f));
    p = vfma(p, r, vset(4.1665795e-2f));
    p = vfma(p, r, vset(1.6666666e-1f));
    p = vfma(p, r, vset(5.0000000e-1f));
    p = vfma(p, r * r, r + vset(1.0f));
    vi power = ((vi)shifted - (vi)magic + 127) << 23;
    return p * (vf)power;
}

INLINE vf vsigmoid(vf x) { return vset(1.0f) / (vset(1.0f) + vexp(-x)); }
INLINE vf vsilu(vf x) { return x * vsigmoid(x); }
INLINE float sigmoid1(float x) { return vsigmoid(vset(x))[0]; }

#if LANES == 8

INLINE float dot(const float *a, const float *b, int n) {
    vf sum = vset(0.0f);
    for (int i = 0; i < n; i += LANES)
        sum = vfma(vload_n(a + i, n - i), vload_n(b + i, n - i), sum);
    return vsum(sum);
}

/* 1 / sqrt(mean(x^2) + eps) */
INLINE float inverse_rms(const float *x, int n, float eps) {
    return 1.0f / sqrtf(dot(x, x, n) / (float)n + eps);
}

/* out = x * factor * scale, elementwise; scale may be NULL for ones. out may be x. */
INLINE void scaled(float *out, const float *x, float factor, const float *scale, int n) {
    vf f = vset(factor);
    for (int i = 0; i < n; i += LANES) {
        vf v = vload_n(x + i, n - i) * f;
        if (scale)
            v *= vload_n(scale + i, n - i);
        vstore_n(out + i, v, n - i);
    }
}
#endif

#endif
