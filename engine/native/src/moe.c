/* Mixture of experts (model.md 1.6): each expert that any row selected is read once, for all its rows. */
#include "model.h"
#include "simd.h"
#include "tiles.h"

typedef struct {
    Step *step;
    const Moe *moe;
    Input input;
    Digits shared;
    int32_t projected;
    /* Rows sorted by expert: [R * k] rows and [R * k] places in expert_out; one task a run of EXPERT_ROWS rows. */
    int32_t *rows, *places, *task_expert, *task_first, *task_count;
} Context;

/* softmax over the experts, the num_active largest (the earlier of equal ones), their weights. */
static void route_row(void *context, int row, int thread) {
    (void)thread;
    const Context *c = context;
    Step *step = c->step;
    const Geometry *g = &step->model->geometry;
    float *p = step->scratch.projected + (int64_t)row * c->projected;
    int n = g->num_experts;
    float most = p[0], total = 0.0f, kept = 0.0f;
    for (int i = 1; i < n; i++)
        most = p[i] > most ? p[i] : most;
    for (int i = 0; i < n; i += LANES) {
        vf e = vexp(vload_n(p + i, n - i) - vset(most));
        vstore_n(p + i, e, n - i);
    }
    for (int i = 0; i < n; i++)
        total += p[i];
    int32_t *ids = step->scratch.route_ids + (int64_t)row * g->num_active;
    float *weights = step->scratch.route_weights + (int64_t)row * g->num_active;
    for (int rank = 0; rank < g->num_active; rank++) {
        int best = 0;
        for (int i = 1; i < n; i++)
            best = p[i] > p[best] ? i : best;
        ids[rank] = best;
        weights[rank] = p[best] / total;
        kept += weights[rank];
        p[best] = -1.0f;
    }
    for (int rank = 0; rank < g->num_active && g->normalize; rank++)
        weights[rank] /= kept;
    /* The shared expert's hidden row. */
    float *hidden = step->scratch.heads + (int64_t)row * g->shared_dim;
    const float *gate = p + n + 1, *up = gate + g->shared_dim;
    step->columns->gate(hidden, gate, up, g->shared_dim);
    digits_write(c->shared, row, hidden);
}

static int sort_by_expert(Context *c, int num_rows) {
    const Geometry *g = &c->step->model->geometry;
    const int32_t *ids = c->step->scratch.route_ids;
    int total = num_rows * g->num_active, filled = 0, num_tasks = 0;
    for (int expert = 0; expert < g->num_experts && filled < total; expert++) {
        int first = filled;
        for (int i = 0; i < total; i++)
            if (ids[i] == expert) {
                c->rows[filled] = i / g->num_active;
                c->places[filled++] = i;
            }
        for (int at = first; at < filled; at += EXPERT_ROWS) {
            c->task_expert[num_tasks] = expert;
            c->task_first[num_tasks] = at;
            c->task_count[num_tasks++] = filled - at < EXPERT_ROWS ? filled - at : EXPERT_ROWS;
        }
    }
    return num_tasks;
}

static void expert_task(void *context, int task, int thread) {
    const Context *c = context;
    Step *step = c->step;
    const Geometry *g = &step->model->geometry;
    int expert = c->task_expert[task], first = c->task_first[task], count = c->task_count[task], n = g->expert_dim;
    float *own = step->scratch.scores + thread * step->scratch.per_thread;
    Digits rows = {0}, hidden = {0};
    if (c->input.digits.groups) {
        rows = digits_of(own, g->hidden);
        own += digits_floats(EXPERT_ROWS, g->hidden);
        hidden = digits_of(own, n);
        own += digits_floats(EXPERT_ROWS, n);
        for (int r = 0; r < count; r++)
            digits_copy(rows, r, c->input.digits, c->rows[first + r]);
    }
    float *gate_up = own;
    Input chosen = {{c->input.rows.base, c->rows + first, g->hidden}, rows};
    product_alone(step->columns, &c->moe->gate_up[expert], chosen, (Rows){gate_up, 0, 2 * n}, count);
    for (int r = 0; r < count; r++) {
        float *gate = gate_up + (int64_t)r * 2 * n, *up = gate + n;
        step->columns->gate(gate, gate, up, n);
        digits_write(hidden, r, gate);
    }
    product_alone(step->columns, &c->moe->down[expert], (Input){{gate_up, 0, 2 * n}, hidden},
                  (Rows){step->scratch.expert_out, c->places + first, g->hidden}, count);
}

/* The gated shared expert plus the row's experts in the order of their rank. */
static void combine_row(void *context, int row, int thread) {
    (void)thread;
    const Context *c = context;
    Step *step = c->step;
    const Geometry *g = &step->model->geometry;
    float *out = step->scratch.head_out + (int64_t)row * g->hidden;
    vf gate = vset(sigmoid1(step->scratch.projected[(int64_t)row * c->projected + g->num_experts]));
    const float *weights = step->scratch.route_weights + (int64_t)row * g->num_active;
    const float *parts = step->scratch.expert_out + (int64_t)row * g->num_active * g->hidden;
    for (int i = 0; i < g->hidden; i += LANES) {
        int left = g->hidden - i;
        vf sum = vload_n(out + i, left) * gate;
        for (int rank = 0; rank < g->num_active; rank++)
            sum = vfma(vset(weights[rank]), vload_n(parts + (int64_t)rank * g->hidden + i, left), sum);
        vstore_n(out + i, sum, left);
    }
}

/* input [R, H] -> scratch.head_out [R, H]. */
void moe_layer(Step *step, const Moe *moe, Input input, int num_rows) {
    const Geometry *g = &step->model->geometry;
    Scratch *scratch = &step->scratch;
    int32_t *lists = scratch->lists, all = step->max_rows * g->num_active;
    Context c = {step, moe, input, digits_of(scratch->shared_digits, g->shared_dim), moe->router.n + moe->shared_in.n,
                 lists, lists + all, lists + 2 * all, lists + 3 * all, lists + 4 * all};
    product(&step->machine, &moe->router, input, (Rows){scratch->projected, 0, c.projected}, num_rows);
    product(&step->machine, &moe->shared_in, input, (Rows){scratch->projected + moe->router.n, 0, c.projected}, num_rows);
    pool_run(step->pool, route_row, &c, num_rows);
    for (int i = 0; step->counted && i < num_rows * g->num_active; i++)
        step->counted[scratch->route_ids[i]]++;
    product(&step->machine, &moe->shared_down, (Input){{scratch->heads, 0, g->shared_dim}, c.shared},
            (Rows){scratch->head_out, 0, g->hidden}, num_rows);
    pool_run(step->pool, expert_task, &c, sort_by_expert(&c, num_rows));
    pool_run(step->pool, combine_row, &c, num_rows);
}
