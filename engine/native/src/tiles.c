#include "tiles.h"

/* Compilers that know the instructions have them in a header of this name: gcc the first, clang the second. */
#if defined(__x86_64__) && defined(__linux__) && (__has_include(<amxint8intrin.h>) || __has_include(<amxintrin.h>))

#include <immintrin.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "processor.h"

#define TILES __attribute__((target("amx-tile,amx-int8,avx512f,avx512bw,avx512vl")))
#define TILES_INLINE static inline __attribute__((always_inline)) TILES

#define LINE TILE_VALUES /* bytes of a tile's row */

#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM */
#define TILE_DATA 18

#define MOST (127.0f * 65536.0f)  /* digits reach 127 * (65536 + 256 + 1); what lies between is room for rounding */
#define SMALLEST 0x1p-100f        /* of a row's largest value: its scale and 1 / scale are normal numbers */
#define NOT_FINITE 0x7f800000u    /* bits of infinity; those of a NaN are larger */

int tiles_available(void) {
    return processor_has(HAS_AVX512F | HAS_AVX512BW | HAS_AVX512VL, 0, HAS_AMX_TILE | HAS_AMX_INT8, SAVES_TILES) &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

static int8_t *group_of(Digits d, int group) {
    return d.groups + (int64_t)group * (SCALE_BYTES + (int64_t)d.blocks * TILE_ROWS * TILE_VALUES);
}

/* The first digit of a row in its group's first tile; the next digits are the next lines. */
static int8_t *digits_at(Digits d, int row) {
    return group_of(d, row / GROUP_ROWS) + SCALE_BYTES + row % GROUP_ROWS * 3 * TILE_VALUES;
}

static float *scale_at(Digits d, int row) { return (float *)group_of(d, row / GROUP_ROWS) + row % GROUP_ROWS; }

TILES_INLINE __mmask16 left_mask(int left) {
    return (__mmask16)(left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0);
}

/* Four times 16 whole numbers -> lines of 64 first, second and third digits. */
TILES_INLINE void split_digits(const __m512i *whole, int8_t *lines) {
    /* Each byte of a whole number plus 128 in every place is a digit plus 128. */
    const __m512i bias = _mm512_set1_epi32(0x808080);
    /* In a lane: the first bytes of its four numbers, the second ones, ... */
    const __m512i by_digit = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    /* A line then has quads of k in the order 0, 4, 8, 12, 1, ...: lane after lane, number after number. */
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i quads[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        quads[i] = _mm512_xor_si512(_mm512_add_epi32(whole[i], bias), bias);
        quads[i] = _mm512_shuffle_epi8(quads[i], by_digit);
    }
    __m512i low = _mm512_unpacklo_epi32(quads[0], quads[1]), high = _mm512_unpackhi_epi32(quads[0], quads[1]);
    __m512i later_low = _mm512_unpacklo_epi32(quads[2], quads[3]), later_high = _mm512_unpackhi_epi32(quads[2], quads[3]);
    __m512i first = _mm512_unpacklo_epi64(low, later_low), second = _mm512_unpackhi_epi64(low, later_low);
    __m512i third = _mm512_unpacklo_epi64(high, later_high);
    _mm512_store_si512(lines, _mm512_permutexvar_epi32(order, first));
    _mm512_store_si512(lines + LINE, _mm512_permutexvar_epi32(order, second));
    _mm512_store_si512(lines + 2 * LINE, _mm512_permutexvar_epi32(order, third));
}

TILES void digits_write(Digits to, int row, const float *x) {
    if (!to.groups)
        return;
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i most[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int i = 0; i < to.k; i += 32)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            __m512 value = _mm512_maskz_loadu_ps(left_mask(to.k - i - 16 * v), x + i + 16 * v);
            most[v] = _mm512_max_epu32(most[v], _mm512_and_si512(magnitude, _mm512_castps_si512(value)));
        }
    uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(most[0], most[1]));
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    largest = largest < SMALLEST ? SMALLEST : largest;
    float scale = largest * (1.0f / MOST), factor = 1.0f / scale;
    int n = to.k;
    if (bits >= NOT_FINITE) {
        /* A factor of 0 does not make a number of what is none: the values are left out. */
        scale = __builtin_nanf("");
        n = 0;
    }
    *scale_at(to, row) = scale;
    int8_t *at = digits_at(to, row);
    for (int first = 0; first < to.k; first += TILE_VALUES, at += TILE_ROWS * LINE) {
        __m512i whole[4];
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            int i = first + 16 * v;
            whole[v] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(left_mask(n - i), x + i), _mm512_set1_ps(factor)));
        }
        split_digits(whole, at);
    }
}

TILES void digits_copy(Digits to, int row, Digits from, int from_row) {
    *scale_at(to, row) = *scale_at(from, from_row);
    int8_t *at = digits_at(to, row);
    const int8_t *source = digits_at(from, from_row);
    for (int block = 0; block < to.blocks; block++) {
        for (int line = 0; line < 3 * LINE; line += LINE)
            _mm512_store_si512(at + line, _mm512_load_si512(source + line));
        at += TILE_ROWS * LINE;
        source += TILE_ROWS * LINE;
    }
}

