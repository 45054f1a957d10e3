/* Sparse attention (model.md 1.5): an indexer picks blocks of keys, attention reads only those. */
#include "model.h"
#include "select.h"
#include "simd.h"

#define SMALLEST_SCALE 1.17549435e-38f /* as engine.kv_cells: a cell of zeros is not divided by 0 */

typedef struct {
    Step *step;
    const Qsa *qsa;
    const int32_t *rows; /* the rows that attend; NULL: all */
    int32_t queries, kv, projected, heads_row, max_cells;
} Context;

static Context context_of(Step *step, const Qsa *qsa, const int32_t *rows) {
    const Geometry *g = &step->model->geometry;
    int queries = g->heads * g->head_dim, kv = g->kv_heads * g->head_dim, index = g->index_heads * g->index_dim;
    return (Context){step, qsa, rows, queries, kv, 2 * queries + 2 * kv + index + g->index_dim, queries + index,
                     (g->budget_blocks + 1) * g->block_tokens - 1};
}

static int position_of(const Step *step, int row) {
    const Piece *piece = &step->pieces[step->scratch.row_piece[row]];
    return piece->start + row - piece->first;
}

static int slot_of(const Step *step, int row) { return step->pieces[step->scratch.row_piece[row]].slot; }

/* RMS norm times (1 + w), then rotation of the first dims at a position. out may not be x. */
static void norm_rotate(const Step *step, float *out, const float *x, const float *norm, int n, int position) {
    const Geometry *g = &step->model->geometry;
    int dim = g->rotary_dim, half = dim / 2;
    const float *cos = step->model->cos + (int64_t)position * dim, *sin = step->model->sin + (int64_t)position * dim;
    scaled(out, x, inverse_rms(x, n, g->norm_eps), norm, n);
    for (int i = 0; i < half; i++) {
        float a = out[i], b = out[i + half];
        out[i] = a * cos[i] + b * sin[i];
        out[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

/* First cell of a K/V head of a slot, counted in cells. */
static int64_t cells_of(const Context *c, int slot, int head) {
    const Geometry *g = &c->step->model->geometry;
    return (((int64_t)c->qsa->index * g->num_slots + slot) * g->kv_heads + head) * g->capacity;
}

/* As engine.kv_cells.quantize: nearest multiples of largest / 127, ties to even.  One that is not
 * finite has a scale that is not, so that whatever reads it is not finite either. */
static void quantize(int8_t *codes, float *scale, const float *x, int n) {
    float largest = 0.0f;
    for (int i = 0; i < n; i++)
        if (!(fabsf(x[i]) <= largest))
            largest = fabsf(x[i]);
    *scale = largest / 127.0f < SMALLEST_SCALE ? SMALLEST_SCALE : largest / 127.0f;
    for (int i = 0; i < n; i++) {
        float code = isfinite(*scale) ? rintf(x[i] / *scale) : 0.0f;
        codes[i] = (int8_t)(code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code);
    }
}

static void write_cell(int kind, void *cells, float *scales, int64_t cell, const float *x, int n) {
    if (kind == KIND_I8)
        quantize((int8_t *)cells + cell * n, scales + cell, x, n);
    else if (kind == KIND_BF16)
        for (int i = 0; i < n; i++)
            ((uint16_t *)cells)[cell * n + i] = to_bf16(x[i]);
    else
        memcpy((float *)cells + cell * n, x, (size_t)n * sizeof(float));
}

static float *index_ring(const Context *c, int slot) {
    const Geometry *g = &c->step->model->geometry;
    return c->step->state->index_ring + ((int64_t)c->qsa->index * g->num_slots + slot) * g->ring_rows * g->index_dim;
}

static int64_t num_blocks_of(const Geometry *g) { return (g->capacity + g->block_tokens - 1) / g->block_tokens; }

static float *index_blocks(const Context *c, int slot) {
    const Geometry *g = &c->step->model->geometry;
    return c->step->state->index_blocks + ((int64_t)c->qsa->index * g->num_slots + slot) * num_blocks_of(g) * g->index_dim;
}

static const float *raw_index_key(const Context *c, int row) {
    return c->step->scratch.projected + (int64_t)(row + 1) * c->projected - c->step->model->geometry.index_dim;
}

static void project_row(void *context, int row, int thread) {
    (void)thread;
    const Context *c = context;
    Step *step = c->step;
    const Geometry *g = &step->model->geometry;
    const State *state = step->state;
    int position = position_of(step, row), slot = slot_of(step, row), dim = g->head_dim;
    float *queries = step->scratch.heads + (int64_t)row * c->heads_row;
    const float *in = step->scratch.projected + (int64_t)row * c->projected;
    float key[dim];
    for (int h = 0; h < g->heads; h++)
        norm_rotate(step, queries + h * dim, in + 2 * h * dim, c->qsa->q_norm, dim, position);
    for (int h = 0; h < g->index_heads; h++)
        norm_rotate(step, queries + c->queries + h * g->index_dim, in + 2 * c->queries + 2 * c->kv + h * g->index_dim,
                    c->qsa->index_q_norm, g->index_dim, position);
    for (int h = 0; h < g->kv_heads; h++) {
        const float *k = in + 2 * c->queries + h * dim;
        int64_t cell = cells_of(c, slot, h) + position;
        norm_rotate(step, key, k, c->qsa->k_norm, dim, position);
        write_cell(state->kv_kind, state->k, state->k_scale, cell, key, dim);
        write_cell(state->kv_kind, state->v, state->v_scale, cell, k + c->kv, dim);
    }
}

/* Index keys of the blocks that the piece completes; a block of rejected rows is pooled again when it is reached. */
static void pool_blocks(const Context *c, const Piece *piece) {
    const Geometry *g = &c->step->model->geometry;
    int n = g->index_dim, end = piece->start + piece->count;
    float *ring = index_ring(c, piece->slot), *blocks = index_blocks(c, piece->slot);
    float mean[n];
    for (int block = piece->start / g->block_tokens; (block + 1) * g->block_tokens <= end; block++) {
        memset(mean, 0, sizeof mean);
        for (int j = 0; j < g->block_tokens; j++) {
            int p = block * g->block_tokens + j;
            const float *raw = p < piece->start ? ring + (int64_t)(p % g->ring_rows) * n
                                                : raw_index_key(c, piece->first + p - piece->start);
            for (int i = 0; i < n; i++)
                mean[i] += raw[i];
        }
        for (int i = 0; i < n; i++)
            mean[i] *= 1.0f / (float)g->block_tokens;
        norm_rotate(c->step, blocks + (int64_t)block * n, mean, c->qsa->index_k_norm, n, block * g->block_tokens);
    }
    for (int j = piece->count > g->ring_rows ? piece->count - g->ring_rows : 0; j < piece->count; j++)
        memcpy(ring + (int64_t)((piece->start + j) % g->ring_rows) * n, raw_index_key(c, piece->first + j),
               (size_t)n * sizeof(float));
}

void qsa_project(Step *step, const Qsa *qsa, Input input) {
    Context c = context_of(step, qsa, 0);
    product(&step->machine, &qsa->in, input, (Rows){step->scratch.projected, 0, c.projected}, step->num_rows);
    pool_run(step->pool, project_row, &c, step->num_rows);
    for (int i = 0; i < step->num_pieces; i++)
        pool_blocks(&c, &step->pieces[i]);
}

static int num_cells_of(const Context *c, int position) {
    const Geometry *g = &c->step->model->geometry;
    int visible = position + 1, complete = visible / g->block_tokens;
    if (complete <= g->budget_blocks)
        return visible;
    return g->budget_blocks * g->block_tokens + visible % g->block_tokens;
}

static int row_at(const Context *c, int i) { return c->rows ? c->rows[i] : i; }

/* Cells that a row attends to, ascending: everything visible within the budget, else the best blocks and the tail.
 * Of equal scores the earlier block is taken. A query with scores that are not numbers takes the first blocks. */
static void select_row(void *context, int i, int thread) {
    const Context *c = context;
    Step *step = c->step;
    const Geometry *g = &step->model->geometry;
    int row = row_at(c, i), position = position_of(step, row), n = g->index_dim;
    int complete = (position + 1) / g->block_tokens;
    if (complete <= g->budget_blocks)
        return;
    float *scores = step->scratch.scores + thread * step->scratch.per_thread, *order = scores + complete;
    const float *queries = step->scratch.heads + (int64_t)row * c->heads_row + c->queries;
    const float *blocks = index_blocks(c, slot_of(step, row));
    for (int b = 0; b < complete; b++) {
        float total = 0.0f;
        for (int h = 0; h < g->index_heads; h++) {
            float score = dot(queries + h * n, blocks + (int64_t)b * n, n);
            total += score > 0.0f ? score : 0.0f;
        }
        scores[b] = order[b] = total;
    }
    float least = kth_largest(order, complete, g->budget_blocks);
    int above = 0, taken = 0;
    for (int b = 0; b < complete; b++)
        above += scores[b] > least;
    int32_t *cells = step->scratch.cells + (int64_t)i * c->max_cells;
    int ties = g->budget_blocks - above;
    for (int b = 0; b < complete && taken < g->budget_blocks; b++) {
        if (scores[b] < least || (!(scores[b] > least) && ties-- <= 0))
            continue;
        for (int j = 0; j < g->block_tokens; j++)
            *cells++ = b * g->block_tokens + j;
        taken++;
    }
    for (int p = complete * g->block_tokens; p <= position; p++)
        *cells++ = p;
}

INLINE vf load_cell(const int kind, const void *cells, int64_t at, int left) {
    if (kind == KIND_F32)
        return vload_n((const float *)cells + at, left);
    if (left >= LANES)
        return kind == KIND_I8 ? vload_i8((const int8_t *)cells + at) : vload_bf16((const uint16_t *)cells + at);
    int8_t codes[LANES] = {0};
    uint16_t halves[LANES] = {0};
    if (kind == KIND_I8)
        memcpy(codes, (const int8_t *)cells + at, (size_t)left);
    else
        memcpy(halves, (const uint16_t *)cells + at, (size_t)left * sizeof *halves);
    return kind == KIND_I8 ? vload_i8(codes) : vload_bf16(halves);
}

#define MAX_HEADS 3 /* query heads that go over the cells together: 3 x 4 vectors of sums fill the registers */

/* A row's cells of one K/V head: where they lie, and those beyond the last (up to whole vectors) repeat it. */
typedef struct {
    const State *state;
    const int32_t *list; /* NULL for 0..count */
    int64_t base;
    int dim, count, padded;
} Cells;

INLINE int64_t cell_at(const Cells *c, int i) {
    i = i < c->count ? i : c->count - 1;
    return c->base + (c->list ? c->list[i] : i);
}

/* Scores [heads][padded] of `heads` queries, -inf behind the last cell. */
INLINE void score(const int kind, const int heads, const Cells *c, const float *queries, float *scores) {
    vf scale = vset(1.0f / sqrtf((float)c->dim));
    for (int first = 0; first < c->padded; first += LANES) {
        vf sums[MAX_HEADS][LANES], cell_scale = vset(1.0f);
        for (int half = 0; half < LANES; half += LANES / 2) {
            vf sum[MAX_HEADS][LANES / 2];
            int64_t at[LANES / 2];
#pragma GCC unroll 4
            for (int i = 0; i < LANES / 2; i++) {
                at[i] = cell_at(c, first + half + i);
                if (kind == KIND_I8)
                    cell_scale[half + i] = c->state->k_scale[at[i]];
#pragma GCC unroll 3
                for (int q = 0; q < heads; q++)
                    sum[q][i] = vset(0.0f);
            }
            for (int d = 0; d < c->dim; d += LANES) {
                vf query[MAX_HEADS];
#pragma GCC unroll 3
                for (int q = 0; q < heads; q++)
                    query[q] = vload_n(queries + q * c->dim + d, c->dim - d);
#pragma GCC unroll 4
                for (int i = 0; i < LANES / 2; i++) {
                    vf key = load_cell(kind, c->state->k, at[i] * c->dim + d, c->dim - d);
#pragma GCC unroll 3
                    for (int q = 0; q < heads; q++)
                        sum[q][i] = vfma(query[q], key, sum[q][i]);
                }
            }
#pragma GCC unroll 3
            for (int q = 0; q < heads; q++)
                memcpy(&sums[q][half], sum[q], sizeof sum[q]);
        }
        for (int q = 0; q < heads; q++) {
            vf found = vsum8(sums[q]) * cell_scale * scale;
            for (int i = c->count - first; i < LANES; i++)
                found[i] = -INFINITY;
            vstore(scores + (int64_t)q * c->padded + first, found);
        }
    }
}

/* scores -> exp(score - most), in place; returns 1 / their sum. */
static float soften(float *scores, int padded) {
    vf most = vload(scores), total = vset(0.0f);
    for (int i = LANES; i < padded; i += LANES)
        most = vmax(vload(scores + i), most);
    most = vset(vmax_lane(most));
    for (int i = 0; i < padded; i += LANES) {
        vf weight = vexp(vload(scores + i) - most);
        vstore(scores + i, weight);
        total += weight;
    }
    return 1.0f / vsum(total);
}

/* out [heads][dim], `vectors` of it from d on: weighted sums of the cells' values. */
INLINE void weigh(const int kind, const int heads, const int vectors, const Cells *c, const float *weights, const float *share,
                  int d, float *out) {
    vf sum[MAX_HEADS][4];
#pragma GCC unroll 3
    for (int q = 0; q < heads; q++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sum[q][v] = vset(0.0f);
    for (int i = 0; i < c->count; i++) {
        int64_t cell = cell_at(c, i);
        vf weight[MAX_HEADS];
#pragma GCC unroll 3
        for (int q = 0; q < heads; q++) {
            float w = weights[(int64_t)q * c->padded + i];
            weight[q] = vset(kind == KIND_I8 ? w * c->state->v_scale[cell] : w);
        }
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            vf value = load_cell(kind, c->state->v, cell * c->dim + d + v * LANES, c->dim - d - v * LANES);
#pragma GCC unroll 3
            for (int q = 0; q < heads; q++)
                sum[q][v] = vfma(weight[q], value, sum[q][v]);
        }
    }
#pragma GCC unroll 3
    for (int q = 0; q < heads; q++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            vstore_n(out + q * c->dim + d + v * LANES, sum[q][v] * vset(share[q]), c->dim - d - v * LANES);
}

/* `heads` query heads of one row over its cells: scores, softmax, weighted values. */
INLINE void attend(const int kind, const int heads, const Cells *c, const float *queries, float *out, float *scores) {
    float share[MAX_HEADS];
    int d = 0;
    score(kind, heads, c, queries, scores);
    for (int q = 0; q < heads; q++)
        share[q] = soften(scores + (int64_t)q * c->padded, c->padded);
    for (; d + 4 * LANES <= c->dim; d += 4 * LANES)
        weigh(kind, heads, 4, c, scores, share, d, out);
    for (; d < c->dim; d += LANES)
        weigh(kind, heads, 1, c, scores, share, d, out);
}

typedef void (*AttendFn)(const Cells *c, const float *queries, float *out, float *scores);

#define ATTEND(KIND, HEADS)                                                                                     \
    static void attend_##KIND##_##HEADS(const Cells *c, const float *queries, float *out, float *scores) {      \
        attend(KIND, HEADS, c, queries, out, scores);                                                           \
    }
#define ATTENDS(KIND) ATTEND(KIND, 1) ATTEND(KIND, 2) ATTEND(KIND, 3)
ATTENDS(KIND_F32) ATTENDS(KIND_BF16) ATTENDS(KIND_I8)

#define HEAD_FORMS(KIND) {attend_##KIND##_1, attend_##KIND##_2, attend_##KIND##_3}
static const AttendFn ATTEND_FORMS[][MAX_HEADS] = {HEAD_FORMS(KIND_F32), HEAD_FORMS(KIND_BF16), HEAD_FORMS(KIND_I8)};

static void attend_task(void *context, int task, int thread) {
    const Context *c = context;
    Step *step = c->step;
    const Geometry *g = &step->model->geometry;
    int i = task / g->kv_heads, head = task % g->kv_heads, row = row_at(c, i), position = position_of(step, row);
    int group = g->heads / g->kv_heads, dim = g->head_dim, num_cells = num_cells_of(c, position);
    Cells cells = {step->state, num_cells == position + 1 ? 0 : step->scratch.cells + (int64_t)i * c->max_cells,
                   cells_of(c, slot_of(step, row), head), dim, num_cells, (num_cells + LANES - 1) / LANES * LANES};
    const float *queries = step->scratch.heads + (int64_t)row * c->heads_row + head * group * dim;
    float *out = step->scratch.mixer_out + (int64_t)i * c->queries + head * group * dim;
    float *scores = step->scratch.scores + thread * step->scratch.per_thread;
    for (int h = 0, heads; h < group; h += heads) {
        heads = group - h < MAX_HEADS ? group - h : MAX_HEADS;
        ATTEND_FORMS[step->state->kv_kind][heads - 1](&cells, queries + h * dim, out + h * dim, scores);
    }
    for (int h = 0; h < group; h++) {
        const float *gate = step->scratch.projected + (int64_t)row * c->projected + (2 * (head * group + h) + 1) * dim;
        for (int d = 0; d < dim; d += LANES) {
            vf value = vload_n(out + h * dim + d, dim - d) * vsigmoid(vload_n(gate + d, dim - d));
            vstore_n(out + h * dim + d, value, dim - d);
        }
    }
}

/* -> scratch.head_out [num_rows, H], the listed rows one after the other. */
void qsa_attend(Step *step, const Qsa *qsa, const int32_t *rows, int num_rows) {
    const Geometry *g = &step->model->geometry;
    Context c = context_of(step, qsa, rows);
    pool_run(step->pool, select_row, &c, num_rows);
    pool_run(step->pool, attend_task, &c, num_rows * g->kv_heads);
    Rows out = {step->scratch.mixer_out, 0, c.queries};
    product(&step->machine, &qsa->out, input_of(step->pool, step->scratch.digits, out, c.queries, num_rows),
            (Rows){step->scratch.head_out, 0, g->hidden}, num_rows);
}

void qsa_layer(Step *step, const Qsa *qsa, Input input) {
    qsa_project(step, qsa, input);
    qsa_attend(step, qsa, 0, step->num_rows);
}
