/* A window of decode steps in one call: draft, verify, pick, accept, commit. Between calls for the parts Python takes a
 * third of a window's time, since the weights that each part reads leave nothing of it in the caches. */
#include <string.h>

#include "model.h"

#define RECENT_IDS 16 /* more than any n-gram and any row of a window looks back */
#define MOST_ROWS 8   /* at least window_rows */

/* What Python writes before a call: how many positions are computed, how many of these have no cells in the draft layer
 * yet (-1: the sequence never drafts), how many drafts it may have, whether they are there already, and its last ids. The
 * newest id, at the first position that is not computed, comes last; before a sequence's beginning stands what n-grams see
 * there. */
typedef struct {
    int64_t num_computed, num_pending, max_drafts, is_drafted, ids[RECENT_IDS];
} Asked;

/* What it reads after the call. tokens: accepted drafts and the bonus, cut behind a stop id; none unless is_finite. */
typedef struct {
    int32_t num_drafted, num_accepted, is_finite, num_tokens, tokens[MOST_ROWS];
} Found;

/* A slot. row: how its sequence picks; gate: where its chains end. Both hold for the sequence, but for gate.min_p. drafts:
 * found.num_drafted of them, of this window or ahead of it. */
typedef struct {
    PickRow row;
    Gate gate;
    Asked asked;
    Found found;
    int32_t drafts[MOST_ROWS];
} Seat;

/* slots: those of the window, by rows; first: each one's first flat row. */
typedef struct {
    Step *step;
    Seat *seats;
    const int32_t *slots;
    int num_slots, num_rows, num_ids;
    int32_t first[MOST_SLOTS], picks[MOST_SLOTS * MOST_ROWS];
    uint8_t finite[MOST_SLOTS * MOST_ROWS], row_seat[MOST_SLOTS * MOST_ROWS];
    float *logits;
} Window;

static Seat *seat_of(const Window *w, int i) { return &w->seats[w->slots[i]]; }

/* The e-th id behind the newest known one; earlier ones for e <= 0. */
static int64_t id_at(const Seat *seat, int e) {
    return e > 0 ? seat->drafts[e - 1] : seat->asked.ids[RECENT_IDS - 1 + e];
}

static void first_row(const Seat *seat, PickRow *row) {
    *row = seat->row;
    row->position = seat->asked.num_computed + 1;
}

/* Writes the cells that wait in the slots that draft, or in those that do not, and drafts for the former. streams: room
 * for the rows that wait. */
static void draft_slots(Window *w, int drafting, float *streams) {
    const Geometry *g = &w->step->model->geometry;
    int64_t width = (int64_t)g->num_streams * g->hidden, ids[MOST_SLOTS * MOST_ROWS];
    int most = g->window_rows - 1, which[MOST_SLOTS], count = 0, num_rows = 0;
    Piece pieces[MOST_SLOTS];
    PickRow rows[MOST_SLOTS];
    Gate gates[MOST_SLOTS];
    for (int i = 0; i < w->num_slots; i++) {
        const Seat *seat = seat_of(w, i);
        int waiting = (int)seat->asked.num_pending;
        if (waiting < 0 || seat->asked.is_drafted || (seat->asked.max_drafts > 0) != drafting)
            continue;
        pieces[count] = (Piece){w->slots[i], num_rows, waiting, (int32_t)seat->asked.num_computed - waiting};
        first_row(seat, &rows[count]);
        gates[count] = seat->gate;
        gates[count].max_drafts = (int32_t)seat->asked.max_drafts;
        which[count++] = i;
        memcpy(streams + num_rows * width, w->step->state->pending + (int64_t)w->slots[i] * g->window_rows * width,
               (size_t)(waiting * width) * sizeof(float));
        for (int j = 0; j < waiting; j++)
            ids[num_rows++] = id_at(seat, j - waiting + 1);
    }
    if (!count)
        return;
    if (!drafting) {
        draft_cells(w->step, pieces, count, ids, streams);
        return;
    }
    int32_t drafts[MOST_SLOTS * MOST_ROWS];
    float chances[MOST_SLOTS * MOST_ROWS];
    chain_rows(w->step, pieces, count, ids, streams, rows, gates, w->num_ids, drafts, chances);
    for (int c = 0; c < count; c++) {
        Seat *seat = seat_of(w, which[c]);
        int length = 0;
        memcpy(seat->drafts, drafts + c * most, (size_t)most * sizeof(int32_t));
        while (length < gates[c].max_drafts && passes(&gates[c], chances[c * most + length]))
            if (is_stop(&gates[c], drafts[c * most + length++]))
                break;
        seat->found.num_drafted = length;
    }
}

