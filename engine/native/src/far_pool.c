/* Threads that compute the experts which lie in host memory, for a window of the GPU's whose other experts are computed
 * there meanwhile. A CUDA graph calls `stratagate_far_parts` by itself: it allocates nothing, knows no Python, and cannot
 * fail. An expert's weights are read once for all rows that chose it. */
#include <stdatomic.h>
#include <stdlib.h>

#include "experts4.h"
#include "model.h"
#include "simd.h"

#define DOWN_TILES 2 /* of one task: gate_up's tiles are longer */
#define TILE_COLUMNS (TILE / 2) /* lines of gate and up alternate */

/* Sizes of the largest window, and its buffers: digits [rows or pairs][2][groups * GROUP], the low ones first; units and
 * excess by run; middle fp32 [pairs][columns between the two products, padded to groups]. */
typedef struct {
    int32_t max_rows, top, num_experts, hidden, width;
    int32_t wide; /* whether vectors may be as wide as the processor has them, which changes no bit */
    int8_t *x_digits, *hidden_digits;
    float *x_units, *hidden_units, *middle;
    int32_t *x_excess, *hidden_excess;
} FarBuffers;

typedef struct FarPool {
    Pool *threads;
    FarBuffers buffers;
    TileProduct *product;
    Row *x_rows, *hidden_rows;                      /* [max_rows], [max_rows * top] */
    int32_t *rows, *pairs, *far, *firsts, *chosen_at; /* far, firsts: by chosen expert; chosen_at: by expert, else -1 */
    _Atomic int32_t *tiles_left;                    /* of each run of hidden columns, by chosen expert */
} FarPool;

/* One layer of a window. gate_up, down: the experts here, one behind another; order [num_experts]: which of them an
 * expert is, -1 for one that is not here. x bf16 [rows, hidden], ids [rows, top] -> parts fp32 [rows, top, hidden], of
 * which those of other experts are left alone. rests: whether the threads may sleep after it. */
typedef struct {
    FarPool *pool;
    Packed4 gate_up, down;
    const int32_t *order, *ids;
    const uint16_t *x;
    float *parts;
    int32_t num_rows, rests;
} FarWork;

/* Numbers too small to be normal are kept, as the GPU keeps them; returns what the thread did with them before. */
static uint64_t keep_denormals(void) {
#if defined(__x86_64__)
    uint32_t before = _mm_getcsr();
    _mm_setcsr(before & ~0x8040u);
#elif defined(__aarch64__)
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before & ~(UINT64_C(1) << 24)));
#else
    uint64_t before = 0;
#endif
    return before;
}

static void restore_denormals(uint64_t before) {
#if defined(__x86_64__)
    _mm_setcsr((uint32_t)before);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(before));
#else
    (void)before;
#endif
}

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* As whole numbers, what is not finite is larger than all that is. */
static uint32_t largest_of(const float *x, int count, uint32_t largest) {
    for (int i = 0; i < count; i++) {
        uint32_t size;
        memcpy(&size, x + i, sizeof size);
        size &= 0x7fffffff;
        largest = size > largest ? size : largest;
    }
    return largest;
}

/* Digits of half a group, whose columns are x[0..32) and x[64..96) by turns; returns the sum of its values. */
static int32_t digits_of(const float *x, float factor, int8_t *low, int8_t *high) {
    int32_t whole[HALF], sum = 0;
    for (int i = 0; i < QUARTER; i++) {
        float first = x[i] * factor + 12582912.0f, second = x[HALF + i] * factor + 12582912.0f;
        memcpy(&whole[2 * i], &first, sizeof first);
        memcpy(&whole[2 * i + 1], &second, sizeof second);
    }
    for (int p = 0; p < HALF; p++) {
        int32_t value = (int32_t)((uint32_t)whole[p] - 0x4b400000u);
        low[p] = (int8_t)value;
        high[p] = (int8_t)((int32_t)((uint32_t)value - (uint32_t)(int32_t)low[p]) >> 8);
        sum += 256 * high[p] + low[p];
    }
    return sum;
}

