/* Gated DeltaNet (model.md 1.4): the recurrence row by row, the same for windows and prompt pieces. */
#include "model.h"
#include "simd.h"

typedef struct {
    Step *step;
    const Gdn *gdn;
    int32_t index;
    int32_t key_channels, value_channels, channels, projected;
} Context;

static Context context_of(Step *step, const Gdn *gdn, int index) {
    const Geometry *g = &step->model->geometry;
    int keys = g->key_heads * g->key_dim, values = g->value_heads * g->value_dim, channels = 2 * keys + values;
    return (Context){step, gdn, index, keys, values, channels, channels + values + 2 * g->value_heads};
}

static int history_of(const Geometry *g) { return g->conv_width - 1; }

static float *conv_buffer(const Context *c, int slot) {
    const Geometry *g = &c->step->model->geometry;
    int64_t rows = history_of(g) + g->window_rows;
    return c->step->state->conv + ((int64_t)c->index * g->num_slots + slot) * rows * c->channels;
}

static const Piece *piece_of(const Step *step, int row) { return &step->pieces[step->scratch.row_piece[row]]; }

/* Causal depthwise convolution, SiLU, and the norms of q and k of one row, into scratch.heads. */
static void conv_row(void *context, int row, int thread) {
    (void)thread;
    const Context *c = context;
    const Geometry *g = &c->step->model->geometry;
    const Piece *piece = piece_of(c->step, row);
    const float *history = conv_buffer(c, piece->slot), *tap[16];
    for (int k = 0; k < g->conv_width; k++) {
        int back = row - piece->first - history_of(g) + k;
        tap[k] = back < 0 ? history + (int64_t)(back + history_of(g)) * c->channels
                          : c->step->scratch.projected + (int64_t)(piece->first + back) * c->projected;
    }
    float *out = c->step->scratch.heads + (int64_t)row * c->channels;
    c->step->columns->convolve(out, tap, c->gdn->conv, g->conv_width, c->channels);
    for (int head = 0; head < 2 * g->key_heads; head++) {
        float *x = out + head * g->key_dim;
        float factor = 1.0f / sqrtf(dot(x, x, g->key_dim) + 1e-6f);
        if (head < g->key_heads)
            factor *= 1.0f / sqrtf((float)g->key_dim);
        scaled(x, x, factor, 0, g->key_dim);
    }
}

/* Rows go behind the history; a prompt piece leaves its last rows as the new history, a window all of them. */
static void keep_conv_rows(const Context *c) {
    const Geometry *g = &c->step->model->geometry;
    int history = history_of(g);
    int64_t bytes = (int64_t)c->channels * sizeof(float);
    for (int i = 0; i < c->step->num_pieces; i++) {
        const Piece *piece = &c->step->pieces[i];
        float *buffer = conv_buffer(c, piece->slot);
        const float *rows = c->step->scratch.projected + (int64_t)piece->first * c->projected;
        if (!c->step->keeps_all) {
            for (int j = 0; j < piece->count; j++)
                memcpy(buffer + (int64_t)(history + j) * c->channels, rows + (int64_t)j * c->projected, bytes);
            continue;
        }
        for (int k = 0; k < history; k++) {
            int from = piece->count - history + k;
            const float *row = from < 0 ? buffer + (int64_t)(from + history) * c->channels : rows + (int64_t)from * c->projected;
            memmove(buffer + (int64_t)k * c->channels, row, bytes);
        }
    }
}

static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* RMS over a head, times w, times the gate. */
static void gated_norm(const Context *c, float *out, const float *z) {
    const Geometry *g = &c->step->model->geometry;
    vf factor = vset(inverse_rms(out, g->value_dim, g->norm_eps));
    for (int i = 0; i < g->value_dim; i += LANES) {
        int left = g->value_dim - i;
        vf gate = vload_n(z + i, left);
        gate = g->gate_is_silu ? vsilu(gate) : vsigmoid(gate);
        vf normed = vload_n(out + i, left) * factor * vload_n(c->gdn->norm + i, left);
        vstore_n(out + i, normed * gate, left);
    }
}

/* All rows of one piece and value head. Of a window only the first row's S is kept; the others step on a copy and
 * leave what gdn_commit needs. */