static void pick_row(void *context, int flat, int thread) {
    Window *w = context;
    Step *step = w->step;
    int n = step->model->geometry.vocab_size, i = w->row_seat[flat], j = flat - w->first[i];
    float *work = step->scratch.pick_work + thread * PICK_WORDS(n), chance;
    PickRow row;
    first_row(seat_of(w, i), &row);
    row.position += j;
    row.drafts = seat_of(w, i)->drafts;
    row.num_drafts = j;
    stratagate_pick(w->logits + (int64_t)flat * n, n, w->num_ids, &row, 1, work, &w->picks[flat], &chance,
                    &w->finite[flat]);
}

static void verify(Window *w, int context, float *streams) {
    int64_t ids[MOST_SLOTS * MOST_ROWS * RECENT_IDS];
    Piece pieces[MOST_SLOTS];
    w->num_rows = 0;
    for (int i = 0; i < w->num_slots; i++) {
        int count = 1 + seat_of(w, i)->found.num_drafted;
        w->first[i] = w->num_rows;
        pieces[i] = (Piece){w->slots[i], w->num_rows, count, (int32_t)seat_of(w, i)->asked.num_computed};
        for (int j = 0; j < count; j++, w->num_rows++) {
            w->row_seat[w->num_rows] = (uint8_t)i;
            for (int c = 0; c <= context; c++)
                ids[w->num_rows * (context + 1) + c] = id_at(seat_of(w, i), j - context + c);
        }
    }
    trunk_rows(w->step, pieces, w->num_slots, 0, ids, context, 0, streams);
    logits_rows(w->step, streams, w->num_rows, w->logits);
    pool_run(w->step->pool, pick_row, w, w->num_rows);
}

/* Keeps the longest run of drafts that are the target's picks, then its next pick. */
static void accept(Window *w, int i) {
    Seat *seat = seat_of(w, i);
    Found *found = &seat->found;
    const int32_t *picks = w->picks + w->first[i], *drafts = seat->drafts;
    found->is_finite = 1;
    for (int j = 0; j <= found->num_drafted; j++)
        found->is_finite &= w->finite[w->first[i] + j];
    found->num_tokens = found->num_accepted = 0;
    if (!found->is_finite)
        return;
    while (found->num_accepted < found->num_drafted && picks[found->num_accepted] == drafts[found->num_accepted])
        found->num_accepted++;
    for (int stopped = 0; !stopped && found->num_tokens <= found->num_accepted;) {
        int32_t id = picks[found->num_tokens];
        found->tokens[found->num_tokens++] = id;
        stopped = is_stop(&seat->gate, id);
        if (seat->row.seen) {
            seat->row.seen[id] = 1;
            seat->row.counts[id] += 1.0f;
        }
    }
}

static void draft(Window *w, float *streams) {
    for (int i = 0; i < w->num_slots; i++) {
        Seat *seat = seat_of(w, i);
        int most = (int)seat->asked.max_drafts;
        if (!seat->asked.is_drafted)
            seat->found.num_drafted = 0;
        else if (seat->found.num_drafted > most)
            seat->found.num_drafted = most;
    }
    if (!w->step->model->draft)
        return;
    draft_slots(w, 0, streams);
    draft_slots(w, 1, streams);
}

/* Writes the cells that wait and drafts for slots whose next window is still to be asked for; seats and streams as for it.
 * Returns the seconds that it took. */
EXPORT double stratagate_ahead(Step *step, Seat *seats, const int32_t *slots, int num_slots, int num_ids, float *streams) {
    Window w = {.step = step, .seats = seats, .slots = slots, .num_slots = num_slots, .num_ids = num_ids};
    double began = now();
    pool_wake(step->pool);
    draft(&w, streams);
    pool_rest(step->pool);
    return now() - began;
}

/* Runs a window of the slots, whose seats [num_slots of the model] say what is asked and get what was found; streams [R, W]
 * and logits [R, vocab] are room for its rows; num_ids: ids from here on are never picked; seconds: what drafting and
 * everything else took. */
EXPORT void stratagate_window(Step *step, Seat *seats, const int32_t *slots, int num_slots, int context, int num_ids,
                              float *streams, float *logits, double *seconds) {
    Window w = {.step = step, .seats = seats, .slots = slots, .num_slots = num_slots, .num_ids = num_ids, .logits = logits};
    Kept kept[MOST_SLOTS];
    int num_kept = 0;
    double began = now();
    pool_wake(step->pool);
    draft(&w, streams);
    double drafted = now();
    verify(&w, context, streams);
    for (int i = 0; i < num_slots; i++) {
        accept(&w, i);
        int count = seat_of(&w, i)->found.num_tokens;
        if (count)
            kept[num_kept++] = (Kept){slots[i], w.first[i], count};
    }
    commit_rows(step, kept, num_kept, streams);
    pool_rest(step->pool);
    seconds[0] = drafted - began;
    seconds[1] = now() - drafted;
}
