/* The calls that Python makes: trunk rows, logits, commit, draft. Each runs to its end on the caller and the pool. */
#include <stdlib.h>
#include <time.h>

#include "model.h"
#include "simd.h"
#include "tiles.h"

/* Which sources this was compiled from; see engine/native/build.py. */
EXPORT const char *stratagate_sources(void) { return STRATAGATE_SOURCES; }

/* One product on the calling thread, as the layers make it: y [R, n] of x [R, k]; wide: as in Geometry; digits: as many
 * floats as stratagate_product_floats says, NULL for a weight that is not of KIND_TILES. */
EXPORT void stratagate_product(const Matrix *w, float *x, int num_rows, int wide, float *digits, float *y) {
    Rows rows = {x, 0, w->k};
    Digits to = digits_of(digits, w->k);
    for (int row = 0; row < num_rows; row++)
        digits_write(to, row, x + (int64_t)row * w->k);
    product_alone(wide ? widest_columns() : &narrow_columns, w, (Input){rows, to}, (Rows){y, 0, w->n}, num_rows);
}

EXPORT int64_t stratagate_product_floats(const Matrix *w, int num_rows) { return digits_floats(num_rows, w->k); }

/* Whether int8 weights may be packed as KIND_TILES. */
EXPORT int stratagate_tiles(void) { return tiles_available(); }

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t width_of(const Geometry *g) { return (int64_t)g->num_streams * g->hidden; }

/* Floats of every region of the scratch block, in the order of carving. */
typedef struct {
    int64_t streams, normed, mixed, inject, down, wide, projected, mixer_out, heads, scores, expert_out, route_weights,
        head_out, chain_logits, chain_streams, chain_work, pick_work, digits, shared_digits, route_ids, cells, lists, row_piece;
} Sizes;

/* The most that any product's input takes. */
static int64_t input_digits(const Geometry *g, int64_t rows, int64_t embed) {
    int64_t values = g->value_heads * g->value_dim, queries = g->heads * g->head_dim;
    int64_t widest = most(most(width_of(g), embed), most(values, queries));
    /* The draft layer projects every stream as a row of its own. */
    return most(digits_floats(rows, widest), digits_floats(rows * g->num_streams, g->hidden));
}

static Sizes sizes_of(const Model *model, int64_t rows, int64_t threads, int64_t *per_thread) {
    const Geometry *g = &model->geometry;
    int64_t width = width_of(g), keys = g->key_heads * g->key_dim, values = g->value_heads * g->value_dim;
    int64_t queries = g->heads * g->head_dim, kv = g->kv_heads * g->head_dim, index = g->index_heads * g->index_dim;
    int64_t blocks = (g->capacity + g->block_tokens - 1) / g->block_tokens, embed = 0;
    int64_t cells = (int64_t)(g->budget_blocks + 1) * g->block_tokens;
    for (int i = 0; i < g->num_layers; i++)
        if (model->layers[i].ple)
            embed = most(embed, model->layers[i].ple->key_value.k);
    int64_t projected = most(2 * keys + 2 * values + 2 * g->value_heads, 2 * queries + 2 * kv + index + g->index_dim);
    projected = most(most(projected, g->num_experts + 1 + 2 * g->shared_dim), embed);
    *per_thread = most(g->heads / g->kv_heads * ((cells < g->capacity ? cells : g->capacity) + LANES), 2 * blocks);
    *per_thread = most(*per_thread, g->key_dim * g->value_dim + g->value_dim);
    int64_t expert = EXPERT_ROWS * 2 * g->expert_dim;
    if (g->tiles)
        expert += digits_floats(EXPERT_ROWS, g->hidden) + digits_floats(EXPERT_ROWS, g->expert_dim);
    *per_thread = most(*per_thread, most(expert, g->hidden));
    *per_thread = (*per_thread + 15) / 16 * 16;
    return (Sizes){
        .streams = rows * width,
        .normed = rows * width,
        .mixed = rows * g->hidden,
        .inject = rows * g->num_streams,
        .down = rows * g->rank,
        .wide = rows * (width + g->hidden),
        .projected = rows * projected,
        .mixer_out = rows * most(values, queries),
        .heads = rows * most(most(2 * keys + values, queries + index), g->shared_dim),
        .scores = threads * *per_thread,
        .expert_out = rows * g->num_active * g->hidden,
        .route_weights = rows * g->num_active,
        .head_out = rows * g->hidden,
        .chain_logits = model->draft ? (int64_t)g->num_slots * g->vocab_size : 0,
        .chain_streams = model->draft ? g->num_slots * width : 0,
        .chain_work = model->draft ? PICK_WORDS(g->vocab_size) : 0,
        .pick_work = threads * PICK_WORDS(g->vocab_size),
        .digits = g->tiles ? input_digits(g, rows, embed) : 0,
        .shared_digits = g->tiles ? digits_floats(rows, g->shared_dim) : 0,
        .route_ids = rows * g->num_active,
        .cells = rows * cells,
        .lists = 5 * rows * g->num_active,
        .row_piece = rows,
    };
}

