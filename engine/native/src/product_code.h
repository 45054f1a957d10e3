/* Products of float rows, one chain of multiply-adds an element, for one width of vectors: see columns_code.h. */
#include "columns.h"
#include "simd.h"

/* Rows of a tile. Narrow: 6 x 2 vectors of sums, 2 of weights and a factor fill 16 registers; of 32, 10 x 2 and 2. */
#define MAX_TILE (LANES == 16 ? 10 : 6)
#define MAX_PANELS 4 /* panels of a one-row tile: enough independent sums to hide the multiply-add's latency */
#define BAND_ROWS 48 /* rows that go over all panels together: what a level 2 cache holds */
#define VECTORS (PANEL / LANES)

/* The 16 values of a panel's step; int8 codes come times CODE_UNIT. */
INLINE void load_panel(int kind, const char *data, int64_t at, vf *value) {
    if (kind == KIND_I8) {
        vload_codes((const int8_t *)data + at, value);
        return;
    }
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++, at += LANES)
        value[v] = kind == KIND_BF16 ? vload_bf16((const uint16_t *)data + at) : vload((const float *)data + at);
}

INLINE int64_t bytes_of(int kind) { return kind == KIND_I8 ? 1 : kind == KIND_BF16 ? 2 : 4; }

INLINE void tile(const int kind, const int num_rows, const int num_panels, const Matrix *w, int panel, Rows x, Rows y,
                 int row) {
    vf sum[MAX_TILE][MAX_PANELS * VECTORS];
    const float *from[MAX_TILE];
    const char *data = w->data;
    const int k = w->k;
    const int64_t panel_values = (int64_t)k * PANEL, first = panel * panel_values;
#pragma GCC unroll 10
    for (int r = 0; r < num_rows; r++) {
        from[r] = row_of(x, row + r);
#pragma GCC unroll 8
        for (int v = 0; v < num_panels * VECTORS; v++)
            sum[r][v] = vset(0.0f);
    }
    for (int i = 0; i < k; i++) {
        /* One or two rows go over the weights faster than the processor foresees: ask for those of the next tile. */
        if (num_rows <= 2)
            __builtin_prefetch(data + bytes_of(kind) * (first + num_panels * (panel_values + (int64_t)i * PANEL)));
#pragma GCC unroll 4
        for (int p = 0; p < num_panels; p++) {
            vf value[VECTORS];
            load_panel(kind, data, first + p * panel_values + (int64_t)i * PANEL, value);
#pragma GCC unroll 10
            for (int r = 0; r < num_rows; r++) {
                vf factor = vset(from[r][i]);
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++)
                    sum[r][VECTORS * p + v] = vfma(value[v], factor, sum[r][VECTORS * p + v]);
            }
        }
    }
    const int out = panel * PANEL;
#pragma GCC unroll 10
    for (int r = 0; r < num_rows; r++) {
        float *to = (float *)row_of(y, row + r) + out;
#pragma GCC unroll 8
        for (int v = 0; v < num_panels * VECTORS; v++) {
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
#if LANES == 16
#define TILES(KIND) TILE(KIND, 1, 4) TILE(KIND, 1, 2) TILE(KIND, 1, 1) TILE(KIND, 2, 4) TILE(KIND, 2, 2) TILE(KIND, 2, 1) \
    TILE(KIND, 3, 4) TILE(KIND, 3, 2) TILE(KIND, 3, 1) TILE(KIND, 4, 2) TILE(KIND, 4, 1) TILE(KIND, 5, 2) TILE(KIND, 5, 1) \
    TILE(KIND, 6, 2) TILE(KIND, 6, 1) TILE(KIND, 7, 2) TILE(KIND, 7, 1) TILE(KIND, 8, 2) TILE(KIND, 8, 1) \
    TILE(KIND, 9, 2) TILE(KIND, 9, 1) TILE(KIND, 10, 2) TILE(KIND, 10, 1)
#define FORMS(KIND) {{tile_##KIND##_1_1, tile_##KIND##_1_2, tile_##KIND##_1_4}, \
    {tile_##KIND##_2_1, tile_##KIND##_2_2, tile_##KIND##_2_4}, {tile_##KIND##_3_1, tile_##KIND##_3_2, tile_##KIND##_3_4}, \
    {tile_##KIND##_4_1, tile_##KIND##_4_2}, {tile_##KIND##_5_1, tile_##KIND##_5_2}, {tile_##KIND##_6_1, tile_##KIND##_6_2}, \
    {tile_##KIND##_7_1, tile_##KIND##_7_2}, {tile_##KIND##_8_1, tile_##KIND##_8_2}, {tile_##KIND##_9_1, tile_##KIND##_9_2}, \
    {tile_##KIND##_10_1, tile_##KIND##_10_2}}
static const int NUM_FORMS[MAX_TILE] = {3, 3, 3, 2, 2, 2, 2, 2, 2, 2};
#else
#define TILES(KIND) TILE(KIND, 1, 4) TILE(KIND, 1, 2) TILE(KIND, 1, 1) TILE(KIND, 2, 2) TILE(KIND, 2, 1) \
    TILE(KIND, 3, 1) TILE(KIND, 4, 1) TILE(KIND, 5, 1) TILE(KIND, 6, 1)
#define FORMS(KIND) {{tile_##KIND##_1_1, tile_##KIND##_1_2, tile_##KIND##_1_4}, {tile_##KIND##_2_1, tile_##KIND##_2_2}, \
    {tile_##KIND##_3_1}, {tile_##KIND##_4_1}, {tile_##KIND##_5_1}, {tile_##KIND##_6_1}}
static const int NUM_FORMS[MAX_TILE] = {3, 2, 1, 1, 1, 1};
#endif

TILES(KIND_F32) TILES(KIND_BF16) TILES(KIND_I8)

/* By kind and rows: forms of 1, 2 and 4 panels, of which NUM_FORMS are there. */
static const TileFn TABLE[3][MAX_TILE][3] = {FORMS(KIND_F32), FORMS(KIND_BF16), FORMS(KIND_I8)};

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
