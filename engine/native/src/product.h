/* y = x W^T for a fixed W, by tiles of rows: the one place where time is spent. */
#ifndef STRATAGATE_PRODUCT_H
#define STRATAGATE_PRODUCT_H

#include <stdint.h>

#include "pool.h"

/* Rows of W whose values lie side by side: data is [ceil(n / PANEL)][k][PANEL], zeros behind the last row. */
#define PANEL 16

enum { KIND_F32 = 0, KIND_BF16 = 1, KIND_I8 = 2 };

typedef struct {
    const void *data;
    const float *scale; /* [n padded to PANEL] for KIND_I8, else NULL */
    int32_t kind, n, k;
} Matrix;

/* Rows of floats: row i begins at base + (index ? index[i] : i) * stride. */
typedef struct {
    float *base;
    const int32_t *index;
    int64_t stride;
} Rows;

/* y[r][0..n) = W x[r] for r < num_rows. Every y element is one chain of multiply-adds in the order of k, whatever
 * num_rows, so that a row never depends on its company. */
void product(Pool *pool, const Matrix *w, Rows x, Rows y, int num_rows);
/* The same on the calling thread alone. */
void product_alone(const Matrix *w, Rows x, Rows y, int num_rows);

#endif