/* The run-th run of a row, runs a group; x: the group's GROUP columns. */
static void split_run(const Row *row, int run, int runs, const float *x) {
    int group = run / runs, half = run % runs;
    uint32_t largest = 0;
    for (int h = half; h < half + 2 / runs; h++) {
        largest = largest_of(x + h * QUARTER, QUARTER, largest);
        largest = largest_of(x + HALF + h * QUARTER, QUARTER, largest);
    }
    uint32_t exponent = largest >> 23;
    exponent = exponent < 18 ? 18 : exponent;
    row->units[run] = exponent == 255 ? NAN : float_of((exponent - 17) << 23);
    float factor = float_of((267 - exponent) << 23);
    int32_t sum = 0;
    for (int h = half; h < half + 2 / runs; h++) {
        int at = group * GROUP + h * HALF;
        sum += digits_of(x + h * QUARTER, factor, row->low + at, row->high + at);
    }
    row->excess[run] = 8 * sum;
}

static Row row_at(int8_t *digits, float *units, int32_t *excess, int64_t i, int groups, int runs) {
    digits += i * 2 * groups * GROUP;
    return (Row){digits, digits + groups * GROUP, units + i * groups * runs, excess + i * groups * runs};
}

typedef struct {
    FarPool *pool;
    const FarWork *work;
} Context;

static int groups_of(int columns) { return (columns + GROUP - 1) / GROUP; }

/* The i-th row that has an expert here. */
static void split_task(void *context, int i, int thread) {
    (void)thread;
    keep_denormals();
    const Context *c = context;
    const FarBuffers *b = &c->pool->buffers;
    int row = c->pool->rows[i];
    const uint16_t *x = c->work->x + (int64_t)row * b->hidden;
    for (int g = 0; g < groups_of(b->hidden); g++) {
        float group[GROUP] = {0};
        int count = b->hidden - g * GROUP < GROUP ? b->hidden - g * GROUP : GROUP;
        for (int k = 0; k < count; k++) {
            uint32_t bits = (uint32_t)x[g * GROUP + k] << 16;
            memcpy(&group[k], &bits, sizeof bits);
        }
        split_run(&c->pool->x_rows[row], g, 1, group);
    }
}

static void store_columns(const FarPool *pool, int tile, const int32_t *pairs, int num_pairs, const float *y) {
    const FarBuffers *b = &pool->buffers;
    int64_t first = (int64_t)tile * TILE_COLUMNS, stride = (int64_t)groups_of(b->width) * GROUP;
    for (int r = 0; r < num_pairs; r++)
        for (int i = 0; i < TILE_COLUMNS && first + i < b->width; i += LANES) {
            vf one = vload(y + r * TILE + 2 * i), two = vload(y + r * TILE + 2 * i + LANES);
            vf gate = __builtin_shufflevector(one, two, 0, 2, 4, 6, 8, 10, 12, 14);
            vf up = __builtin_shufflevector(one, two, 1, 3, 5, 7, 9, 11, 13, 15);
            /* Columns behind the last stay zeros. */
            vstore_n(b->middle + pairs[r] * stride + first + i, vsilu(gate) * up, b->width - (int)first - i);
        }
}

/* One tile of gate_up of one chosen expert. The last of a run's two tiles makes its digits. */
static void up_task(void *context, int task, int thread) {
    (void)thread;
    keep_denormals();
    const Context *c = context;
    FarPool *pool = c->pool;
    const FarBuffers *b = &pool->buffers;
    const Packed4 *w = &c->work->gate_up;
    int chosen = task / w->tiles, tile = task % w->tiles, num_runs = 2 * groups_of(b->width);
    int64_t at = ((int64_t)pool->far[chosen] * w->tiles + tile) * w->groups * TILE;
    int first = pool->firsts[chosen], end = pool->firsts[chosen + 1];
    for (int p = first; p < end; p += ROWS_AT_ONCE) {
        int count = end - p < ROWS_AT_ONCE ? end - p : ROWS_AT_ONCE;
        const Row *rows[ROWS_AT_ONCE];
        float y[ROWS_AT_ONCE * TILE];
        for (int r = 0; r < count; r++)
            rows[r] = &pool->x_rows[pool->pairs[p + r] / b->top];
        pool->product(w->words + at * HALF, w->scales + at, w->groups, 1, rows, count, y);
        store_columns(pool, tile, pool->pairs + p, count, y);
    }
    int run = tile / 4 * 2 + tile % 2;
    if (atomic_fetch_sub(&pool->tiles_left[chosen * num_runs + run], 1) > 1)
        return;
    for (int p = first; p < end; p++) {
        int64_t pair = pool->pairs[p];
        split_run(&pool->hidden_rows[pair], run, 2, b->middle + (pair * (num_runs / 2) + run / 2) * GROUP);
    }
}

