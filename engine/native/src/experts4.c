/* A 4-bit expert of the GPU's (engine/cuda/quant.py packs it) for a few rows, to the bit as engine/cuda/digits.py and
 * engine/cuda/moe.py compute it: rows become two int8 digits per value, sums of a run of columns are whole numbers, and
 * runs are added up in their order with one rounding of each operation. */
#include <stdlib.h>

#include "model.h"
#include "simd.h"

#define GROUP 128
#define HALF (GROUP / 2)
#define QUARTER (GROUP / 4)
#define TILE 64 /* rows that lie together */

/* [n/TILE][groups][TILE] rows of a group: HALF bytes of two nibbles each, and a bf16 scale. */
typedef struct {
    const uint8_t *words;
    const uint16_t *scales;
    int32_t groups, tiles;
} Packed4;

/* One row's digits as they lie in memory, the high ones behind all low ones; of each run its unit over 16, and 8 times
 * the sum of its values in units, which is what weights count too much when they are read as 0 to 15. */
typedef struct {
    int8_t *low, *high;
    float *units;
    int32_t *excess;
    int runs; /* of a group: 1 or 2 */
} Row;

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The column of a group whose digit lies at a place. */
INLINE int column_of(int place) { return place % 2 * HALF + place / HALF * QUARTER + place % HALF / 2; }

/* One run: places [first, first + count) of a group whose values are x; the run's index in the row. */
static void split_run(const Row *row, int group, int first, int count, int run, const float *x) {
    uint32_t largest = 0;
    for (int p = first; p < first + count; p++) {
        uint32_t size = bits_of(x[column_of(p)]) & 0x7fffffff;
        largest = size > largest ? size : largest;
    }
    uint32_t exponent = largest >> 23;
    exponent = exponent < 18 ? 18 : exponent;
    row->units[run] = exponent == 255 ? NAN : float_of((exponent - 17) << 23);
    float factor = float_of((267 - exponent) << 23);
    int32_t sum = 0;
    for (int p = first; p < first + count; p++) {
        float shifted = x[column_of(p)] * factor + 12582912.0f;
        int32_t whole = (int32_t)(bits_of(shifted) - 0x4b400000u);
        int8_t low = (int8_t)whole, high = (int8_t)((whole - low) >> 8);
        row->low[group * GROUP + p] = low;
        row->high[group * GROUP + p] = high;
        sum += 256 * high + low;
    }
    row->excess[run] = 8 * sum;
}

/* x [groups * GROUP] */
static void split_row(const Row *row, int groups, const float *x) {
    for (int run = 0; run < groups * row->runs; run++) {
        int count = GROUP / row->runs, group = run / row->runs;
        split_run(row, group, run % row->runs * count, count, run, x + (int64_t)group * GROUP);
    }
}

/* Weights of eight rows and one group as 0 to 15, in the order of the digits. */
static void unpack_rows(const uint8_t *words, uint8_t *levels) {
    for (int r = 0; r < LANES; r++)
        for (int i = 0; i < HALF; i++) {
            uint8_t two = words[r * HALF + i] ^ 0x88;
            levels[r * GROUP + i] = two & 15;
            levels[r * GROUP + HALF + i] = two >> 4;
        }
}

/* Lane r: the sum of count levels of row r times digits. */
#if defined(__AVX2__)
INLINE __m256i run_sums(const uint8_t *levels, const int8_t *digits, int count) {
    __m256i sum = _mm256_setzero_si256();
    /* At most four products of pairs in 16 bits: 4 * 2 * 15 * 128. */
    for (int i = 0; i < count; i += 32)
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(_mm256_loadu_si256((const __m256i *)(levels + i)),
                                                         _mm256_loadu_si256((const __m256i *)(digits + i))));
    return _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
}

INLINE __m256i values_of(const uint8_t *levels, const int8_t *high, const int8_t *low, int count) {
    return _mm256_add_epi32(_mm256_slli_epi32(run_sums(levels, high, count), 8), run_sums(levels, low, count));
}

INLINE vi sums_of_rows(const uint8_t *levels, const int8_t *high, const int8_t *low, int count) {
    __m256i pair[4], quad[2];
    for (int i = 0; i < 4; i++)
        pair[i] = _mm256_hadd_epi32(values_of(levels + 2 * i * GROUP, high, low, count),
                                    values_of(levels + (2 * i + 1) * GROUP, high, low, count));
    for (int i = 0; i < 2; i++)
        quad[i] = _mm256_hadd_epi32(pair[2 * i], pair[2 * i + 1]);
    return (vi)_mm256_add_epi32(_mm256_permute2x128_si256(quad[0], quad[1], 0x20),
                                _mm256_permute2x128_si256(quad[0], quad[1], 0x31));
}
#else
INLINE vi sums_of_rows(const uint8_t *levels, const int8_t *high, const int8_t *low, int count) {
    vi sums = {0};
    for (int r = 0; r < LANES; r++)
        for (int i = 0; i < count; i++)
            sums[r] += levels[r * GROUP + i] * (256 * high[i] + low[i]);
    return sums;
}
#endif

