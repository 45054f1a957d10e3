/* What the step reads and writes. engine/native/abi.py declares the same structures for Python; every pointer is to
 * memory that Python owns. Axes: S streams, H hidden, W = S * H, L layers of a kind. */
#ifndef STRATAGATE_MODEL_H
#define STRATAGATE_MODEL_H

#include <stdint.h>

#include "columns.h"
#include "pool.h"
#include "product.h"

typedef struct {
    int32_t hidden, num_streams, rank, vocab_size, num_layers;
    float norm_eps;
    /* GDN */
    int32_t key_heads, value_heads, key_dim, value_dim, conv_width, gate_is_silu;
    /* QSA */
    int32_t heads, kv_heads, head_dim, rotary_dim, index_heads, index_dim, budget_blocks, block_tokens;
    /* MoE */
    int32_t num_experts, num_active, expert_dim, shared_dim, normalize;
    /* State */
    int32_t num_slots, capacity, ring_rows, window_rows;
    int32_t tiles; /* whether any weight is of KIND_TILES */
    int32_t wide;  /* whether vectors may be as wide as the processor has them, which changes no bit */
} Geometry;

/* down: [rank, W]; up: [W, rank]; inject: [S, W], none (n = 0) in a final mixer; norm: 1 + w, [W]. */
typedef struct {
    const float *norm;
    Matrix down, up, inject;
} Residual;

/* in: qkv, z; gates: b, a; conv: [width][channels]; decay: -exp(A_log). */
typedef struct {
    Matrix in, gates, out;
    const float *conv, *decay, *dt_bias, *norm;
} Gdn;

/* in: query and gate by head, k, v, index queries, index key; norms: 1 + w; index: counter among layers with K/V. */
typedef struct {
    Matrix in, out;
    const float *q_norm, *k_norm, *index_q_norm, *index_k_norm;
    int32_t index;
} Qsa;

/* router: experts, shared gate; shared_in: gate, up; gate_up and down: one Matrix an expert. */
typedef struct {
    Matrix router, shared_in, shared_down;
    const Matrix *gate_up, *down;
} Moe;

/* conv: [width][W]; table: rows of head_dim values, scale per row for KIND_I8; norms: 1 + w; index: among PLE layers. */
typedef struct {
    Matrix key_value;
    const void *table;
    const float *table_scale;
    const float *norm_key, *norm_query, *norm_conv, *conv;
    const int64_t *multipliers, *sizes, *offsets;
    int64_t eos_id;
    int32_t table_kind, heads_per_ngram, head_dim, ngram_size, conv_width, index;
} Ple;

/* Exactly one of gdn and qsa is not NULL; ple may be NULL. gdn_index: counter among the GDN layers. */
typedef struct {
    const Ple *ple;
    const Gdn *gdn;
    const Qsa *qsa;
    const Moe *moe;
    Residual mixer_residual, moe_residual;
    int32_t gdn_index;
} Layer;

typedef struct {
    Matrix fc_embedding, fc_hidden;
    const float *norm_embedding, *norm_hidden;
    Residual mixer_residual, moe_residual, final;
    const Qsa *qsa;
    const Moe *moe;
} Draft;

/* embedding: [vocab][H] of embedding_kind, scale per row for KIND_I8; cos, sin: [positions][rotary_dim], see RotaryTable. */
typedef struct {
    Geometry geometry;
    const void *embedding;
    const float *embedding_scale;
    int32_t embedding_kind;
    const Layer *layers;
    Residual final;
    Matrix head;
    const Draft *draft;
    const float *cos, *sin;
} Model;

/* The tensors of engine.state.SlotState, all fp32 but k and v, which are of kv_kind; scales per cell and head for int8. */
typedef struct {
    float *s, *replay_k, *replay_delta, *replay_factor, *conv, *ple;
    void *k, *v;
    float *k_scale, *v_scale; /* NULL unless KIND_I8 */
    float *index_ring, *index_blocks;
    float *pending; /* trunk streams whose draft cells are not written yet; NULL without a draft layer */
    int32_t ple_rows; /* rows kept per slot in ple: history and a window */
    int32_t kv_kind;
} State;

/* Most slots of a window. */
#define MOST_SLOTS 8

/* Rows of an expert that go through it together. */
#define EXPERT_ROWS 24

/* A run of rows of one slot: flat rows [first, first + count) are positions [start, start + count). */
typedef struct {
    int32_t slot, first, count, start;
} Piece;

/* The first rows of a slot's last window, flat rows [first, first + count), which are kept. */
typedef struct {
    int32_t slot, first, count;
} Kept;

