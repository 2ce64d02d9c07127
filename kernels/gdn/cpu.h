/* Gated DeltaNet between its projections: causal conv, gates, delta rule, gated norm; any rows a sequence.
 *
 * Prefill and decode are one loop over tokens. On a CPU the state of a head stays in the first caches, so the
 * recurrence costs what the chunked form does, and it gives a prompt and its decode steps the same float
 * operations: how a prompt was chunked, preempted or batched never shows in the text.
 *
 * A sequence's rows are, in order: `pending` rows of its window (drafts of its last step that were accepted: the
 * state is behind by them), `committed` rows that move the state, and drafts, which run on a copy of it and leave
 * their inputs in the window. So a step reads and writes each state once, and what an acceptance moves is a count.
 *
 * A task is one sequence and one key head with its value heads: all it reads and writes is its own. */
#pragma once
#include "../native/pool.h"
#include "../native/vec.h"

#define COLUMNS 32 /* columns of S at a time: d, o and the sums stay in AVX2's registers */

typedef struct {
    const void *proj;   /* [rows][ld]: Q|K|V | z | b | a, model dtype */
    void *out;          /* [rows][value_heads * value_dim], model dtype */
    void *conv;         /* [slots][width - 1][channels], model dtype */
    float *state;       /* [slots][value_heads][key_dim][value_dim] */
    void *window;       /* [slots][window_rows][channels + 2 * value_heads]: Q|K|V | b | a, model dtype */
    const float *conv_w; /* [width][channels] */
    const float *decay, *dt_bias; /* [value_heads]: -exp(A_log), dt_bias */
    const float *norm;  /* [value_dim] */
    const int32_t *slots;     /* [sequences] */
    const int64_t *cu_rows;   /* [sequences + 1] */
    const uint8_t *fresh;     /* [sequences]: 1 starts from a cleared state */
    const int32_t *pending;   /* [sequences], rows of the window to run first; NULL: none */
    const int64_t *committed; /* [sequences], rows that move the state; NULL: all */
    int64_t ld, window_rows, key_heads, value_heads, key_dim, value_dim, width;
    float eps;
    int bf16;
} gdn_args;

INLINE int64_t gdn_channels(const gdn_args *a) { return a->key_heads * a->key_dim * 2 + a->value_heads * a->value_dim; }

/* What a task works on: the channels of one key head, q, k and v apart. */
typedef struct {
    int64_t key_head, group;    /* value heads [key_head * group, (key_head + 1) * group) */
    int64_t begin[3], count[3]; /* channels of q, k and v */
    float *taps[3];             /* [width][count] each, the last inputs of the conv, newest last */
    float *u[3], *o;
} gdn_head;

/* silu of the causal conv for `n` channels of the inputs at `from`; the taps move by one. */
static void gdn_conv(const gdn_args *a, const void *inputs, size_t from, int64_t channel, int64_t n, float *taps,
                     float *u) {
    int64_t channels = gdn_channels(a), width = a->width;
    memmove(taps, taps + n, (width - 1) * n * sizeof(float));
    float *newest = taps + (width - 1) * n;
    for (int64_t c = 0; c < n; c += VW) store_f32(newest + c, load_as_f32(inputs, from + c, a->bf16));
    for (int64_t c = 0; c < n; c += VW) {
        vf sum = {0};
        for (int64_t t = 0; t < width; t++)
            sum = vfma(load_f32(taps + t * n + c), load_f32(a->conv_w + t * channels + channel + c), sum);
        store_f32(u + c, vkeep(vsilu(vkeep(sum, a->bf16)), a->bf16));
    }
}

static void gdn_l2_norm(float *x, int64_t n, float scale) {
    vf squares = {0};
    for (int64_t i = 0; i < n; i += VW) squares = vfma(load_f32(x + i), load_f32(x + i), squares);
    scale /= sqrtf(vsum(squares) + 1e-6f);
    for (int64_t i = 0; i < n; i += VW) store_f32(x + i, load_f32(x + i) * scale);
}