/* y[r][8 lanes] of output rows [line, line + 8) of a tile, for num_rows rows. */
static void multiply_lines(const Packed4 *w, int tile, int line, const Row *rows, int num_rows, vf *y) {
    uint8_t levels[LANES * GROUP];
    for (int r = 0; r < num_rows; r++)
        y[r] = vset(0.0f);
    for (int g = 0; g < w->groups; g++) {
        int64_t at = ((int64_t)tile * w->groups + g) * TILE + line;
        unpack_rows(w->words + at * HALF, levels);
        vf scale = vload_bf16(w->scales + at);
        for (int r = 0; r < num_rows; r++) {
            const Row *row = rows + r;
            int count = GROUP / row->runs;
            for (int part = 0; part < row->runs; part++) {
                int first = part * count, run = g * row->runs + part;
                const int8_t *high = row->high + g * GROUP + first, *low = row->low + g * GROUP + first;
                vi sum = sums_of_rows(levels + first, high, low, count) - row->excess[run];
                /* Units count sixteen times. */
                vf value = __builtin_convertvector(sum * 16, vf);
                y[r] = vfma(value, scale * vset(row->units[run]), y[r]);
            }
        }
    }
}

/* Floats that rows of so many columns take as digits. */
static int64_t row_floats(int groups, int runs) { return groups * (2 * GROUP / 4 + 2 * runs); }

static Row row_at(float *block, int groups, int runs) {
    int8_t *digits = (int8_t *)block;
    float *units = block + groups * (2 * GROUP / 4);
    return (Row){digits, digits + groups * GROUP, units, (int32_t *)(units + groups * runs), runs};
}

/* parts fp32 [R, hidden] of rows x bf16 [R, hidden] that chose this expert of width columns between its two products.
 * Returns 0, or -1 when memory is short. Any number of threads may call it at once. */
EXPORT int stratagate_expert4(const Packed4 *gate_up, const Packed4 *down, const uint16_t *x, int num_rows, int hidden,
                              int width, float *parts) {
    int up_groups = gate_up->groups, down_groups = down->groups;
    int64_t x_floats = row_floats(up_groups, 1), middle_floats = row_floats(down_groups, 2);
    int64_t middle_width = (int64_t)down_groups * GROUP, x_width = (int64_t)up_groups * GROUP;
    int64_t per_row = x_floats + middle_floats + middle_width;
    float *block = malloc(sizeof(float) * (per_row * num_rows + x_width));
    Row *rows = malloc(sizeof(Row) * 2 * num_rows);
    vf *y = aligned_alloc(sizeof(vf), sizeof(vf) * num_rows);
    if (!block || !rows || !y) {
        free(block), free(rows), free(y);
        return -1;
    }
    Row *x_rows = rows, *middle_rows = rows + num_rows;
    float *wide = block + per_row * num_rows, *middle = block + (x_floats + middle_floats) * num_rows;
    for (int r = 0; r < num_rows; r++) {
        x_rows[r] = row_at(block + x_floats * r, up_groups, 1);
        middle_rows[r] = row_at(block + x_floats * num_rows + middle_floats * r, down_groups, 2);
        for (int64_t i = 0; i < x_width; i++)
            wide[i] = i < hidden ? float_of((uint32_t)x[(int64_t)r * hidden + i] << 16) : 0.0f;
        split_row(&x_rows[r], up_groups, wide);
    }
    memset(middle, 0, sizeof(float) * middle_width * num_rows);
    /* Rows of gate and up alternate: eight lines are four columns. */
    for (int n = 0; n < 2 * width; n += LANES) {
        multiply_lines(gate_up, n / TILE, n % TILE, x_rows, num_rows, y);
        for (int r = 0; r < num_rows; r++) {
            vf even = __builtin_shufflevector(y[r], y[r], 0, 2, 4, 6, 0, 2, 4, 6);
            vf odd = __builtin_shufflevector(y[r], y[r], 1, 3, 5, 7, 1, 3, 5, 7);
            vf product = vsilu(even) * odd;
            for (int i = 0; i < LANES / 2 && n / 2 + i < width; i++)
                middle[middle_width * r + n / 2 + i] = product[i];
        }
    }
    for (int r = 0; r < num_rows; r++)
        split_row(&middle_rows[r], down_groups, middle + middle_width * r);
    for (int n = 0; n < hidden; n += LANES) {
        multiply_lines(down, n / TILE, n % TILE, middle_rows, num_rows, y);
        for (int r = 0; r < num_rows; r++)
            vstore_n(parts + (int64_t)r * hidden + n, y[r], hidden - n);
    }
    free(block), free(rows), free(y);
    return 0;
}