/* What a row's pick depends on beside its logits; see engine.sampling.PickRow. Arrays may be NULL when empty. */
typedef struct {
    double temperature, top_p, min_p;
    uint64_t seed;
    int64_t position;
    uint8_t *seen;          /* [vocab] ids of prompt and output; NULL: no penalties */
    float *counts;          /* [vocab] output ids */
    const uint8_t *allowed; /* [vocab] */
    const int32_t *bias_ids, *banned, *drafts;
    const float *biases;
    float repetition, presence, frequency;
    int32_t top_k, num_biases, num_banned, num_drafts;
} PickRow;

/* Floats of work space that a pick among n ids needs. */
#define PICK_WORDS(n) (3 * (int64_t)(n))

/* Where a chain ends: before a draft less probable than min_p, behind a stop id, or when it is max_drafts long. */
typedef struct {
    double min_p;
    const int32_t *stops;
    int32_t num_stops, max_drafts;
} Gate;

/* Scratch of one step; the pointers are into one block that is carved once. */
typedef struct {
    float *streams, *normed, *mixed, *inject, *down, *wide, *projected, *mixer_out, *heads, *scores;
    float *expert_out, *route_weights, *head_out;
    float *chain_logits, *chain_streams, *chain_work, *pick_work; /* the last: PICK_WORDS a thread */
    float *digits, *shared_digits; /* of a product's input and of the shared expert's hidden rows; NULL without tiles */
    int32_t *route_ids, *cells, *lists, *row_piece;
    int64_t per_thread; /* floats of scores each thread has */
} Scratch;

/* Rows [R][heads * head_dim] of the index-th n-gram table for a call's ids, from a table that Python reads. Waits until
 * they are there; NULL when they could not be read, which Python raises when the call returns. */
typedef const float *(*RowsOf)(int index);

typedef struct {
    const Model *model;
    State *state;
    Pool *pool;
    const Columns *columns;
    Machine machine; /* both, for products */
    Scratch scratch;
    int32_t max_rows;
    /* This call's rows. */
    const Piece *pieces;
    int32_t num_pieces, num_rows;
    RowsOf rows_of; /* NULL: tables are in memory */
    /* A prompt piece is kept as it is read; of a window only the first rows are, later, by commit. */
    int32_t keeps_all;
    /* What instruments want to know, NULL without one: see stratagate_probe. counted is the running layer's part. */
    double *seconds, began;
    int64_t *routed, *counted;
} Step;

/* Stages of a trunk call and of the head, in the order of abi.STAGES. */
enum { STAGE_START, STAGE_PLE, STAGE_GDN, STAGE_QSA, STAGE_MOE, STAGE_HEAD };

#define EXPORT __attribute__((visibility("default")))

EXPORT void stratagate_pick(const float *logits, int n, int num_ids, const PickRow *rows, int num_rows, float *work,
                            int32_t *ids, float *probabilities, uint8_t *finite);

double now(void); /* seconds of a clock that never goes back */

/* The calls of step.c for one that keeps the pool awake over several of them. */
void trunk_rows(Step *step, const Piece *pieces, int num_pieces, int keeps_all, const int64_t *ids, int context,
                RowsOf rows_of, float *streams);
void logits_rows(Step *step, const float *streams, int num_rows, float *logits);
void commit_rows(Step *step, const Kept *kept, int num_kept, const float *streams);
void draft_cells(Step *step, const Piece *pieces, int num_pieces, const int64_t *ids, const float *streams);
void chain_rows(Step *step, const Piece *pieces, int num_pieces, const int64_t *ids, const float *streams, PickRow *rows,
                const Gate *gates, int num_ids, int32_t *drafts, float *probabilities);
/* Whether a draft of this probability passes; no number passes as what is none. */
int passes(const Gate *gate, float probability);
int is_stop(const Gate *gate, int32_t id);

Input residual_read(Step *step, const Residual *residual, const float *streams, int num_rows);
void residual_write(Step *step, float *streams, const float *out, int num_rows);
/* input: what residual_read returned, scratch.mixed [R, H]. */
void gdn_layer(Step *step, const Gdn *gdn, int index, Input input);
void gdn_commit(Step *step, int slot, int num_rows);
void qsa_layer(Step *step, const Qsa *qsa, Input input);
/* Writes the rows' cells and leaves their queries in scratch; attend reads them for the listed flat rows. */
void qsa_project(Step *step, const Qsa *qsa, Input input);
void qsa_attend(Step *step, const Qsa *qsa, const int32_t *rows, int num_rows);
void moe_layer(Step *step, const Moe *moe, Input input, int num_rows);
void ple_layer(Step *step, const Ple *ple, float *streams, const int64_t *ids, int context);
void gather(float *out, const void *table, const float *scale, int kind, int64_t row, int width);

#endif
