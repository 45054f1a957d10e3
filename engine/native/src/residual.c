/* Gated residual (model.md 1.3): one mixed row from the streams, and each stream's injection weight. */
#include "model.h"
#include "simd.h"
#include "tiles.h"

typedef struct {
    Step *step;
    const Residual *residual;
    const float *streams;
    Digits normed, mixed;
} Context;

#define TOGETHER 4 /* streams whose squares are summed at once: alone each would wait for its own last sum */

/* As inverse_rms, of `count` streams of n values. */
static void inverse_rms_of(float *out, const float *x, int count, int n, float eps) {
    vf sum[TOGETHER];
    for (int s = 0; s < TOGETHER; s++)
        sum[s] = vset(0.0f);
    for (int i = 0; i < n; i += LANES)
#pragma GCC unroll 4
        for (int s = 0; s < TOGETHER; s++) {
            vf value = vload_n(x + (int64_t)(s < count ? s : 0) * n + i, n - i);
            sum[s] = vfma(value, value, sum[s]);
        }
    for (int s = 0; s < count; s++)
        out[s] = 1.0f / sqrtf(vsum(sum[s]) / (float)n + eps);
}

static void norm_row(void *context, int row, int thread) {
    (void)thread;
    const Context *c = context;
    const Geometry *g = &c->step->model->geometry;
    int64_t at = (int64_t)row * g->num_streams * g->hidden;
    for (int first = 0; first < g->num_streams; first += TOGETHER) {
        int count = g->num_streams - first < TOGETHER ? g->num_streams - first : TOGETHER;
        float factor[TOGETHER];
        inverse_rms_of(factor, c->streams + at + (int64_t)first * g->hidden, count, g->hidden, g->norm_eps);
        for (int s = 0; s < count; s++) {
            int64_t stream = (int64_t)(first + s) * g->hidden;
            scaled(c->step->scratch.normed + at + stream, c->streams + at + stream, factor[s], c->residual->norm + stream,
                   g->hidden);
        }
    }
    digits_write(c->normed, row, c->step->scratch.normed + at);
}

/* silu(down / S) and the injection weights 2 sigmoid(inject / S), in place. */
static void activate_row(const Context *c, int row) {
    const Geometry *g = &c->step->model->geometry;
    float *down = c->step->scratch.down + (int64_t)row * g->rank;
    float *inject = c->step->scratch.inject + (int64_t)row * g->num_streams;
    vf share = vset(1.0f / (float)g->num_streams);
    for (int i = 0; i < c->residual->inject.n; i++)
        inject[i] = 2.0f * sigmoid1(inject[i] * share[0]);
    for (int i = 0; i < g->rank; i += LANES)
        vstore_n(down + i, vsilu(vload_n(down + i, g->rank - i) * share), g->rank - i);
}

static void mix_row(void *context, int row, int thread) {
    (void)thread;
    const Context *c = context;
    const Geometry *g = &c->step->model->geometry;
    int64_t width = (int64_t)g->num_streams * g->hidden;
    const float *mix = c->step->scratch.wide + row * width, *normed = c->step->scratch.normed + row * width;
    float *out = c->step->scratch.mixed + (int64_t)row * g->hidden;
    c->step->columns->mix(out, mix, normed, g->num_streams, g->hidden);
    digits_write(c->mixed, row, out);
}

/* streams [R, W] -> scratch.mixed [R, H], which is returned, and scratch.inject [R, S]. */
Input residual_read(Step *step, const Residual *residual, const float *streams, int num_rows) {
    const Geometry *g = &step->model->geometry;
    Scratch *scratch = &step->scratch;
    int64_t width = (int64_t)g->num_streams * g->hidden;
    /* One buffer of digits: each input is multiplied before the next is written. */
    Digits of_normed = digits_of(scratch->digits, (int)width), of_mixed = digits_of(scratch->digits, g->hidden);
    Context context = {step, residual, streams, of_normed, of_mixed};
    pool_run(step->pool, norm_row, &context, num_rows);
    Input normed = {{scratch->normed, 0, width}, of_normed};
    Rows down = {scratch->down, 0, g->rank};
    product(&step->machine, &residual->down, normed, down, num_rows);
    if (residual->inject.n)
        product(&step->machine, &residual->inject, normed, (Rows){scratch->inject, 0, g->num_streams}, num_rows);
    for (int row = 0; row < num_rows; row++)
        activate_row(&context, row);
    product(&step->machine, &residual->up, input_of(step->pool, scratch->digits, down, g->rank, num_rows),
            (Rows){scratch->wide, 0, width}, num_rows);
    pool_run(step->pool, mix_row, &context, num_rows);
    return (Input){{scratch->mixed, 0, g->hidden}, of_mixed};
}

/* streams [R, W] += outer(inject [R, S], out [R, H]). */
void residual_write(Step *step, float *streams, const float *out, int num_rows) {
    const Geometry *g = &step->model->geometry;
    for (int row = 0; row < num_rows; row++)
        step->columns->inject(streams + (int64_t)row * g->num_streams * g->hidden,
                              step->scratch.inject + (int64_t)row * g->num_streams, out + (int64_t)row * g->hidden,
                              g->num_streams, g->hidden);
}