/* S = e^g S; d = beta (v - S^T k); S += k d^T; o = S^T q, for one token and head; S is read twice, written once. */
static void gdn_delta(float *S, int64_t key_dim, int64_t value_dim, const float *q, const float *k, const float *v,
                      float decay, float beta, float *o) {
    enum { C = COLUMNS / VW };
    for (int64_t column = 0; column < value_dim; column += COLUMNS) {
        int vectors = value_dim - column < COLUMNS ? (int)(value_dim - column) / VW : C;
        vf kept[2][C] = {{{0}}}, d[C], out[C];
        if (vectors == C) {
            for (int64_t i = 0; i < key_dim; i += 2)
                for (int c = 0; c < C; c++) {
                    kept[0][c] = vfma(vall(k[i]), load_f32(S + i * value_dim + column + c * VW), kept[0][c]);
                    kept[1][c] = vfma(vall(k[i + 1]), load_f32(S + (i + 1) * value_dim + column + c * VW), kept[1][c]);
                }
        } else {
            for (int64_t i = 0; i < key_dim; i++)
                for (int c = 0; c < vectors; c++)
                    kept[i & 1][c] = vfma(vall(k[i]), load_f32(S + i * value_dim + column + c * VW), kept[i & 1][c]);
        }
        for (int c = 0; c < vectors; c++) {
            d[c] = beta * (load_f32(v + column + c * VW) - decay * (kept[0][c] + kept[1][c]));
            out[c] = (vf){0};
        }
        if (vectors == C) {
            for (int64_t i = 0; i < key_dim; i++)
                for (int c = 0; c < C; c++) {
                    float *at = S + i * value_dim + column + c * VW;
                    vf s = vfma(vall(k[i]), d[c], decay * load_f32(at));
                    store_f32(at, s);
                    out[c] = vfma(vall(q[i]), s, out[c]);
                }
        } else {
            for (int64_t i = 0; i < key_dim; i++)
                for (int c = 0; c < vectors; c++) {
                    float *at = S + i * value_dim + column + c * VW;
                    vf s = vfma(vall(k[i]), d[c], decay * load_f32(at));
                    store_f32(at, s);
                    out[c] = vfma(vall(q[i]), s, out[c]);
                }
        }
        for (int c = 0; c < vectors; c++) store_f32(o + column + c * VW, out[c]);
    }
}

/* rms norm over the value dim, times w, times silu(z); rounded where the model rounds. */
static void gdn_gated_norm(const gdn_args *a, const float *o, int64_t row, int64_t head) {
    const int64_t n = a->value_dim;
    const int bf16 = a->bf16;
    vf squares = {0};
    for (int64_t i = 0; i < n; i += VW) {
        vf x = vkeep(load_f32(o + i), bf16);
        squares = vfma(x, x, squares);
    }
    float scale = 1.0f / sqrtf(vsum(squares) / n + a->eps);
    int64_t channels = a->key_heads * a->key_dim * 2 + a->value_heads * n;
    size_t z = row * a->ld + channels + head * n, at = (row * a->value_heads + head) * n;
    for (int64_t i = 0; i < n; i += VW) {
        vf normed = vkeep(vkeep(load_f32(o + i), bf16) * scale, bf16);
        normed = vkeep(normed * load_f32(a->norm + i), bf16);
        store_from_f32(a->out, at + i, normed * vsilu(load_as_f32(a->proj, z + i, bf16)), bf16);
    }
}

/* One row of a task's heads: inputs at `base`, gates b|a at `gates`; moves `states`, and gives out where row >= 0. */
static void gdn_row(const gdn_args *a, gdn_head *h, const void *inputs, size_t base, size_t gates, float *states,
                    int64_t row) {
    int64_t K = a->key_dim, V = a->value_dim;
    for (int s = 0; s < 3; s++)
        gdn_conv(a, inputs, base + h->begin[s], h->begin[s], h->count[s], h->taps[s], h->u[s]);
    gdn_l2_norm(h->u[0], K, 1.0f / sqrtf((float)K));
    gdn_l2_norm(h->u[1], K, 1.0f);
    for (int64_t g = 0; g < h->group; g++) {
        int64_t head = h->key_head * h->group + g;
        float beta = sigmoid(load_scalar(inputs, gates + head, a->bf16));
        float x = load_scalar(inputs, gates + a->value_heads + head, a->bf16) + a->dt_bias[head];
        float softplus = x > 20.0f ? x : log1pf(expf(x));
        gdn_delta(states + g * K * V, K, V, h->u[0], h->u[1], h->u[2] + g * V, expf(a->decay[head] * softplus), beta,
                  h->o);
        if (row >= 0) gdn_gated_norm(a, h->o, row, head);
    }
}

/* Copies a draft row's inputs to its place in the window: this task's channels and gates. */
static void gdn_keep_row(const gdn_args *a, const gdn_head *h, int64_t row, size_t at) {
    size_t item = a->bf16 ? 2 : 4, channels = gdn_channels(a);
    size_t from = row * a->ld, gates = from + channels + a->value_heads * a->value_dim, first = h->key_head * h->group;
    char *to = (char *)a->window;
    const char *proj = a->proj;
    for (int s = 0; s < 3; s++)
        memcpy(to + (at + h->begin[s]) * item, proj + (from + h->begin[s]) * item, h->count[s] * item);
    for (int gate = 0; gate < 2; gate++)
        memcpy(to + (at + channels + gate * a->value_heads + first) * item,
               proj + (gates + gate * a->value_heads + first) * item, h->group * item);
}

