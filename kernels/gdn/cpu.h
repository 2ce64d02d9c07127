/* Gated DeltaNet between its projections: causal conv, gates, delta rule, gated norm; any rows a sequence.
 *
 * Prefill and decode are one loop over tokens. On a CPU the state of a head stays in the first caches, so the
 * recurrence costs what the chunked form does, and it gives a prompt and its decode steps the same float
 * operations: how a prompt was chunked, preempted or batched never shows in the text.
 *
 * A task is one sequence and one key head with its value heads. */
#pragma once
#include "../native/pool.h"
#include "../native/vec.h"

#define COLUMNS 32 /* columns of S at a time: d, o and the sums stay in AVX2's registers */

typedef struct {
    const void *proj;   /* [rows][ld]: Q|K|V | z | b | a, model dtype */
    void *out;          /* [rows][value_heads * value_dim], model dtype */
    void *conv;         /* [slots][width - 1][channels], model dtype */
    float *state;       /* [slots][value_heads][key_dim][value_dim] */
    const float *conv_w; /* [width][channels] */
    const float *decay, *dt_bias; /* [value_heads]: -exp(A_log), dt_bias */
    const float *norm;  /* [value_dim] */
    const int32_t *slots;    /* [sequences] */
    const int64_t *cu_rows;  /* [sequences + 1] */
    const uint8_t *fresh;    /* [sequences]: 1 starts from a cleared state */
    int64_t ld, key_heads, value_heads, key_dim, value_dim, width;
    float eps;
    int bf16;
} gdn_args;

/* silu of the causal conv for `n` channels from `channel` on; `window` holds the last `width` inputs,
 * the newest last, [width][n], and moves by one. */
static void gdn_conv(const gdn_args *a, int64_t row, int64_t channel, int64_t n, float *window, float *u) {
    int64_t channels = a->key_heads * a->key_dim * 2 + a->value_heads * a->value_dim;
    int64_t width = a->width;
    memmove(window, window + n, (width - 1) * n * sizeof(float));
    float *newest = window + (width - 1) * n;
    for (int64_t c = 0; c < n; c += VW)
        store_f32(newest + c, load_as_f32(a->proj, row * a->ld + channel + c, a->bf16));
    for (int64_t c = 0; c < n; c += VW) {
        vf sum = {0};
        for (int64_t t = 0; t < width; t++)
            sum += load_f32(window + t * n + c) * load_f32(a->conv_w + t * channels + channel + c);
        store_f32(u + c, vkeep(vsilu(vkeep(sum, a->bf16)), a->bf16));
    }
}