/* Every region begins with a cache line. */
static int64_t whole_lines(int64_t floats) { return (floats + 15) / 16 * 16; }

EXPORT int64_t stratagate_scratch_floats(const Model *model, int max_rows, int num_threads) {
    int64_t per_thread, total = 0;
    Sizes sizes = sizes_of(model, max_rows, num_threads, &per_thread);
    for (size_t i = 0; i < sizeof sizes / sizeof(int64_t); i++)
        total += whole_lines(((const int64_t *)&sizes)[i]);
    return total;
}

static float *carve(float **block, int64_t floats) {
    float *part = *block;
    *block += whole_lines(floats);
    return part;
}

static void carve_all(Scratch *s, const Model *model, int max_rows, int num_threads, float *block) {
    Sizes n = sizes_of(model, max_rows, num_threads, &s->per_thread);
    s->streams = carve(&block, n.streams);
    s->normed = carve(&block, n.normed);
    s->mixed = carve(&block, n.mixed);
    s->inject = carve(&block, n.inject);
    s->down = carve(&block, n.down);
    s->wide = carve(&block, n.wide);
    s->projected = carve(&block, n.projected);
    s->mixer_out = carve(&block, n.mixer_out);
    s->heads = carve(&block, n.heads);
    s->scores = carve(&block, n.scores);
    s->expert_out = carve(&block, n.expert_out);
    s->route_weights = carve(&block, n.route_weights);
    s->head_out = carve(&block, n.head_out);
    s->chain_logits = carve(&block, n.chain_logits);
    s->chain_streams = carve(&block, n.chain_streams);
    s->chain_work = carve(&block, n.chain_work);
    s->pick_work = carve(&block, n.pick_work);
    float *digits = carve(&block, n.digits), *shared_digits = carve(&block, n.shared_digits);
    s->digits = model->geometry.tiles ? digits : 0;
    s->shared_digits = model->geometry.tiles ? shared_digits : 0;
    s->route_ids = (int32_t *)carve(&block, n.route_ids);
    s->cells = (int32_t *)carve(&block, n.cells);
    s->lists = (int32_t *)carve(&block, n.lists);
    s->row_piece = (int32_t *)carve(&block, n.row_piece);
}

/* The caller keeps model, state and block alive until stratagate_close. NULL when memory is short. */
EXPORT Step *stratagate_open(const Model *model, State *state, int num_threads, int max_rows, float *block) {
    Step *step = calloc(1, sizeof *step);
    Pool *pool = step ? pool_new(num_threads) : 0;
    if (!pool) {
        free(step);
        return 0;
    }
    step->model = model;
    step->state = state;
    step->pool = pool;
    step->columns = model->geometry.wide ? widest_columns() : &narrow_columns;
    step->machine = (Machine){pool, step->columns};
    step->max_rows = max_rows;
    carve_all(&step->scratch, model, max_rows, num_threads, block);
    return step;
}

EXPORT void stratagate_close(Step *step) {
    pool_free(step->pool);
    free(step);
}

static void begin_rows(Step *step, const Piece *pieces, int num_pieces, int keeps_all) {
    step->pieces = pieces;
    step->num_pieces = num_pieces;
    step->num_rows = 0;
    step->keeps_all = keeps_all;
    for (int i = 0; i < num_pieces; i++) {
        for (int j = 0; j < pieces[i].count; j++)
            step->scratch.row_piece[pieces[i].first + j] = i;
        step->num_rows += pieces[i].count;
    }
}

