#include "experts4.h"

#include "simd.h"

/* Lane r: the sum of count levels of line r, GROUP apart, times digits; high ones count 256 times. */
#if defined(__AVX2__)
typedef struct {
    __m256i part[4]; /* the group's levels, 0 to 15, in the order of the digits */
} Levels;

INLINE Levels levels_of(const uint8_t *words) {
    const __m256i nibble = _mm256_set1_epi8(15), sign = _mm256_set1_epi8((char)0x88);
    Levels levels;
    for (int i = 0; i < 2; i++) {
        __m256i two = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(words + 32 * i)), sign);
        levels.part[i] = _mm256_and_si256(two, nibble);
        levels.part[2 + i] = _mm256_and_si256(_mm256_srli_epi16(two, 4), nibble);
    }
    return levels;
}

INLINE __m256i digit_sums(const Levels *levels, const int8_t *digits, int first, int count) {
    __m256i sum = _mm256_setzero_si256();
    /* At most four products of pairs in 16 bits: 4 * 2 * 15 * 128. */
    for (int i = first; i < first + count; i++)
        sum = _mm256_add_epi16(
            sum, _mm256_maddubs_epi16(levels->part[i], _mm256_loadu_si256((const __m256i *)(digits + 32 * i))));
    return _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
}

/* first, count: of the four parts of a group. */
INLINE __m256i line_sums(const uint8_t *words, const int8_t *high, const int8_t *low, int first, int count) {
    Levels levels = levels_of(words);
    _mm_prefetch((const char *)words + AHEAD, _MM_HINT_T0);
    return _mm256_add_epi32(_mm256_slli_epi32(digit_sums(&levels, high, first, count), 8),
                            digit_sums(&levels, low, first, count));
}

INLINE vi sums_of_lines(const uint8_t *words, const int8_t *high, const int8_t *low, int first, int count) {
    __m256i pair[4], quad[2];
    for (int i = 0; i < 4; i++)
        pair[i] = _mm256_hadd_epi32(line_sums(words + 2 * i * HALF, high, low, first, count),
                                    line_sums(words + (2 * i + 1) * HALF, high, low, first, count));
    for (int i = 0; i < 2; i++)
        quad[i] = _mm256_hadd_epi32(pair[2 * i], pair[2 * i + 1]);
    return (vi)_mm256_add_epi32(_mm256_permute2x128_si256(quad[0], quad[1], 0x20),
                                _mm256_permute2x128_si256(quad[0], quad[1], 0x31));
}
#else
INLINE vi sums_of_lines(const uint8_t *words, const int8_t *high, const int8_t *low, int first, int count) {
    vi sums = {0};
    for (int r = 0; r < LANES; r++)
        for (int place = QUARTER * first; place < QUARTER * (first + count); place++) {
            uint8_t two = words[r * HALF + place % HALF] ^ 0x88;
            sums[r] += (place < HALF ? two & 15 : two >> 4) * (256 * high[place] + low[place]);
        }
    return sums;
}
#endif

INLINE void multiply_tile(const uint8_t *words, const uint16_t *scales, int groups, int runs, const Row *const *rows,
                          int num_rows, float *y) {
    for (int i = 0; i < num_rows * TILE; i += LANES)
        vstore(y + i, vset(0.0f));
    for (int g = 0; g < groups; g++)
        for (int r = 0; r < num_rows; r++) {
            const Row *row = rows[r];
            for (int line = 0; line < TILE; line += LANES) {
                int64_t at = (int64_t)g * TILE + line;
                vf scale = vload_bf16(scales + at), total = vload(y + r * TILE + line);
                for (int part = 0; part < runs; part++) {
                    int run = g * runs + part, count = 4 / runs;
                    vi sum = sums_of_lines(words + at * HALF, row->high + g * GROUP, row->low + g * GROUP, part * count,
                                           count);
                    /* Units count sixteen times. */
                    vf value = __builtin_convertvector((sum - row->excess[run]) * 16, vf);
                    total = vfma(value, scale * vset(row->units[run]), total);
                }
                vstore(y + r * TILE + line, total);
            }
        }
}

void tile_product_narrow(const uint8_t *words, const uint16_t *scales, int groups, int runs, const Row *const *rows,
                         int num_rows, float *y) {
    if (runs == 1)
        multiply_tile(words, scales, groups, 1, rows, num_rows, y);
    else
        multiply_tile(words, scales, groups, 2, rows, num_rows, y);
}