/* A few tiles of down of one chosen expert. */
static void down_task(void *context, int task, int thread) {
    (void)thread;
    keep_denormals();
    const Context *c = context;
    FarPool *pool = c->pool;
    const FarBuffers *b = &pool->buffers;
    const Packed4 *w = &c->work->down;
    int num_blocks = (w->tiles + DOWN_TILES - 1) / DOWN_TILES, chosen = task / num_blocks;
    int first_tile = task % num_blocks * DOWN_TILES;
    int end_tile = first_tile + DOWN_TILES < w->tiles ? first_tile + DOWN_TILES : w->tiles;
    for (int tile = first_tile; tile < end_tile; tile++) {
        int64_t at = ((int64_t)pool->far[chosen] * w->tiles + tile) * w->groups * TILE;
        int end = pool->firsts[chosen + 1];
        for (int p = pool->firsts[chosen]; p < end; p += ROWS_AT_ONCE) {
            int count = end - p < ROWS_AT_ONCE ? end - p : ROWS_AT_ONCE;
            const Row *rows[ROWS_AT_ONCE];
            float y[ROWS_AT_ONCE * TILE];
            for (int r = 0; r < count; r++)
                rows[r] = &pool->hidden_rows[pool->pairs[p + r]];
            pool->product(w->words + at * HALF, w->scales + at, w->groups, 2, rows, count, y);
            for (int r = 0; r < count; r++) {
                float *part = c->work->parts + (int64_t)pool->pairs[p + r] * b->hidden;
                for (int n = 0; n < TILE && tile * TILE + n < b->hidden; n += LANES)
                    vstore_n(part + tile * TILE + n, vload(y + r * TILE + n), b->hidden - tile * TILE - n);
            }
        }
    }
}

/* Which experts here were chosen, by which pairs, and the rows of those. Returns the number of experts. */
static int choose(FarPool *pool, const FarWork *work, int *num_rows) {
    const FarBuffers *b = &pool->buffers;
    int num_chosen = 0, num_pairs = work->num_rows * b->top, counts_end = 0;
    int32_t *firsts = pool->firsts;
    *num_rows = 0;
    for (int p = 0; p < num_pairs; p++) {
        uint32_t expert = (uint32_t)work->ids[p];
        if (expert >= (uint32_t)b->num_experts || work->order[expert] < 0)
            continue;
        if (!*num_rows || pool->rows[*num_rows - 1] != p / b->top)
            pool->rows[(*num_rows)++] = p / b->top;
        if (pool->chosen_at[expert] < 0) {
            pool->chosen_at[expert] = num_chosen;
            pool->far[num_chosen] = work->order[expert];
            firsts[num_chosen++] = 0;
        }
        firsts[pool->chosen_at[expert]]++;
    }
    for (int chosen = 0; chosen < num_chosen; chosen++) {
        int count = firsts[chosen];
        firsts[chosen] = counts_end;
        counts_end += count;
    }
    /* Each expert's first moves on as its pairs are placed, to the next one's, and is then moved back. */
    for (int p = 0; p < num_pairs; p++) {
        uint32_t expert = (uint32_t)work->ids[p];
        if (expert < (uint32_t)b->num_experts && pool->chosen_at[expert] >= 0)
            pool->pairs[firsts[pool->chosen_at[expert]]++] = p;
    }
    for (int chosen = num_chosen; chosen > 0; chosen--)
        firsts[chosen] = firsts[chosen - 1];
    firsts[0] = 0;
    for (int p = 0; p < num_pairs; p++)
        if ((uint32_t)work->ids[p] < (uint32_t)b->num_experts)
            pool->chosen_at[work->ids[p]] = -1;
    return num_chosen;
}