/* seconds [stages]: what each stage takes is added; routed [layers][experts]: rows that the trunk routes there. Either
 * may be NULL. Both are the caller's until the next probe. */
EXPORT void stratagate_probe(Step *step, double *seconds, int64_t *routed) {
    step->seconds = seconds;
    step->routed = routed;
}

double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void stages_begin(Step *step) {
    if (step->seconds)
        step->began = now();
}

/* What has passed since the stage before ended belongs to this one. */
static void stage_ends(Step *step, int stage) {
    if (!step->seconds)
        return;
    double ended = now();
    step->seconds[stage] += ended - step->began;
    step->began = ended;
}

static void embed(const Model *model, float *out, int64_t id) {
    gather(out, model->embedding, model->embedding_scale, model->embedding_kind, id, model->geometry.hidden);
}

void trunk_rows(Step *step, const Piece *pieces, int num_pieces, int keeps_all, const int64_t *ids, int context,
                RowsOf rows_of, float *streams) {
    const Model *model = step->model;
    const Geometry *g = &model->geometry;
    stages_begin(step);
    begin_rows(step, pieces, num_pieces, keeps_all);
    step->rows_of = rows_of;
    for (int row = 0; row < step->num_rows; row++) {
        float *to = streams + row * width_of(g);
        embed(model, to, ids[(int64_t)row * (context + 1) + context]);
        for (int s = 1; s < g->num_streams; s++)
            memcpy(to + (int64_t)s * g->hidden, to, (size_t)g->hidden * sizeof(float));
    }
    stage_ends(step, STAGE_START);
    for (int i = 0; i < g->num_layers; i++) {
        const Layer *layer = &model->layers[i];
        if (layer->ple) {
            ple_layer(step, layer->ple, streams, ids, context);
            stage_ends(step, STAGE_PLE);
        }
        Input input = residual_read(step, &layer->mixer_residual, streams, step->num_rows);
        if (layer->gdn)
            gdn_layer(step, layer->gdn, layer->gdn_index, input);
        else
            qsa_layer(step, layer->qsa, input);
        residual_write(step, streams, step->scratch.head_out, step->num_rows);
        stage_ends(step, layer->gdn ? STAGE_GDN : STAGE_QSA);
        input = residual_read(step, &layer->moe_residual, streams, step->num_rows);
        step->counted = step->routed ? step->routed + (int64_t)i * g->num_experts : 0;
        moe_layer(step, layer->moe, input, step->num_rows);
        residual_write(step, streams, step->scratch.head_out, step->num_rows);
        stage_ends(step, STAGE_MOE);
    }
    step->counted = 0; /* the draft layer's experts are not the trunk's */
}

/* ids [R, context + 1], each row's id last, earlier ids before it -> streams [R, W] after the last layer. rows_of: see
 * model.h. */
EXPORT void stratagate_trunk(Step *step, const Piece *pieces, int num_pieces, int keeps_all, const int64_t *ids,
                             int context, RowsOf rows_of, float *streams) {
    pool_wake(step->pool);
    trunk_rows(step, pieces, num_pieces, keeps_all, ids, context, rows_of, streams);
    pool_rest(step->pool);
}

void logits_rows(Step *step, const float *streams, int num_rows, float *logits) {
    const Model *model = step->model;
    stages_begin(step);
    Input input = residual_read(step, &model->final, streams, num_rows);
    product(&step->machine, &model->head, input,
            (Rows){logits, 0, model->geometry.vocab_size}, num_rows);
    stage_ends(step, STAGE_HEAD);
}

/* streams [R, W] -> logits [R, vocab]. */
EXPORT void stratagate_logits(Step *step, const float *streams, int num_rows, float *logits) {
    pool_wake(step->pool);
    logits_rows(step, streams, num_rows, logits);
    pool_rest(step->pool);
}

static void commit_ple(const Step *step, int slot, int num_rows) {
    const Geometry *g = &step->model->geometry;
    const State *state = step->state;
    int64_t width = width_of(g), history = state->ple_rows - g->window_rows;
    for (int i = 0; i < g->num_layers; i++) {
        const Ple *ple = step->model->layers[i].ple;
        if (!ple)
            continue;
        float *rows = state->ple + ((int64_t)ple->index * g->num_slots + slot) * state->ple_rows * width;
        memmove(rows, rows + num_rows * width, (size_t)(history * width) * sizeof(float));
    }
}

