/* Logits -> an id by Gumbel-max with counter-based noise: engine.sampling.Picker for one row at a time, which is also
 * its oracle. Noise is computed only for ids that can still win. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"
#include "select.h"
#include "simd.h"

#define FIRST_CANDIDATES 64
#define BLOCK 32

/* work: two rows of vocab floats, and one of ids. */
typedef struct {
    float *values, *order;
    int32_t *ids;
} Work;

static float penalized(float x, int seen, float count, const PickRow *row) {
    if (seen && row->repetition != 1.0f)
        x = x > 0.0f ? x / row->repetition : x * row->repetition;
    x -= (count > 0.0f ? 1.0f : 0.0f) * row->presence;
    return x - count * row->frequency;
}

/* The ids of this window count as output: the row sees what plain decoding would have seen. */
static void penalize(float *values, const float *logits, int n, const PickRow *row) {
    for (int first = 0; first < n; first += 8) {
        int end = first + 8 < n ? first + 8 : n;
        uint64_t any = 1;
        if (end - first == 8)
            memcpy(&any, row->seen + first, 8);
        for (int i = first; any && i < end; i++)
            if (row->seen[i])
                values[i] = penalized(values[i], 1, row->counts[i], row);
    }
    for (int d = 0; d < row->num_drafts; d++) {
        int32_t id = row->drafts[d];
        float count = row->counts[id], value = logits[id];
        for (int i = 0; i < row->num_drafts; i++)
            count += row->drafts[i] == id;
        for (int i = 0; i < row->num_biases; i++)
            value += row->bias_ids[i] == id ? row->biases[i] : 0.0f;
        values[id] = penalized(value, 1, count, row);
    }
}

static void process(float *values, const float *logits, int n, int num_ids, const PickRow *row) {
    memcpy(values, logits, (size_t)n * sizeof(float));
    for (int i = 0; i < row->num_biases; i++)
        values[row->bias_ids[i]] += row->biases[i];
    if (row->seen)
        penalize(values, logits, n, row);
    for (int i = 0; i < row->num_banned; i++)
        values[row->banned[i]] = -INFINITY;
    for (int i = 0; row->allowed && i < n; i++)
        values[i] = row->allowed[i] ? values[i] : -INFINITY;
    for (int i = num_ids; i < n; i++)
        values[i] = -INFINITY;
}

/* The first of the largest values. */
static int argmax(const float *values, int n) {
    vf most = vset(-INFINITY);
    for (int i = 0; i < n; i += LANES)
        most = vmax(i + LANES <= n ? vload(values + i) : vset(values[n - 1]), most);
    float best = vmax_lane(most);
    for (int i = n / LANES * LANES; i < n; i++)
        best = values[i] > best ? values[i] : best;
    int i = 0;
    while (i < n - 1 && !(values[i] == best))
        i++;
    return i;
}

/* Sum of exp((x - most) / temperature). */
static double sum_exp(const float *values, int n, float most, double temperature) {
    vf scale = vset((float)(1.0 / temperature)), top = vset(most);
    double total = 0.0;
    for (int first = 0; first < n; first += 64 * LANES) {
        int end = first + 64 * LANES < n ? first + 64 * LANES : n;
        vf sum = vset(0.0f);
        for (int i = first; i < end; i += LANES) {
            vf x = i + LANES <= end ? vload(values + i) : vload_part(values + i, end - i);
            vf e = vexp((x - top) * scale);
            for (int lane = end - i; lane < LANES; lane++)
                e[lane] = 0.0f;
            sum += e;
        }
        total += vsum(sum);
    }
    return total;
}

#define GAMMA 0x9E3779B97F4A7C15u

