/* Gated full attention between its projections: q/k norm, partial rope, KV write, paged attention, gate.
 *
 * A task is one sequence, one kv head and a run of rows. Keys are taken 16 a block and SPAN at a time with a
 * running maximum; sums run in key order whatever the batch, so a row's result depends on its sequence alone. */
#pragma once
#include "../native/pool.h"
#include "../native/vec.h"

#define SPAN 128 /* keys between two rescales of the output */

typedef struct {
    const void *proj; /* [rows][ld]: per q head q|gate, then K, then V; model dtype */
    void *out;        /* [rows][q_heads * head_dim], model dtype */
    void *k_cache;    /* [blocks][kv_heads][head_dim][16] */
    void *v_cache;    /* [blocks][kv_heads][16][head_dim] */
    const float *q_norm, *k_norm; /* [head_dim], zero-centred weights plus one */
    const float *inv_freq;        /* [rotary_dim / 2] */
    const int32_t *block_tables;  /* [sequences][table_ld] */
    const int64_t *cu_rows;       /* [sequences + 1] */
    const int64_t *starts;        /* [sequences], tokens before the first row */
    float *q;                     /* [rows][q_heads][head_dim], normed, turned and scaled */
    int64_t ld, table_ld, q_heads, kv_heads, head_dim, rotary_dim;
    int64_t row_tile, tiles; /* rows a task, tasks a sequence and kv head */
    float eps;
    int bf16, last_only; /* last_only: only each sequence's last row attends, the others write their key and value */
} attention_args;

static void attention_head(const attention_args *a, size_t from, const float *norm, int64_t position, float scale,
                           float *x) {
    int64_t n = a->head_dim, half = a->rotary_dim / 2;
    vf squares = {0};
    for (int64_t i = 0; i < n; i += VW) {
        vf v = load_as_f32(a->proj, from + i, a->bf16);
        squares = vfma(v, v, squares);
    }
    float rms = 1.0f / sqrtf(vsum(squares) / n + a->eps);
    for (int64_t i = 0; i < n; i += VW)
        store_f32(x + i, load_as_f32(a->proj, from + i, a->bf16) * rms * load_f32(norm + i));
    for (int64_t i = 0; i < half; i++) {
        float angle = (float)position * a->inv_freq[i], c = cosf(angle), s = sinf(angle);
        float low = x[i], high = x[i + half];
        x[i] = low * c - high * s;
        x[i + half] = high * c + low * s;
    }
    for (int64_t i = 0; i < n; i += VW) store_f32(x + i, vkeep(load_f32(x + i), a->bf16) * scale);
}

/* Norms and turns the rows' q heads and key of one kv head, writes key and value to their block. */
static void attention_prepare(const attention_args *a, int64_t sequence, int64_t kv, int64_t begin, int64_t end) {
    int64_t n = a->head_dim, group = a->q_heads / a->kv_heads;
    float scale = 1.0f / sqrtf((float)n), key[512];
    for (int64_t row = begin; row < end; row++) {
        int64_t position = a->starts[sequence] + row - a->cu_rows[sequence];
        size_t base = row * a->ld;
        for (int64_t h = kv * group; h < (kv + 1) * group; h++)
            attention_head(a, base + h * 2 * n, a->q_norm, position, scale, a->q + (row * a->q_heads + h) * n);
        attention_head(a, base + a->q_heads * 2 * n + kv * n, a->k_norm, position, 1.0f, key);
        int64_t block = a->block_tables[sequence * a->table_ld + position / PANEL], at = position % PANEL;
        size_t tile_at = (block * a->kv_heads + kv) * n * PANEL;
        size_t value = base + (a->q_heads * 2 + a->kv_heads + kv) * n;
        for (int64_t i = 0; i < n; i++) store_scalar(a->k_cache, tile_at + i * PANEL + at, key[i], a->bf16);
        size_t item = a->bf16 ? 2 : 4;
        memcpy((char *)a->v_cache + (tile_at + at * n) * item, (const char *)a->proj + value * item, n * item);
    }
}