void commit_rows(Step *step, const Kept *kept, int num_kept, const float *streams) {
    const Geometry *g = &step->model->geometry;
    int64_t width = width_of(g);
    for (int i = 0; i < num_kept; i++) {
        int slot = kept[i].slot, count = kept[i].count;
        gdn_commit(step, slot, count);
        commit_ple(step, slot, count);
        if (step->state->pending)
            memcpy(step->state->pending + (int64_t)slot * g->window_rows * width, streams + kept[i].first * width,
                   (size_t)(count * width) * sizeof(float));
    }
}

/* Keeps the first rows of slots' last windows in S and both convolution histories, and their streams [R, W] until the
 * draft layer's cells are made of them. */
EXPORT void stratagate_commit(Step *step, const Kept *kept, int num_kept, const float *streams) {
    pool_wake(step->pool);
    commit_rows(step, kept, num_kept, streams);
    pool_rest(step->pool);
}

/* The layer's input streams: every stream of the trunk projected, plus the embedded id. -> scratch.streams [R, W]. */
static void draft_input(Step *step, const int64_t *ids, const float *streams) {
    const Model *model = step->model;
    const Draft *draft = model->draft;
    const Geometry *g = &model->geometry;
    Scratch *scratch = &step->scratch;
    int64_t width = width_of(g);
    for (int row = 0; row < step->num_rows; row++) {
        const float *from = streams + row * width;
        float *embedded = scratch->mixed + (int64_t)row * g->hidden;
        scaled(scratch->normed + row * width, from, inverse_rms(from, (int)width, g->norm_eps), draft->norm_hidden, (int)width);
        embed(model, embedded, ids[row]);
        scaled(embedded, embedded, inverse_rms(embedded, g->hidden, g->norm_eps), draft->norm_embedding, g->hidden);
    }
    int rows = step->num_rows * g->num_streams;
    Input hidden = input_of(step->pool, scratch->digits, (Rows){scratch->normed, 0, g->hidden}, g->hidden, rows);
    product(&step->machine, &draft->fc_hidden, hidden, (Rows){scratch->streams, 0, g->hidden}, rows);
    Rows ids_rows = {scratch->mixed, 0, g->hidden};
    Input embedded = input_of(step->pool, scratch->digits, ids_rows, g->hidden, step->num_rows);
    product(&step->machine, &draft->fc_embedding, embedded, (Rows){scratch->head_out, 0, g->hidden}, step->num_rows);
    for (int64_t row = 0; row < (int64_t)step->num_rows * g->num_streams; row++) {
        float *to = scratch->streams + row * g->hidden;
        const float *add = scratch->head_out + row / g->num_streams * g->hidden;
        for (int i = 0; i < g->hidden; i += LANES)
            vstore_n(to + i, vload_n(to + i, g->hidden - i) + vload_n(add + i, g->hidden - i), g->hidden - i);
    }
}

/* Writes the draft layer's cells of the rows. ids [R]: at the rows' positions + 1; streams [R, W]: the trunk's. */
static void write_cells(Step *step, const int64_t *ids, const float *streams) {
    draft_input(step, ids, streams);
    Input input = residual_read(step, &step->model->draft->mixer_residual, step->scratch.streams, step->num_rows);
    qsa_project(step, step->model->draft->qsa, input);
}

void draft_cells(Step *step, const Piece *pieces, int num_pieces, const int64_t *ids, const float *streams) {
    begin_rows(step, pieces, num_pieces, 1);
    write_cells(step, ids, streams);
}

EXPORT void stratagate_draft_cells(Step *step, const Piece *pieces, int num_pieces, const int64_t *ids,
                                   const float *streams) {
    pool_wake(step->pool);
    draft_cells(step, pieces, num_pieces, ids, streams);
    pool_rest(step->pool);
}

/* The same, then a draft from each piece's last row: logits [B, vocab] and the layer's own streams out [B, W], which may
 * be where streams are. */