static void reset_tiles(FarPool *pool, int num_chosen, int num_tiles) {
    int num_runs = 2 * groups_of(pool->buffers.width);
    for (int chosen = 0; chosen < num_chosen; chosen++)
        for (int run = 0; run < num_runs; run++) {
            int first = run / 2 * 4 + run % 2;
            int count = (first < num_tiles) + (first + 2 < num_tiles);
            atomic_store_explicit(&pool->tiles_left[chosen * num_runs + run], count, memory_order_relaxed);
        }
}

/* The parts of all pairs whose experts are here, the same bits for any number of threads. */
EXPORT void stratagate_far_parts(void *argument) {
    const FarWork *work = argument;
    FarPool *pool = work->pool;
    Context context = {pool, work};
    int num_rows, num_chosen = choose(pool, work, &num_rows);
    uint64_t before = keep_denormals();
    if (num_chosen) {
        pool_wake(pool->threads);
        reset_tiles(pool, num_chosen, work->gate_up.tiles);
        pool_run(pool->threads, split_task, &context, num_rows);
        pool_run(pool->threads, up_task, &context, num_chosen * work->gate_up.tiles);
        pool_run(pool->threads, down_task, &context,
                 num_chosen * ((work->down.tiles + DOWN_TILES - 1) / DOWN_TILES));
    }
    if (work->rests)
        pool_rest(pool->threads);
    restore_denormals(before);
}

EXPORT void stratagate_far_close(FarPool *pool) {
    if (pool->threads)
        pool_free(pool->threads);
    free(pool->x_rows), free(pool->hidden_rows), free(pool->rows), free(pool->pairs), free(pool->far);
    free(pool->firsts), free(pool->chosen_at), free((void *)pool->tiles_left), free(pool);
}

/* num_threads computes with as many, one of which is the caller's. NULL when memory is short. */
EXPORT FarPool *stratagate_far_open(const FarBuffers *buffers, int num_threads) {
    FarPool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return NULL;
    FarBuffers b = pool->buffers = *buffers;
    int64_t num_pairs = (int64_t)b.max_rows * b.top, up_groups = groups_of(b.hidden), down_groups = groups_of(b.width);
    pool->product = b.wide ? widest_tile_product() : tile_product_narrow;
    pool->x_rows = calloc((size_t)b.max_rows, sizeof *pool->x_rows);
    pool->hidden_rows = calloc((size_t)num_pairs, sizeof *pool->hidden_rows);
    pool->rows = calloc((size_t)b.max_rows, sizeof *pool->rows);
    pool->pairs = calloc((size_t)num_pairs, sizeof *pool->pairs);
    pool->far = calloc((size_t)num_pairs, sizeof *pool->far);
    pool->firsts = calloc((size_t)num_pairs + 1, sizeof *pool->firsts);
    pool->chosen_at = calloc((size_t)b.num_experts, sizeof *pool->chosen_at);
    pool->tiles_left = calloc((size_t)(num_pairs * 2 * down_groups), sizeof *pool->tiles_left);
    pool->threads = pool_new(num_threads);
    if (!pool->x_rows || !pool->hidden_rows || !pool->rows || !pool->pairs || !pool->far || !pool->firsts ||
        !pool->chosen_at || !pool->tiles_left || !pool->threads) {
        stratagate_far_close(pool);
        return NULL;
    }
    for (int r = 0; r < b.max_rows; r++)
        pool->x_rows[r] = row_at(b.x_digits, b.x_units, b.x_excess, r, (int)up_groups, 1);
    memset(b.middle, 0, sizeof(float) * (size_t)(num_pairs * down_groups * GROUP));
    for (int64_t p = 0; p < num_pairs; p++) {
        pool->hidden_rows[p] = row_at(b.hidden_digits, b.hidden_units, b.hidden_excess, p, (int)down_groups, 2);
        /* Runs that no column reaches stay zeros. */
        for (int run = 0; run < 2 * down_groups; run++)
            split_run(&pool->hidden_rows[p], run, 2, b.middle);
    }
    for (int expert = 0; expert < b.num_experts; expert++)
        pool->chosen_at[expert] = -1;
    return pool;
}

EXPORT int stratagate_far_threads(const FarPool *pool) { return pool_num_threads(pool->threads); }
