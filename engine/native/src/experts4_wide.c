#include "experts4.h"
#include "processor.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define WIDE __attribute__((target("avx512f,avx512bw,avx512vnni")))
#define WIDE_INLINE static inline __attribute__((always_inline)) WIDE

/* Per quarter of 64 bytes: sums of two and two numbers of each of two vectors, then of all four of each of four. */
WIDE_INLINE __m512i join2(__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}

WIDE_INLINE __m512i join4(__m512i ab, __m512i cd) {
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

WIDE_INLINE __m512i join_quarters(__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

typedef struct {
    __m512i high[2], low[2];
} GroupDigits;

WIDE_INLINE __m512i values_of(__m512i high, __m512i low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }

/* 16 numbers for each run of one line, whose sum is 16 times the run's. */
WIDE_INLINE void multiply_line(const uint8_t *words, const GroupDigits *x, int runs, __m512i *sums) {
    const __m512i sign = _mm512_set1_epi8((char)0x80), high_nibble = _mm512_set1_epi8((char)0xf0);
    const __m512i zero = _mm512_setzero_si512();
    /* (nibble ^ sign) & high_nibble: sixteen times 0 to 15. */
    __m512i two = _mm512_loadu_si512(words);
    __m512i first = _mm512_ternarylogic_epi32(_mm512_slli_epi16(two, 4), sign, high_nibble, 0x28);
    __m512i second = _mm512_ternarylogic_epi32(two, sign, high_nibble, 0x28);
    _mm_prefetch((const char *)words + AHEAD, _MM_HINT_T0);
    __m512i high = _mm512_dpbusd_epi32(zero, first, x->high[0]), low = _mm512_dpbusd_epi32(zero, first, x->low[0]);
    if (runs == 1) {
        high = _mm512_dpbusd_epi32(high, second, x->high[1]);
        low = _mm512_dpbusd_epi32(low, second, x->low[1]);
    } else {
        sums[1] = values_of(_mm512_dpbusd_epi32(zero, second, x->high[1]), _mm512_dpbusd_epi32(zero, second, x->low[1]));
    }
    sums[0] = values_of(high, low);
}

/* Lane l: 16 times the sums of line l, of 16 lines. */
WIDE_INLINE void multiply_16_lines(const uint8_t *words, const GroupDigits *x, int runs, __m512i *sums) {
    __m512i quarter[2][4];
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++) {
        __m512i line[4][2] = {{{0}}};
#pragma GCC unroll 4
        for (int l = 0; l < 4; l++)
            multiply_line(words + (4 * q + l) * HALF, x, runs, line[l]);
        for (int run = 0; run < runs; run++)
            quarter[run][q] = join4(join2(line[0][run], line[1][run]), join2(line[2][run], line[3][run]));
    }
    for (int run = 0; run < runs; run++)
        sums[run] = join_quarters(join_quarters(quarter[run][0], quarter[run][1]),
                                  join_quarters(quarter[run][2], quarter[run][3]));
}

WIDE_INLINE void multiply_tile(const uint8_t *words, const uint16_t *scales, int groups, int runs,
                               const Row *const *rows, int num_rows, float *y) {
    for (int i = 0; i < num_rows * TILE; i += 16)
        _mm512_storeu_ps(y + i, _mm512_setzero_ps());
    for (int g = 0; g < groups; g++) {
        const uint8_t *own = words + (int64_t)g * TILE * HALF;
        for (int r = 0; r < num_rows; r++) {
            const Row *row = rows[r];
            GroupDigits x;
            for (int half = 0; half < 2; half++) {
                x.high[half] = _mm512_loadu_si512(row->high + g * GROUP + half * HALF);
                x.low[half] = _mm512_loadu_si512(row->low + g * GROUP + half * HALF);
            }
            for (int line = 0; line < TILE; line += 16) {
                __m512i sums[2], wide = _mm512_cvtepu16_epi32(
                                     _mm256_loadu_si256((const __m256i *)(scales + g * TILE + line)));
                __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
                __m512 total = _mm512_loadu_ps(y + r * TILE + line);
                multiply_16_lines(own + line * HALF, &x, runs, sums);
                for (int part = 0; part < runs; part++) {
                    int run = g * runs + part;
                    __m512i sum = _mm512_sub_epi32(sums[part], _mm512_set1_epi32(16 * row->excess[run]));
                    __m512 value = _mm512_cvtepi32_ps(sum);
                    total = _mm512_fmadd_ps(value, _mm512_mul_ps(scale, _mm512_set1_ps(row->units[run])), total);
                }
                _mm512_storeu_ps(y + r * TILE + line, total);
            }
        }
    }
}

WIDE static void tile_product_wide(const uint8_t *words, const uint16_t *scales, int groups, int runs,
                                   const Row *const *rows, int num_rows, float *y) {
    if (runs == 1)
        multiply_tile(words, scales, groups, 1, rows, num_rows, y);
    else
        multiply_tile(words, scales, groups, 2, rows, num_rows, y);
}

TileProduct *widest_tile_product(void) {
    int is_wide = processor_has(HAS_AVX512F | HAS_AVX512BW, HAS_AVX512_VNNI, 0, SAVES_WIDE);
    return is_wide ? tile_product_wide : tile_product_narrow;
}

#else

TileProduct *widest_tile_product(void) { return tile_product_narrow; }

#endif