/* A block's tile, in float32 where several passes will read it. The next one is asked for on the way: blocks
 * lie anywhere, and a tile ends before the processor has seen where a run of reads goes. */
static const void *attention_block(const attention_args *a, const void *cache, const int32_t *table, int64_t index,
                                   int64_t last, int64_t kv, int convert, float *buffer) {
    const int bf16 = a->bf16;
    const int64_t n = a->head_dim * PANEL, item = bf16 ? 2 : 4;
    const char *block = (const char *)cache + ((size_t)table[index] * a->kv_heads + kv) * n * item;
    int64_t next = index + 1 < last ? index + 1 : index;
    const char *ahead = (const char *)cache + ((size_t)table[next] * a->kv_heads + kv) * n * item;
    for (int64_t i = 0; i < n * item; i += 64) __builtin_prefetch(ahead + i, 0, 2);
    if (!convert) return block;
    for (int64_t i = 0; i < n; i += VW) store_f32(buffer + i, load_as_f32(block, i, 1));
    return buffer;
}

/* Turns a row of scores into weights; returns their sum. Keys from `visible` on are masked. */
static float attention_softmax(float *scores, int64_t keys, int64_t visible, float *maximum, float *rescale) {
    float peak = *maximum;
    for (int64_t j = visible < 0 ? 0 : visible; j < keys; j++) scores[j] = -INFINITY;
    vf high = vall(peak);
    for (int64_t j = 0; j < keys; j += VW) {
        vf x = load_f32(scores + j);
        vi more = x > high;
        high = (vf)(((vi)x & more) | ((vi)high & ~more));
    }
    for (int i = 0; i < VW; i++) peak = high[i] > peak ? high[i] : peak;
    *rescale = peak == -INFINITY ? 1.0f : expf(*maximum - peak);
    *maximum = peak;
    vf total = {0};
    vf shift = vall(peak == -INFINITY ? 0.0f : peak);
    for (int64_t j = 0; j < keys; j += VW) {
        vf weight = vexp(load_f32(scores + j) - shift);
        store_f32(scores + j, weight);
        total += weight;
    }
    return vsum(total);
}

static __thread float *attention_buffer;
static __thread size_t attention_capacity;

static void attention_rows(const attention_args *a, int64_t sequence, int64_t kv, int64_t begin, int64_t end) {
    int64_t n = a->head_dim, group = a->q_heads / a->kv_heads, rows = end - begin, M = rows * group;
    int convert = a->bf16 && M > TILE_ROWS, read_bf16 = a->bf16 && !convert;
    float *x = scratch(&attention_buffer, &attention_capacity, M * n * 2 + M * SPAN + 2 * M + n * PANEL);
    float *o = x + M * n, *scores = o + M * n, *peak = scores + M * SPAN, *sum = peak + M, *block = sum + M;
    for (int64_t m = 0; m < M; m++) {
        memcpy(x + m * n, a->q + ((begin + m / group) * a->q_heads + kv * group + m % group) * n, n * sizeof(float));
        peak[m] = -INFINITY;
        sum[m] = 0;
    }
    memset(o, 0, M * n * sizeof(float));
    int64_t first = a->starts[sequence] + begin - a->cu_rows[sequence], seen = first + rows;
    const int32_t *table = a->block_tables + sequence * a->table_ld;
    int64_t blocks = (seen + PANEL - 1) / PANEL;
    for (int64_t key = 0; key < seen; key += SPAN) {
        int64_t span = seen - key < SPAN ? (seen - key + PANEL - 1) / PANEL * PANEL : SPAN;
        for (int64_t j = 0; j < span; j += PANEL) {
            const void *w = attention_block(a, a->k_cache, table, (key + j) / PANEL, blocks, kv, convert, block);
            product(M, n, x, n, w, PANEL, read_bf16, scores + j, SPAN, 0);
        }
        for (int64_t m = 0; m < M; m++) {
            float rescale;
            int64_t visible = first + m / group + 1 - key;
            float total = attention_softmax(scores + m * SPAN, span, visible < span ? visible : span, peak + m, &rescale);
            sum[m] = sum[m] * rescale + total;
            if (rescale != 1.0f)
                for (int64_t i = 0; i < n; i += VW) store_f32(o + m * n + i, load_f32(o + m * n + i) * rescale);
        }
        for (int64_t j = 0; j < span; j += PANEL) {
            const void *w = attention_block(a, a->v_cache, table, (key + j) / PANEL, blocks, kv, convert, block);
            size_t item = read_bf16 ? 2 : 4;
            for (int64_t c = 0; c < n; c += PANEL)
                product(M, PANEL, scores + j, SPAN, (const char *)w + c * item, n, read_bf16, o + c, n, 1);
        }
    }
    for (int64_t m = 0; m < M; m++) {
        int64_t row = begin + m / group, head = kv * group + m % group;
        size_t gate = row * a->ld + head * 2 * n + n, to = (row * a->q_heads + head) * n;
        for (int64_t i = 0; i < n; i += VW) {
            vf value = vkeep(load_f32(o + m * n + i) / sum[m], a->bf16);
            store_from_f32(a->out, to + i, value * vsigmoid(load_as_f32(a->proj, gate + i, a->bf16)), a->bf16);
        }
    }
}

