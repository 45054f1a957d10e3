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

static void norm_row(void *context, int row, int thread) {
    (void)thread;
    const Context *c = context;
    const Geometry *g = &c->step->model->geometry;
    int64_t at = (int64_t)row * g->num_streams * g->hidden;
    for (int s = 0; s < g->num_streams; s++) {
        const float *x = c->streams + at + (int64_t)s * g->hidden;
        scaled(c->step->scratch.normed + at + (int64_t)s * g->hidden, x, inverse_rms(x, g->hidden, g->norm_eps),
               c->residual->norm + (int64_t)s * g->hidden, g->hidden);
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
