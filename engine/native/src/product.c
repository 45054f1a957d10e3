#include "product.h"

#include "simd.h"
#include "tiles.h"

#define MAX_TILE 6   /* rows of a tile: 6 x 2 vectors of sums, 2 of weights and a factor fill 16 registers */
#define MAX_PANELS 4 /* panels of a one-row tile: enough independent sums to hide the multiply-add's latency */
#define BAND_ROWS 48 /* rows that go over all panels together: what a level 2 cache holds */
#define TASK_VALUES 32768 /* weights of a task: a few microseconds */
#define TILE_TASK_VALUES 65536
#define TILE_TASK_ROWS 20 /* that many rows take twice the time of one */

/* The 16 values of a panel's step; int8 codes come times CODE_UNIT. */
INLINE void load_panel(int kind, const char *data, int64_t at, vf *low, vf *high) {
    if (kind == KIND_I8) {
        vload_codes((const int8_t *)data + at, low, high);
    } else if (kind == KIND_BF16) {
        *low = vload_bf16((const uint16_t *)data + at);
        *high = vload_bf16((const uint16_t *)data + at + LANES);
    } else {
        *low = vload((const float *)data + at);
        *high = vload((const float *)data + at + LANES);
    }
}

INLINE int64_t bytes_of(int kind) { return kind == KIND_I8 ? 1 : kind == KIND_BF16 ? 2 : 4; }

INLINE const float *row_of(Rows rows, int i) {
    return rows.base + (rows.index ? rows.index[i] : i) * rows.stride;
}

INLINE void tile(const int kind, const int num_rows, const int num_panels, const Matrix *w, int panel, Rows x, Rows y,
                 int row) {
    vf sum[MAX_TILE][MAX_PANELS * 2];
    const float *from[MAX_TILE];
    const char *data = w->data;
    const int k = w->k;
    const int64_t panel_values = (int64_t)k * PANEL, first = panel * panel_values;
#pragma GCC unroll 6
    for (int r = 0; r < num_rows; r++) {
        from[r] = row_of(x, row + r);
#pragma GCC unroll 8
        for (int v = 0; v < num_panels * 2; v++)
            sum[r][v] = vset(0.0f);
    }
    for (int i = 0; i < k; i++) {
        /* One or two rows go over the weights faster than the processor foresees: ask for those of the next tile. */
        if (num_rows <= 2)
            __builtin_prefetch(data + bytes_of(kind) * (first + num_panels * (panel_values + (int64_t)i * PANEL)));
#pragma GCC unroll 4
        for (int p = 0; p < num_panels; p++) {
            vf low, high;
            load_panel(kind, data, first + p * panel_values + (int64_t)i * PANEL, &low, &high);
#pragma GCC unroll 6
            for (int r = 0; r < num_rows; r++) {
                vf factor = vset(from[r][i]);
                sum[r][2 * p] = vfma(low, factor, sum[r][2 * p]);
                sum[r][2 * p + 1] = vfma(high, factor, sum[r][2 * p + 1]);
            }
        }
    }
    const int out = panel * PANEL;
#pragma GCC unroll 6
    for (int r = 0; r < num_rows; r++) {
        float *to = (float *)row_of(y, row + r) + out;
#pragma GCC unroll 8
        for (int v = 0; v < num_panels * 2; v++) {
            vf value = sum[r][v];
            if (kind == KIND_I8)
                value *= vload(w->scale + out + v * LANES) * vset(1.0f / CODE_UNIT);
            int left = w->n - out - v * LANES;
            if (left > 0)
                vstore_n(to + v * LANES, value, left);
        }
    }
}

typedef void (*TileFn)(const Matrix *w, int panel, Rows x, Rows y, int row);

#define TILE(KIND, ROWS, PANELS)                                                              \
    static void tile_##KIND##_##ROWS##_##PANELS(const Matrix *w, int p, Rows x, Rows y, int r) { \
        tile(KIND, ROWS, PANELS, w, p, x, y, r);                                              \
    }
#define TILES(KIND) TILE(KIND, 1, 4) TILE(KIND, 1, 2) TILE(KIND, 1, 1) TILE(KIND, 2, 2) TILE(KIND, 2, 1) \
    TILE(KIND, 3, 1) TILE(KIND, 4, 1) TILE(KIND, 5, 1) TILE(KIND, 6, 1)