static __thread float *gdn_buffer;
static __thread size_t gdn_capacity;

static void gdn_task(void *context, int64_t task) {
    const gdn_args *a = context;
    int64_t sequence = task / a->key_heads, K = a->key_dim, V = a->value_dim, width = a->width;
    int64_t group = a->value_heads / a->key_heads, keys = a->key_heads * K, channels = gdn_channels(a);
    int64_t first = a->cu_rows[sequence], end = a->cu_rows[sequence + 1];
    int64_t commit = a->committed && a->committed[sequence] < end - first ? first + a->committed[sequence] : end;
    gdn_head h = {.key_head = task % a->key_heads, .group = group};
    for (int s = 0; s < 3; s++) {
        h.begin[s] = s < 2 ? s * keys + h.key_head * K : 2 * keys + h.key_head * group * V;
        h.count[s] = s < 2 ? K : group * V;
    }
    int64_t n = 2 * K + group * V, state_size = group * K * V;
    float *buffer = scratch(&gdn_buffer, &gdn_capacity, (width + 1) * n + V + (commit < end ? state_size : 0));
    for (int s = 0; s < 3; s++) {
        h.taps[s] = s ? h.taps[s - 1] + width * h.count[s - 1] : buffer;
        h.u[s] = s ? h.u[s - 1] + h.count[s - 1] : buffer + width * n;
    }
    h.o = buffer + (width + 1) * n;

    int64_t slot = a->slots[sequence];
    int fresh = a->fresh[sequence];
    size_t conv_at = slot * (width - 1) * channels;
    for (int s = 0; s < 3; s++)
        for (int64_t t = 0; t < width - 1; t++)
            for (int64_t c = 0; c < h.count[s]; c += VW) {
                vf x = load_as_f32(a->conv, conv_at + t * channels + h.begin[s] + c, a->bf16);
                store_f32(h.taps[s] + (t + 1) * h.count[s] + c, fresh ? (vf){0} : x);
            }
    float *states = a->state + (slot * a->value_heads + h.key_head * group) * K * V;
    if (fresh) memset(states, 0, state_size * sizeof(float));

    size_t window_ld = channels + 2 * a->value_heads, window_at = slot * a->window_rows * window_ld;
    int64_t pending = a->pending && !fresh ? a->pending[sequence] : 0;
    for (int64_t i = 0; i < pending; i++, window_at += window_ld)
        gdn_row(a, &h, a->window, window_at, window_at + channels, states, -1);
    size_t gates = channels + a->value_heads * V;
    for (int64_t row = first; row < commit; row++)
        gdn_row(a, &h, a->proj, row * a->ld, row * a->ld + gates, states, row);
    for (int s = 0; s < 3; s++)
        for (int64_t t = 0; t < width - 1; t++)
            for (int64_t c = 0; c < h.count[s]; c += VW)
                store_from_f32(a->conv, conv_at + t * channels + h.begin[s] + c,
                               load_f32(h.taps[s] + (t + 1) * h.count[s] + c), a->bf16);
    if (commit == end) return;
    float *drafted = h.o + V;
    memcpy(drafted, states, state_size * sizeof(float));
    window_at = slot * a->window_rows * window_ld;
    for (int64_t row = commit; row < end; row++, window_at += window_ld) {
        gdn_row(a, &h, a->proj, row * a->ld, row * a->ld + gates, drafted, row);
        gdn_keep_row(a, &h, row, window_at);
    }
}

/* Dims are multiples of 16. Sequences own distinct slots, but for the sink, whose content means nothing:
 * padding rows are given `fresh` and nothing reads what they leave. A sequence may have no rows at all: what is
 * pending is run then, which settles its state. */
void mstar_gdn(const void *proj, int64_t ld, void *out, void *conv, float *state, void *window, const float *conv_w,
               const float *decay, const float *dt_bias, const float *norm, const int32_t *slots,
               const int64_t *cu_rows, const uint8_t *fresh, const int32_t *pending, const int64_t *committed,
               int64_t sequences, int64_t window_rows, int64_t key_heads, int64_t value_heads, int64_t key_dim,
               int64_t value_dim, int64_t width, float eps, int bf16) {
    gdn_args a = {proj, out, conv, state, window, conv_w, decay, dt_bias, norm, slots, cu_rows, fresh, pending,
                  committed, ld, window_rows, key_heads, value_heads, key_dim, value_dim, width, eps, bf16};
    parallel(gdn_task, &a, sequences * key_heads);
}