/* Sums of one group and panel -> y, for the group's first rows. */
TILES_INLINE void join(const int32_t *sums, const float *scale, const Matrix *w, int panel, Rows y, int row, int count) {
    const __m512 high = _mm512_set1_ps(65536.0f), middle = _mm512_set1_ps(256.0f);
    __mmask16 mask = left_mask(w->n - panel * PANEL);
    __m512 weight_scale = _mm512_loadu_ps(w->scale + panel * PANEL);
    for (int r = 0; r < count; r++, sums += 3 * PANEL) {
        __m512 value = _mm512_cvtepi32_ps(_mm512_load_si512(sums));
        value = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums + PANEL)), middle, value);
        value = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums + 2 * PANEL)), high, value);
        value = _mm512_mul_ps(_mm512_mul_ps(value, weight_scale), _mm512_set1_ps(scale[r]));
        float *to = y.base + (y.index ? y.index[row + r] : row + r) * y.stride + panel * PANEL;
        _mm512_mask_storeu_ps(to, mask, value);
    }
}

#define LOAD_ROWS(tile, group) _tile_loadd(tile, x##group + (int64_t)b * TILE_ROWS * LINE, LINE)
#define LOAD_WEIGHTS(tile, p) _tile_loadd(tile, data + (p) * panel_bytes + (int64_t)b * 16 * LINE, LINE)
#define JOIN(tile, group, p)                                                                                      \
    do {                                                                                                          \
        _tile_stored(tile, sums, LINE);                                                                           \
        join(sums, (const float *)group_of(x, at + (group)), w, panel + (p), y, (at + (group)) * GROUP_ROWS,      \
             num_rows - (at + (group)) * GROUP_ROWS < GROUP_ROWS ? num_rows - (at + (group)) * GROUP_ROWS : GROUP_ROWS); \
    } while (0)

/* One or two groups from `at` on, one, two or (of one group) four panels: at most four tiles of sums, so that the unit
 * has independent ones to work on. */
TILES_INLINE void multiply(const int groups, const int panels, const Matrix *w, int panel, Digits x, Rows y, int num_rows,
                           int at) {
    int64_t panel_bytes = ((int64_t)w->k + 3) / 4 * LINE;
    const int8_t *data = (const int8_t *)w->data + panel * panel_bytes;
    const int8_t *x0 = group_of(x, at) + SCALE_BYTES, *x1 = groups > 1 ? group_of(x, at + 1) + SCALE_BYTES : x0;
    int32_t sums[TILE_ROWS * PANEL] __attribute__((aligned(64)));
    _tile_zero(0);
    if (groups * panels > 1)
        _tile_zero(1);
    if (groups * panels > 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int b = 0; b < x.blocks; b++) {
        LOAD_ROWS(4, 0);
        LOAD_WEIGHTS(6, 0);
        _tile_dpbssd(0, 4, 6);
        if (groups > 1) {
            LOAD_ROWS(5, 1);
            _tile_dpbssd(1, 5, 6);
            if (panels > 1) {
                LOAD_WEIGHTS(7, 1);
                _tile_dpbssd(2, 4, 7);
                _tile_dpbssd(3, 5, 7);
            }
            continue;
        }
        if (panels > 1) {
            LOAD_WEIGHTS(7, 1);
            _tile_dpbssd(1, 4, 7);
        }
        if (panels > 2) {
            LOAD_WEIGHTS(6, 2);
            _tile_dpbssd(2, 4, 6);
            LOAD_WEIGHTS(7, 3);
            _tile_dpbssd(3, 4, 7);
        }
    }
    JOIN(0, 0, 0);
    if (groups > 1) {
        JOIN(1, 1, 0);
        if (panels > 1) {
            JOIN(2, 0, 1);
            JOIN(3, 1, 1);
        }
        return;
    }
    if (panels > 1)
        JOIN(1, 0, 1);
    if (panels > 2) {
        JOIN(2, 0, 2);
        JOIN(3, 0, 3);
    }
}

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} Shapes;

TILES void tiles_multiply(const Matrix *w, Digits x, Rows y, int num_rows, int first, int end) {
    /* A tile of fewer rows is multiplied and stored in less time. */
    uint8_t height = (uint8_t)(num_rows < GROUP_ROWS ? 3 * num_rows : TILE_ROWS);
    Shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) { /* four of sums, two of rows, two of weights */
        shapes.row_bytes[i] = LINE;
        shapes.rows[i] = i < 6 ? height : 16;
    }
    int num_groups = (num_rows + GROUP_ROWS - 1) / GROUP_ROWS;
    /* The compiler does not know what a tile load reads. */
    __asm__ volatile("" ::: "memory");
    _tile_loadconfig(&shapes);
    for (int panel = first, step; panel < end; panel += step) {
        int left = end - panel;
        step = num_groups > 1 ? (left > 1 ? 2 : 1) : left > 3 ? 4 : left > 1 ? 2 : 1;
        for (int at = 0; at < num_groups; at += 2) {
            if (num_groups - at > 1 && step == 2)
                multiply(2, 2, w, panel, x, y, num_rows, at);
            else if (num_groups - at > 1)
                multiply(2, 1, w, panel, x, y, num_rows, at);
            else if (step == 4)
                multiply(1, 4, w, panel, x, y, num_rows, at);
            else if (step == 2)
                multiply(1, 2, w, panel, x, y, num_rows, at);
            else
                multiply(1, 1, w, panel, x, y, num_rows, at);
        }
    }
    /* A thread at rest keeps no tiles: the system would save 8 KiB at every switch. */
    _tile_release();
}

#else

/* Weights are then never packed for tiles, so nothing else is called. */
int tiles_available(void) { return 0; }
void digits_write(Digits to, int row, const float *x) { (void)to, (void)row, (void)x; }
void digits_copy(Digits to, int row, Digits from, int from_row) { (void)to, (void)row, (void)from, (void)from_row; }
void tiles_multiply(const Matrix *w, Digits x, Rows y, int num_rows, int first, int end) {
    (void)w, (void)x, (void)y, (void)num_rows, (void)first, (void)end;
}

#endif