static void gdn_l2_norm(float *x, int64_t n, float scale) {
    vf squares = {0};
    for (int64_t i = 0; i < n; i += VW) squares += load_f32(x + i) * load_f32(x + i);
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
                    kept[0][c] += k[i] * load_f32(S + i * value_dim + column + c * VW);
                    kept[1][c] += k[i + 1] * load_f32(S + (i + 1) * value_dim + column + c * VW);
                }
        } else {
            for (int64_t i = 0; i < key_dim; i++)
                for (int c = 0; c < vectors; c++)
                    kept[i & 1][c] += k[i] * load_f32(S + i * value_dim + column + c * VW);
        }
        for (int c = 0; c < vectors; c++) {
            d[c] = beta * (load_f32(v + column + c * VW) - decay * (kept[0][c] + kept[1][c]));
            out[c] = (vf){0};
        }
        if (vectors == C) {
            for (int64_t i = 0; i < key_dim; i++)
                for (int c = 0; c < C; c++) {
                    float *at = S + i * value_dim + column + c * VW;
                    vf s = decay * load_f32(at) + k[i] * d[c];
                    store_f32(at, s);
                    out[c] += q[i] * s;
                }
        } else {
            for (int64_t i = 0; i < key_dim; i++)
                for (int c = 0; c < vectors; c++) {
                    float *at = S + i * value_dim + column + c * VW;
                    vf s = decay * load_f32(at) + k[i] * d[c];
                    store_f32(at, s);
                    out[c] += q[i] * s;
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
        squares += x * x;
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

static __thread float *gdn_buffer;
static __thread size_t gdn_capacity;

static void gdn_task(void *context, int64_t task) {
    const gdn_args *a = context;
    int64_t sequence = task / a->key_heads, key_head = task % a->key_heads;
    int64_t K = a->key_dim, V = a->value_dim, group = a->value_heads / a->key_heads, width = a->width;
    int64_t keys = a->key_heads * K, channels = 2 * keys + a->value_heads * V;
    int64_t begin[3] = {key_head * K, keys + key_head * K, 2 * keys + key_head * group * V};
    int64_t count[3] = {K, K, group * V}, n = 2 * K + group * V;
    float *window = scratch(&gdn_buffer, &gdn_capacity, (width + 1) * n + V);
    float *u = window + width * n, *o = u + n;
    float *part[3] = {window, window + width * K, window + 2 * width * K};
    float *q = u, *k = u + K, *v = u + 2 * K;

    int64_t slot = a->slots[sequence];
    int fresh = a->fresh[sequence];
    size_t conv_at = slot * (width - 1) * channels;
    for (int s = 0; s < 3; s++)
        for (int64_t t = 0; t < width - 1; t++)
            for (int64_t c = 0; c < count[s]; c += VW) {
                vf x = load_as_f32(a->conv, conv_at + t * channels + begin[s] + c, a->bf16);
                store_f32(part[s] + (t + 1) * count[s] + c, fresh ? (vf){0} : x);
            }
    float *states = a->state + (slot * a->value_heads + key_head * group) * K * V;
    if (fresh) memset(states, 0, group * K * V * sizeof(float));

    for (int64_t row = a->cu_rows[sequence]; row < a->cu_rows[sequence + 1]; row++) {
        gdn_conv(a, row, begin[0], K, part[0], q);
        gdn_conv(a, row, begin[1], K, part[1], k);
        gdn_conv(a, row, begin[2], group * V, part[2], v);
        gdn_l2_norm(q, K, 1.0f / sqrtf((float)K));
        gdn_l2_norm(k, K, 1.0f);
        for (int64_t g = 0; g < group; g++) {
            int64_t head = key_head * group + g;
            size_t gates = row * a->ld + channels + a->value_heads * V + head;
            float beta = sigmoid(load_scalar(a->proj, gates, a->bf16));
            float x = load_scalar(a->proj, gates + a->value_heads, a->bf16) + a->dt_bias[head];
            float softplus = x > 20.0f ? x : log1pf(expf(x));
            gdn_delta(states + g * K * V, K, V, q, k, v + g * V, expf(a->decay[head] * softplus), beta, o);
            gdn_gated_norm(a, o, row, head);
        }
    }
    for (int s = 0; s < 3; s++)
        for (int64_t t = 0; t < width - 1; t++)
            for (int64_t c = 0; c < count[s]; c += VW)
                store_from_f32(a->conv, conv_at + t * channels + begin[s] + c,
                               load_f32(part[s] + (t + 1) * count[s] + c), a->bf16);
}

/* Dims are multiples of 16. Sequences own distinct slots, but for the sink, whose content means nothing:
 * padding rows are given `fresh` and nothing reads what they leave. */
void mstar_gdn(const void *proj, int64_t ld, void *out, void *conv, float *state, const float *conv_w,
               const float *decay, const float *dt_bias, const float *norm, const int32_t *slots,
               const int64_t *cu_rows, const uint8_t *fresh, int64_t sequences, int64_t key_heads,
               int64_t value_heads, int64_t key_dim, int64_t value_dim, int64_t width, float eps, int bf16) {
    gdn_args a = {proj, out, conv, state, conv_w, decay, dt_bias, norm, slots, cu_rows, fresh,
                  ld, key_heads, value_heads, key_dim, value_dim, width, eps, bf16};
    parallel(gdn_task, &a, sequences * key_heads);
}