static uint64_t mixed(uint64_t z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static uint64_t key_of(const PickRow *row) { return mixed(row->seed + (uint64_t)(row->position + 1) * GAMMA); }

static uint64_t noise_bits(uint64_t key, int64_t id) { return mixed(key + (uint64_t)(id + 1) * GAMMA) >> 12; }

static double gumbel(uint64_t bits) { return -log(-log(((double)bits + 0.5) * 0x1p-52)); }

/* Noise reaches `needed` only if 1 - u < exp(-needed), and 1 - u is at least 2^(its leading bit). */
static int may_reach(uint64_t bits, double needed) {
    uint64_t left = (UINT64_C(1) << 52) - 1 - bits;
    int log2_left = left ? 63 - __builtin_clzll(left) - 52 : -53;
    return needed <= 0.0 || log2_left <= -needed * 1.4426950408889634 + 1e-9;
}

/* The id of the largest scaled value plus noise; the earlier of equal ones. */
static int noisy_argmax(const float *values, const int32_t *ids, int n, const PickRow *row) {
    double best = -INFINITY;
    uint64_t key = key_of(row);
    int found = 0;
    for (int i = 0; i < n; i++) {
        int32_t id = ids ? ids[i] : i;
        double scaled = (double)values[id] / row->temperature;
        if (!(scaled > -INFINITY))
            continue;
        uint64_t bits = noise_bits(key, id);
        if (!may_reach(bits, best - scaled))
            continue;
        double noisy = scaled + gumbel(bits);
        if (noisy > best) {
            best = noisy;
            found = id;
        }
    }
    return found;
}

static int by_value(const float *values, int32_t a, int32_t b) {
    return values[a] > values[b] || (values[a] == values[b] && a < b);
}

/* Falling values, equal ones by rising id; heap sort, since a few hundred ids are the most that come here. */
static void sort_ids(int32_t *ids, int n, const float *values) {
    for (int end = n, start = n / 2; end > 1;) {
        if (start > 0)
            start--;
        else {
            int32_t last = ids[--end];
            ids[end] = ids[0];
            ids[0] = last;
        }
        int32_t moved = ids[start];
        int at = start;
        for (int child = 2 * at + 1; child < end; child = 2 * at + 1) {
            if (child + 1 < end && by_value(values, ids[child], ids[child + 1]))
                child++;
            if (!by_value(values, moved, ids[child]))
                break;
            ids[at] = ids[child];
            at = child;
        }
        ids[at] = moved;
    }
}

static float most_of_block(const float *values) {
    vf most = vload(values);
    for (int i = LANES; i < BLOCK; i += LANES)
        most = vmax(vload(values + i), most);
    return vmax_lane(most);
}

/* The k-th largest of n values. At least k of them reach the k-th largest of the blocks' largest, so only what reaches
 * that is looked at one by one. */
static float threshold(const float *values, float *order, int n, int k) {
    int num_blocks = n / BLOCK, count = 0;
    float least = -INFINITY;
    if (k <= num_blocks) {
        for (int b = 0; b < num_blocks; b++)
            order[b] = most_of_block(values + b * BLOCK);
        least = kth_largest(order, num_blocks, k);
    }
    for (int i = 0; i < n; i++)
        if (values[i] >= least)
            order[count++] = values[i];
    return count < k ? -INFINITY : kth_largest(order, count, k);
}

/* The k largest values' ids, sorted. */
static void largest(int32_t *ids, const float *values, float *order, int n, int k) {
    float least = threshold(values, order, n, k);
    int above = 0, taken = 0;
    for (int i = 0; i < n; i++)
        above += values[i] > least;
    int ties = k - above;
    for (int i = 0; i < n && taken < k; i++)
        if (values[i] >= least && (values[i] > least || ties-- > 0))
            ids[taken++] = i;
    while (taken < k)
        ids[taken++] = 0; /* only values that are not numbers leave a place */
    sort_ids(ids, k, values);
}

static double weight(const float *values, int32_t id, float most, double temperature) {
    return exp(((double)values[id] - (double)most) / temperature);
}

/* How many of the sorted ids top_p and min_p leave, of a softmax whose weights sum to `total`; -1: more than n. */
static int kept_of(const Work *work, int n, int all, double total, const PickRow *row) {
    float most = work->values[work->ids[0]];
    double before = 0.0, first = 1.0 / total;
    for (int i = 0; i < n; i++) {
        double p = weight(work->values, work->ids[i], most, row->temperature) / total;
        if (i && (!(before < row->top_p) || !(p >= row->min_p * first)))
            return i;
        before += p;
    }
    return n == all ? n : -1;
}

/* Sorts as many ids as truncation keeps and returns their number. */
static int truncate(const Work *work, int n, const PickRow *row) {
    if (row->top_k > 0 && row->top_k < n) {
        largest(work->ids, work->values, work->order, n, row->top_k);
        double total = 0.0;
        for (int i = 0; i < row->top_k; i++)
            total += weight(work->values, work->ids[i], work->values[work->ids[0]], row->temperature);
        return kept_of(work, row->top_k, row->top_k, total, row);
    }
    double total = sum_exp(work->values, n, work->values[argmax(work->values, n)], row->temperature);
    for (int k = FIRST_CANDIDATES;; k *= 4) {
        k = k < n ? k : n;
        largest(work->ids, work->values, work->order, n, k);
        int kept = kept_of(work, k, n, total, row);
        if (kept >= 0)
            return kept;
    }
}

/* The row's pick, and its probability among what may be picked: under temperature and truncation, or, greedy, under
 * the plain softmax. */
static int pick(const Work *work, int n, const PickRow *row, float *probability) {
    const float *values = work->values;
    int top = argmax(values, n), picked = top;
    if (row->temperature == 0.0) {
        *probability = (float)(1.0 / sum_exp(values, n, values[top], 1.0));
        return picked;
    }
    if (row->top_k <= 0 && row->top_p >= 1.0 && row->min_p <= 0.0) {
        picked = noisy_argmax(values, 0, n, row);
        double total = sum_exp(values, n, values[top], row->temperature);
        *probability = (float)(weight(values, picked, values[top], row->temperature) / total);
        return picked;
    }
    int kept = truncate(work, n, row);
    picked = noisy_argmax(values, work->ids, kept, row);
    double total = 0.0;
    for (int i = 0; i < kept; i++)
        total += weight(values, work->ids[i], values[work->ids[0]], row->temperature);
    *probability = (float)(weight(values, picked, values[work->ids[0]], row->temperature) / total);
    return picked;
}

static int all_finite(const float *values, int n) {
    vf sum = vset(0.0f);
    for (int i = 0; i < n; i += LANES)
        sum += vload_n(values + i, n - i) * vset(0.0f);
    return vsum(sum) == 0.0f;
}

/* logits [num_rows, n] -> ids, probabilities and whether all of a row's logits are finite, each [num_rows]; ids from
 * num_ids on are never picked. work: PICK_WORDS(n) words. */
EXPORT void stratagate_pick(const float *logits, int n, int num_ids, const PickRow *rows, int num_rows, float *work,
                            int32_t *ids, float *probabilities, uint8_t *finite) {
    Work w = {work, work + n, (int32_t *)(work + 2 * (int64_t)n)};
    for (int i = 0; i < num_rows; i++) {
        const float *row = logits + (int64_t)i * n;
        finite[i] = (uint8_t)all_finite(row, n);
        process(w.values, row, n, num_ids, &rows[i]);
        ids[i] = pick(&w, n, &rows[i], &probabilities[i]);
    }
}
