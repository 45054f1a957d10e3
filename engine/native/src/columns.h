/* What is computed column by column: the same bits in vectors of any width, so a processor's widest are used. */
#ifndef STRATAGATE_COLUMNS_H
#define STRATAGATE_COLUMNS_H

#include "product.h"

/* A row of the delta rule: see columns_code.h. */
typedef struct {
    int32_t key_dim, value_dim;
    float factor, beta, overlap;
    const float *q, *k, *v;
    float *out, *delta;
} DeltaRow;

struct Columns {
    /* Panels [first, end) of a weight that is not of KIND_TILES, for all rows. */
    void (*multiply)(const Matrix *w, Rows x, Rows y, int num_rows, int first, int end);
    /* S = f S; d = beta (v - k S); o = q S + (q.k) d; S = S + k d. s: [key_dim][value_dim]. */
    void (*delta_row)(float *s, const DeltaRow *row);
    /* Replays it from what it left: S = f S + k d. */
    void (*delta_again)(float *s, int key_dim, int value_dim, float factor, const float *k, const float *delta);
    /* out [n] = silu(sum of taps[i][..] * weights[i][..]), weights [num_taps][n]. */
    void (*convolve)(float *out, const float *const *taps, const float *weights, int num_taps, int n);
    /* out [n] = share * sum over s of sigmoid(mix[s][..]) * normed[s][..], both [num_streams][n]. */
    void (*mix)(float *out, const float *mix, const float *normed, int num_streams, int n);
    /* streams [num_streams][n] += inject[s] * out. */
    void (*inject)(float *streams, const float *inject, const float *out, int num_streams, int n);
    /* out [n] = silu(gate) * up; out may be gate. */
    void (*gate)(float *out, const float *gate, const float *up, int n);
};

extern const Columns narrow_columns, wide_columns;

/* Sixteen lanes where processor and compiler have them, else the narrow ones. */
const Columns *widest_columns(void);

#endif