static void head_task(void *context, int task, int thread) {
    const Context *c = context;
    Step *step = c->step;
    const Geometry *g = &step->model->geometry;
    const Piece *piece = &step->pieces[task / g->value_heads];
    int head = task % g->value_heads, key_head = head / (g->value_heads / g->key_heads);
    int64_t size = (int64_t)g->key_dim * g->value_dim;
    int64_t at = ((int64_t)c->index * g->num_slots + piece->slot) * g->value_heads + head;
    float *s = step->state->s + at * size;
    float *copy = step->scratch.scores + thread * step->scratch.per_thread, *delta = copy + size;
    for (int j = 0; j < piece->count; j++) {
        int64_t row = piece->first + j;
        const float *heads = step->scratch.heads + row * c->channels;
        const float *projected = step->scratch.projected + row * c->projected;
        const float *z = projected + c->channels, *b = z + c->value_channels, *a = b + g->value_heads;
        const float *q = heads + key_head * g->key_dim, *k = q + c->key_channels;
        const float *v = heads + 2 * c->key_channels + head * g->value_dim;
        float factor = expf(c->gdn->decay[head] * softplus(a[head] + c->gdn->dt_bias[head]));
        float *out = step->scratch.mixer_out + row * c->value_channels + head * g->value_dim;
        if (!step->keeps_all && j == 1) {
            memcpy(copy, s, (size_t)size * sizeof(float));
            s = copy;
        }
        DeltaRow delta_row = {g->key_dim, g->value_dim, factor, sigmoid1(b[head]), dot(q, k, g->key_dim), q, k, v, out, delta};
        step->columns->delta_row(s, &delta_row);
        if (!step->keeps_all) {
            int64_t kept = (((int64_t)c->index * g->num_slots + piece->slot) * g->window_rows + j) * g->value_heads + head;
            memcpy(step->state->replay_k + kept * g->key_dim, k, (size_t)g->key_dim * sizeof(float));
            memcpy(step->state->replay_delta + kept * g->value_dim, delta, (size_t)g->value_dim * sizeof(float));
            step->state->replay_factor[kept] = factor;
        }
        gated_norm(c, out, z + head * g->value_dim);
    }
}

/* scratch.mixed [R, H] -> scratch.head_out [R, H]. */
void gdn_layer(Step *step, const Gdn *gdn, int index, Input input) {
    Context c = context_of(step, gdn, index);
    const Geometry *g = &step->model->geometry;
    Scratch *scratch = &step->scratch;
    product(&step->machine, &gdn->in, input, (Rows){scratch->projected, 0, c.projected}, step->num_rows);
    product(&step->machine, &gdn->gates, input, (Rows){scratch->projected + gdn->in.n, 0, c.projected}, step->num_rows);
    pool_run(step->pool, conv_row, &c, step->num_rows);
    keep_conv_rows(&c);
    pool_run(step->pool, head_task, &c, step->num_pieces * g->value_heads);
    Rows out = {scratch->mixer_out, 0, c.value_channels};
    product(&step->machine, &gdn->out, input_of(step->pool, scratch->digits, out, c.value_channels, step->num_rows),
            (Rows){scratch->head_out, 0, g->hidden}, step->num_rows);
}

/* Replays rows [1, num_rows) of the slot's last window into S, with the arithmetic of delta_row. */
typedef struct {
    Step *step;
    int32_t slot, num_rows, num_layers;
} Commit;

static void commit_task(void *context, int task, int thread) {
    (void)thread;
    const Commit *c = context;
    const Geometry *g = &c->step->model->geometry;
    const State *state = c->step->state;
    int layer = task / g->value_heads, head = task % g->value_heads;
    int64_t at = (int64_t)layer * g->num_slots + c->slot;
    float *s = state->s + (at * g->value_heads + head) * g->key_dim * g->value_dim;
    for (int j = 1; j < c->num_rows; j++) {
        int64_t kept = (at * g->window_rows + j) * g->value_heads + head;
        const float *k = state->replay_k + kept * g->key_dim, *delta = state->replay_delta + kept * g->value_dim;
        c->step->columns->delta_again(s, g->key_dim, g->value_dim, state->replay_factor[kept], k, delta);
    }
}

void gdn_commit(Step *step, int slot, int num_rows) {
    const Geometry *g = &step->model->geometry;
    int num_layers = 0;
    for (int i = 0; i < g->num_layers; i++)
        num_layers += step->model->layers[i].gdn != 0;
    Commit commit = {step, slot, num_rows, num_layers};
    if (num_rows > 1)
        pool_run(step->pool, commit_task, &commit, num_layers * g->value_heads);
    Context c = context_of(step, 0, 0);
    for (c.index = 0; c.index < num_layers; c.index++) {
        float *buffer = conv_buffer(&c, slot);
        memmove(buffer, buffer + (int64_t)num_rows * c.channels, (size_t)history_of(g) * c.channels * sizeof(float));
    }
}