static void draft_rows(Step *step, const int64_t *ids, const float *streams, float *logits, float *out) {
    const Model *model = step->model;
    const Draft *draft = model->draft;
    const Geometry *g = &model->geometry;
    Scratch *scratch = &step->scratch;
    int64_t width = width_of(g);
    int num_pieces = step->num_pieces;
    int32_t last[num_pieces];
    write_cells(step, ids, streams);
    for (int i = 0; i < num_pieces; i++) {
        last[i] = step->pieces[i].first + step->pieces[i].count - 1;
        memcpy(out + i * width, scratch->streams + last[i] * width, (size_t)width * sizeof(float));
        memmove(scratch->inject + (int64_t)i * g->num_streams, scratch->inject + (int64_t)last[i] * g->num_streams,
                (size_t)g->num_streams * sizeof(float));
    }
    qsa_attend(step, draft->qsa, last, num_pieces);
    residual_write(step, out, scratch->head_out, num_pieces);
    moe_layer(step, draft->moe, residual_read(step, &draft->moe_residual, out, num_pieces), num_pieces);
    residual_write(step, out, scratch->head_out, num_pieces);
    Input input = residual_read(step, &draft->final, out, num_pieces);
    product(&step->machine, &model->head, input, (Rows){logits, 0, g->vocab_size}, num_pieces);
}

EXPORT void stratagate_draft(Step *step, const Piece *pieces, int num_pieces, const int64_t *ids, const float *streams,
                             float *logits, float *out) {
    pool_wake(step->pool);
    begin_rows(step, pieces, num_pieces, 1);
    draft_rows(step, ids, streams, logits, out);
    pool_rest(step->pool);
}

int passes(const Gate *gate, float probability) { return (double)probability >= gate->min_p; }

int is_stop(const Gate *gate, int32_t id) {
    for (int i = 0; i < gate->num_stops; i++)
        if (gate->stops[i] == id)
            return 1;
    return 0;
}

void chain_rows(Step *step, const Piece *pieces, int num_pieces, const int64_t *ids, const float *streams, PickRow *rows,
                const Gate *gates, int num_ids, int32_t *drafts, float *probabilities) {
    const Geometry *g = &step->model->geometry;
    Scratch *scratch = &step->scratch;
    int64_t width = width_of(g), next_ids[num_pieces];
    int most = g->window_rows - 1, chain[num_pieces], active = num_pieces;
    Piece next[num_pieces];
    for (int i = 0; i < num_pieces; i++) {
        chain[i] = i;
        next[i] = pieces[i];
        rows[i].drafts = drafts + i * most;
        for (int j = 0; j < most; j++)
            probabilities[i * most + j] = -1.0f;
    }
    begin_rows(step, pieces, num_pieces, 1);
    for (int depth = 0; active > 0; depth++) {
        draft_rows(step, ids, streams, scratch->chain_logits, scratch->chain_streams);
        int kept = 0;
        for (int i = 0; i < active; i++) {
            int c = chain[i];
            PickRow *row = &rows[c];
            uint8_t finite;
            int32_t *id = drafts + c * most + depth;
            float *probability = probabilities + c * most + depth;
            stratagate_pick(scratch->chain_logits + (int64_t)i * g->vocab_size, g->vocab_size, num_ids, row, 1,
                            scratch->chain_work, id, probability, &finite);
            row->position++;
            row->num_drafts++;
            if (!passes(&gates[c], *probability) || is_stop(&gates[c], *id) || depth + 1 >= gates[c].max_drafts)
                continue;
            memmove(scratch->chain_streams + kept * width, scratch->chain_streams + i * width,
                    (size_t)width * sizeof(float));
            next_ids[kept] = *id;
            next[kept] = (Piece){next[i].slot, kept, 1, next[i].start + next[i].count};
            chain[kept++] = c;
        }
        active = kept;
        if (active)
            begin_rows(step, next, active, 1);
        ids = next_ids;
        streams = scratch->chain_streams;
    }
}

/* Chains of drafts, each as long as its gate lets it: ids and probabilities [B, window_rows - 1]; where a chain has
 * ended the probability is -1. ids [R] and streams [R, W] as for a draft; rows: the first picks, which are changed. */
EXPORT void stratagate_chain(Step *step, const Piece *pieces, int num_pieces, const int64_t *ids, const float *streams,
                             PickRow *rows, const Gate *gates, int num_ids, int32_t *drafts, float *probabilities) {
    pool_wake(step->pool);
    chain_rows(step, pieces, num_pieces, ids, streams, rows, gates, num_ids, drafts, probabilities);
    pool_rest(step->pool);
}