#define FORMS(KIND) {{tile_##KIND##_1_1, tile_##KIND##_1_2, tile_##KIND##_1_4}, {tile_##KIND##_2_1, tile_##KIND##_2_2}, \
    {tile_##KIND##_3_1}, {tile_##KIND##_4_1}, {tile_##KIND##_5_1}, {tile_##KIND##_6_1}}

TILES(KIND_F32) TILES(KIND_BF16) TILES(KIND_I8)

/* By kind and rows: forms of 1, 2 and 4 panels, and how many of them there are. */
static const TileFn TABLE[3][MAX_TILE][3] = {FORMS(KIND_F32), FORMS(KIND_BF16), FORMS(KIND_I8)};
static const int NUM_FORMS[MAX_TILE] = {3, 2, 1, 1, 1, 1};

static int num_panels_of(const Matrix *w) { return (w->n + PANEL - 1) / PANEL; }

/* The widest form of a tile's height that fits into so many panels. */
static int form_of(int height, int panels) {
    int form = NUM_FORMS[height - 1] - 1;
    while (1 << form > panels)
        form--;
    return form;
}

/* Panels [first, end) for all rows; tiles of equal height as far as possible. */
static void multiply(const Matrix *w, Rows x, Rows y, int num_rows, int first, int end) {
    for (int band = 0; band < num_rows; band += BAND_ROWS) {
        int rows = num_rows - band < BAND_ROWS ? num_rows - band : BAND_ROWS;
        int num_tiles = (rows + MAX_TILE - 1) / MAX_TILE, highest = (rows + num_tiles - 1) / num_tiles;
        for (int panel = first; panel < end;) {
            int step = 1 << form_of(highest, end - panel);
            for (int t = 0, row = 0; t < num_tiles; t++) {
                int height = (rows - row + (num_tiles - t) - 1) / (num_tiles - t);
                for (int p = 0; p < step;) {
                    int form = form_of(height, step - p);
                    TABLE[w->kind][height - 1][form](w, panel + p, x, y, band + row);
                    p += 1 << form;
                }
                row += height;
            }
            panel += step;
        }
    }
}

static void multiply_any(const Matrix *w, Input x, Rows y, int num_rows, int first, int end) {
    if (w->kind == KIND_TILES)
        tiles_multiply(w, x.digits, y, num_rows, first, end);
    else
        multiply(w, x.rows, y, num_rows, first, end);
}

typedef struct {
    const Matrix *w;
    Input x;
    Rows y;
    int num_rows, panels_per_task;
} Product;

static void product_task(void *context, int task, int thread) {
    (void)thread;
    const Product *p = context;
    int first = task * p->panels_per_task, end = first + p->panels_per_task, all = num_panels_of(p->w);
    multiply_any(p->w, p->x, p->y, p->num_rows, first, end < all ? end : all);
}

typedef struct {
    Input input;
    int num_rows;
} Writing;

static void write_group(void *context, int group, int thread) {
    (void)thread;
    const Writing *w = context;
    int first = group * GROUP_ROWS, end = first + GROUP_ROWS < w->num_rows ? first + GROUP_ROWS : w->num_rows;
    for (int row = first; row < end; row++)
        digits_write(w->input.digits, row, row_of(w->input.rows, row));
}

Input input_of(Pool *pool, float *buffer, Rows rows, int k, int num_rows) {
    Writing writing = {{rows, digits_of(buffer, k)}, num_rows};
    if (buffer)
        pool_run(pool, write_group, &writing, (num_rows + GROUP_ROWS - 1) / GROUP_ROWS);
    return writing.input;
}

void product_alone(const Matrix *w, Input x, Rows y, int num_rows) {
    multiply_any(w, x, y, num_rows, 0, num_panels_of(w));
}

/* A few microseconds of work. Multiples of the widest form, so that only the last task has narrow ones. */
static int panels_per_task(const Matrix *w, int num_rows) {
    int64_t rows = w->kind == KIND_TILES ? num_rows / TILE_TASK_ROWS : num_rows / 3;
    int64_t work = (int64_t)w->k * PANEL * (rows > 1 ? rows : 1);
    int values = w->kind == KIND_TILES ? TILE_TASK_VALUES : TASK_VALUES;
    int wide = (int)((values / work + MAX_PANELS - 1) / MAX_PANELS * MAX_PANELS);
    return wide >= MAX_PANELS ? wide : w->kind == KIND_TILES || num_rows < 4 ? MAX_PANELS : 1;
}

void product(Pool *pool, const Matrix *w, Input x, Rows y, int num_rows) {
    int panels = num_panels_of(w), per_task = pool_num_threads(pool) == 1 ? panels : panels_per_task(w, num_rows);
    Product context = {w, x, y, num_rows, per_task};
    pool_run(pool, product_task, &context, (panels + per_task - 1) / per_task);
}
