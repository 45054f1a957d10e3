/* Hashed n-gram embedding added to all residual streams of one layer (model.md 1.7). */
#include "model.h"
#include "simd.h"

typedef struct {
    Step *step;
    const Ple *ple;
    float *streams;
    const int64_t *ids;
    int32_t context, history;
} Context;

void gather(float *out, const void *table, const float *scale, int kind, int64_t row, int width) {
    for (int i = 0; i < width; i++) {
        int64_t at = row * width + i;
        if (kind == KIND_I8)
            out[i] = (float)((const int8_t *)table)[at] * scale[row];
        else if (kind == KIND_BF16) {
            uint32_t bits = (uint32_t)((const uint16_t *)table)[at] << 16;
            memcpy(out + i, &bits, sizeof bits);
        } else
            out[i] = ((const float *)table)[at];
    }
}

/* Table rows of one token, gathered one after the other. An EOS among the earlier ids hides what is before it. */
static void embed_row(void *context, int row, int thread) {
    (void)thread;
    const Context *c = context;
    const Ple *ple = c->ple;
    const int64_t *ids = c->ids + (int64_t)row * (c->context + 1) + c->context;
    float *out = c->step->scratch.projected + (int64_t)row * ple->key_value.k;
    uint64_t mixed = (uint64_t)ids[0] * (uint64_t)ple->multipliers[0];
    int hidden = 0;
    for (int back = 1, head = 0; back < ple->ngram_size; back++) {
        hidden = hidden || ids[-back] == ple->eos_id;
        int64_t id = hidden ? ple->eos_id : ids[-back];
        mixed ^= (uint64_t)id * (uint64_t)ple->multipliers[back];
        for (int i = 0; i < ple->heads_per_ngram; i++, head++) {
            int64_t at = (int64_t)mixed % ple->sizes[head];
            at += at < 0 ? ple->sizes[head] : 0;
            gather(out + (int64_t)head * ple->head_dim, ple->table, ple->table_scale, ple->table_kind,
                   at + ple->offsets[head], ple->head_dim);
        }
    }
}

/* scratch.wide [R, W + H]: keys and value -> the gated value in the keys' place, its norm in scratch.normed. */
static void gate_row(void *context, int row, int thread) {
    const Context *c = context;
    Step *step = c->step;
    const Geometry *g = &step->model->geometry;
    int64_t width = (int64_t)g->num_streams * g->hidden;
    int n = g->hidden;
    float *keys = step->scratch.wide + row * (width + n), *query = step->scratch.scores + thread * step->scratch.per_thread;
    const float *value = keys + width;
    for (int64_t s = 0; s < width; s += n) {
        const float *stream = c->streams + row * width + s;
        float *key = keys + s;
        scaled(query, stream, inverse_rms(stream, n, g->norm_eps), c->ple->norm_query + s, n);
        scaled(key, key, inverse_rms(key, n, g->norm_eps), c->ple->norm_key + s, n);
        float match = dot(key, query, n) / sqrtf((float)n);
        float root = sqrtf(fabsf(match) > 1e-6f ? fabsf(match) : 1e-6f);
        root = match > 0.0f ? root : match < 0.0f ? -root : 0.0f * match;
        scaled(key, value, sigmoid1(root), 0, n);
        scaled(step->scratch.normed + row * width + s, key, inverse_rms(key, n, g->norm_eps), c->ple->norm_conv + s, n);
    }
}

static float *history_of(const Context *c, int slot) {
    const Geometry *g = &c->step->model->geometry;
    const State *state = c->step->state;
    int64_t width = (int64_t)g->num_streams * g->hidden;
    return state->ple + ((int64_t)c->ple->index * g->num_slots + slot) * state->ple_rows * width;
}

/* Dilated causal depthwise convolution and SiLU, added with the gated value to the streams. */
static void conv_row(void *context, int row, int thread) {
    (void)thread;
    const Context *c = context;
    Step *step = c->step;
    const Geometry *g = &step->model->geometry;
    const Piece *piece = &step->pieces[step->scratch.row_piece[row]];
    int64_t width = (int64_t)g->num_streams * g->hidden;
    const float *tap[16], *history = history_of(c, piece->slot);
    for (int k = 0; k < c->ple->conv_width; k++) {
        int back = row - piece->first - c->history + k * c->ple->ngram_size;
        tap[k] = back < 0 ? history + (back + c->history) * width : step->scratch.normed + (piece->first + back) * width;
    }
    const float *gated = step->scratch.wide + row * (width + g->hidden);
    float *streams = c->streams + row * width;
    for (int i = 0; i < width; i += LANES) {
        int left = (int)width - i;
        vf sum = vload_n(tap[0] + i, left) * vload_n(c->ple->conv + i, left);
        for (int k = 1; k < c->ple->conv_width; k++)
            sum = vfma(vload_n(tap[k] + i, left), vload_n(c->ple->conv + k * width + i, left), sum);
        vstore_n(streams + i, vload_n(streams + i, left) + (vload_n(gated + i, left) + vsilu(sum)), left);
    }
}

static void keep_rows(const Context *c) {
    const Geometry *g = &c->step->model->geometry;
    int64_t width = (int64_t)g->num_streams * g->hidden;
    size_t bytes = (size_t)width * sizeof(float);
    for (int i = 0; i < c->step->num_pieces; i++) {
        const Piece *piece = &c->step->pieces[i];
        float *history = history_of(c, piece->slot);
        const float *rows = c->step->scratch.normed + piece->first * width;
        if (!c->step->keeps_all) {
            memcpy(history + c->history * width, rows, bytes * (size_t)piece->count);
            continue;
        }
        for (int k = 0; k < c->history; k++) {
            int from = piece->count - c->history + k;
            memmove(history + k * width, from < 0 ? history + (from + c->history) * width : rows + from * width, bytes);
        }
    }
}

/* streams [R, W] gain the layer's injection; ids [R, context + 1], oldest first. */
void ple_layer(Step *step, const Ple *ple, float *streams, const int64_t *ids, int context) {
    const Geometry *g = &step->model->geometry;
    int64_t width = (int64_t)g->num_streams * g->hidden;
    Context c = {step, ple, streams, ids, context, step->state->ple_rows - g->window_rows};
    const float *embedded = step->scratch.projected;
    if (step->rows_of)
        embedded = step->rows_of(ple->index);
    else
        pool_run(step->pool, embed_row, &c, step->num_rows);
    if (!embedded)
        return;
    Rows rows = {(float *)embedded, 0, ple->key_value.k};
    product(&step->machine, &ple->key_value,
            input_of(step->pool, step->scratch.digits, rows, ple->key_value.k, step->num_rows),
            (Rows){step->scratch.wide, 0, width + g->hidden}, step->num_rows);
    pool_run(step->pool, gate_row, &c, step->num_rows);
    pool_run(step->pool, conv_row, &c, step->num_rows);
    keep_rows(&c);
}