static void attention_span(const attention_args *a, int64_t task, int64_t *sequence, int64_t *kv, int64_t *begin,
                           int64_t *end) {
    *kv = task % a->kv_heads;
    *sequence = task / a->kv_heads / a->tiles;
    *begin = a->cu_rows[*sequence] + task / a->kv_heads % a->tiles * a->row_tile;
    int64_t last = a->cu_rows[*sequence + 1];
    *end = *begin + a->row_tile < last ? *begin + a->row_tile : last;
}

static void attention_prepare_task(void *context, int64_t task) {
    int64_t sequence, kv, begin, end;
    attention_span(context, task, &sequence, &kv, &begin, &end);
    if (begin < end) attention_prepare(context, sequence, kv, begin, end);
}

static void attention_rows_task(void *context, int64_t task) {
    int64_t sequence, kv, begin, end;
    const attention_args *a = context;
    attention_span(a, task, &sequence, &kv, &begin, &end);
    int64_t last = a->cu_rows[sequence + 1] - 1;
    if (a->last_only && begin < last) begin = last;
    if (begin < end) attention_rows(a, sequence, kv, begin, end);
}

static void attention_whole_task(void *context, int64_t task) {
    attention_prepare_task(context, task);
    attention_rows_task(context, task);
}

static __thread float *attention_q;
static __thread size_t attention_q_capacity;

/* head_dim is a multiple of 16, 512 at most; the KV block is 16; `longest` is the most rows of a sequence. */
void mstar_attention(const void *proj, int64_t ld, void *out, void *k_cache, void *v_cache, const float *q_norm,
                     const float *k_norm, const float *inv_freq, const int32_t *block_tables, int64_t table_ld,
                     const int64_t *cu_rows, const int64_t *starts, int64_t sequences, int64_t longest, int64_t q_heads,
                     int64_t kv_heads, int64_t head_dim, int64_t rotary_dim, float eps, int bf16,
                     int last_only) {
    attention_args a = {.proj = proj, .out = out, .k_cache = k_cache, .v_cache = v_cache, .q_norm = q_norm,
                        .k_norm = k_norm, .inv_freq = inv_freq, .block_tables = block_tables, .cu_rows = cu_rows,
                        .starts = starts, .ld = ld, .table_ld = table_ld, .q_heads = q_heads, .kv_heads = kv_heads,
                        .head_dim = head_dim, .rotary_dim = rotary_dim, .eps = eps, .bf16 = bf16,
                        .last_only = last_only};
    a.q = scratch(&attention_q, &attention_q_capacity, cu_rows[sequences] * q_heads * head_dim);
    a.row_tile = 16;
    a.tiles = (longest + a.row_tile - 1) / a.row_tile;
    int64_t tasks = sequences * kv_heads * a.tiles;
    if (a.tiles == 1) { /* no row needs a key that another task writes */
        parallel(attention_whole_task, &a, tasks);
    } else {
        parallel(attention_prepare_task, &a, tasks);
        parallel(attention_rows_task, &a, tasks);
    }
}
