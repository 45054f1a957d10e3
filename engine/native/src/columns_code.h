/* The functions of columns.h for one width of vectors, as COLUMNS; included once for each width. */
#include "product_code.h"

#define MAX_WIDTH 4 /* vectors of value columns that go through the key rows together */

INLINE void delta_columns(float *s, const int width, const DeltaRow *row, int column) {
    vf read_k[MAX_WIDTH], read_q[MAX_WIDTH], d[MAX_WIDTH], f = vset(row->factor);
    int stride = row->value_dim, left = width > 1 ? LANES : stride - column;
    s += column;
#pragma GCC unroll 4
    for (int w = 0; w < width; w++)
        read_k[w] = read_q[w] = vset(0.0f);
    for (int i = 0; i < row->key_dim; i++) {
        vf key = vset(row->k[i]), query = vset(row->q[i]);
#pragma GCC unroll 4
        for (int w = 0; w < width; w++) {
            float *at = s + (int64_t)i * stride + w * LANES;
            vf value = vload_n(at, left) * f;
            vstore_n(at, value, left);
            read_k[w] = vfma(key, value, read_k[w]);
            read_q[w] = vfma(query, value, read_q[w]);
        }
    }
#pragma GCC unroll 4
    for (int w = 0; w < width; w++) {
        int at = column + w * LANES;
        d[w] = (vload_n(row->v + at, left) - read_k[w]) * vset(row->beta);
        vstore_n(row->delta + at, d[w], left);
        vstore_n(row->out + at, vfma(vset(row->overlap), d[w], read_q[w]), left);
    }
    for (int i = 0; i < row->key_dim; i++) {
        vf key = vset(row->k[i]);
#pragma GCC unroll 4
        for (int w = 0; w < width; w++) {
            float *at = s + (int64_t)i * stride + w * LANES;
            vstore_n(at, vfma(key, d[w], vload_n(at, left)), left);
        }
    }
}

static void delta_row(float *s, const DeltaRow *row) {
    int column = 0, n = row->value_dim;
    for (; column + MAX_WIDTH * LANES <= n; column += MAX_WIDTH * LANES)
        delta_columns(s, MAX_WIDTH, row, column);
    for (; column < n; column += LANES)
        delta_columns(s, 1, row, column);
}

static void delta_again(float *s, int key_dim, int value_dim, float factor, const float *k, const float *delta) {
    vf f = vset(factor);
    for (int i = 0; i < key_dim; i++)
        for (int column = 0; column < value_dim; column += LANES) {
            float *at = s + (int64_t)i * value_dim + column;
            int left = value_dim - column;
            vstore_n(at, vfma(vset(k[i]), vload_n(delta + column, left), vload_n(at, left) * f), left);
        }
}

static void convolve(float *out, const float *const *taps, const float *weights, int num_taps, int n) {
    for (int i = 0; i < n; i += LANES) {
        int left = n - i;
        vf sum = vload_n(taps[0] + i, left) * vload_n(weights + i, left);
        for (int k = 1; k < num_taps; k++)
            sum = vfma(vload_n(taps[k] + i, left), vload_n(weights + (int64_t)k * n + i, left), sum);
        vstore_n(out + i, vsilu(sum), left);
    }
}

static void mix(float *out, const float *mix, const float *normed, int num_streams, int n) {
    vf share = vset(1.0f / (float)num_streams);
    for (int i = 0; i < n; i += LANES) {
        int left = n - i;
        vf sum = vset(0.0f);
        for (int64_t at = i; at < (int64_t)num_streams * n; at += n)
            sum = vfma(vsigmoid(vload_n(mix + at, left)), vload_n(normed + at, left), sum);
        vstore_n(out + i, sum * share, left);
    }
}

static void inject(float *streams, const float *inject, const float *out, int num_streams, int n) {
    for (int i = 0; i < n; i += LANES) {
        int left = n - i;
        vf value = vload_n(out + i, left);
        for (int s = 0; s < num_streams; s++) {
            float *to = streams + (int64_t)s * n + i;
            vstore_n(to, vfma(vset(inject[s]), value, vload_n(to, left)), left);
        }
    }
}

static void gate(float *out, const float *gate, const float *up, int n) {
    for (int i = 0; i < n; i += LANES)
        vstore_n(out + i, vsilu(vload_n(gate + i, n - i)) * vload_n(up + i, n - i), n - i);
}

const Columns COLUMNS = {multiply, delta_row, delta_again, convolve, mix, inject, gate};
