/* y = x W^T for a fixed W, by tiles of rows: the one place where time is spent. */
#ifndef STRATAGATE_PRODUCT_H
#define STRATAGATE_PRODUCT_H

#include <stdint.h>

#include "pool.h"

/* Rows of W whose values lie side by side: data is [ceil(n / PANEL)][k][PANEL], zeros behind the last row. KIND_TILES are
 * int8 codes in the order of tiles.h: [ceil(n / PANEL)][ceil(k / 4)][PANEL][4], zeros behind the last row and value. */
#define PANEL 16

enum { KIND_F32 = 0, KIND_BF16 = 1, KIND_I8 = 2, KIND_TILES = 3 };

typedef struct {
    const void *data;
    const float *scale; /* [n padded to PANEL] for int8 codes, else NULL */
    int32_t kind, n, k;
} Matrix;

/* Functions for vectors of one width: columns.h. */
typedef struct Columns Columns;

/* What runs a product: threads, and their vectors. */
typedef struct {
    Pool *pool;
    const Columns *columns;
} Machine;

/* Rows of floats: row i begins at base + (index ? index[i] : i) * stride. */
typedef struct {
    float *base;
    const int32_t *index;
    int64_t stride;
} Rows;

static inline const float *row_of(Rows rows, int i) {
    return rows.base + (rows.index ? rows.index[i] : i) * rows.stride;
}

/* The same rows in fixed point, k values each, for weights of KIND_TILES: see tiles.h. */
typedef struct {
    int8_t *groups;
    int32_t k, blocks;
} Digits;

/* What a product reads: rows, and their digits where any weight is packed in tiles. */
typedef struct {
    Rows rows;
    Digits digits;
} Input;

/* Rows of k values with their digits in buffer; without them where buffer is NULL, for a model without KIND_TILES. */
Input input_of(Pool *pool, float *buffer, Rows rows, int k, int num_rows);

/* y[r][0..n) = W x[r] for r < num_rows. Every y element is one chain of multiply-adds in the order of k, or the exact sum
 * of a row's digits times codes, whatever num_rows, so that a row never depends on its company. */
void product(const Machine *machine, const Matrix *w, Input x, Rows y, int num_rows);
/* The same on the calling thread alone. */
void product_alone(const Columns *columns, const Matrix *w, Input x, Rows y, int num_rows);

#endif
