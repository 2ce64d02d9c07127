/* y = epilogue(prologue(x) W^T) with W packed in panels of 16 outputs: [N/16][K][16], float32 or bf16.
 *
 * A task is 64 outputs by a block of rows. Each output sums over k in order whatever the number of rows,
 * so a row's result does not depend on what shares its batch. */
#pragma once
#include "../native/pool.h"
#include "../native/vec.h"

#define QUAD 4          /* panels a task */
#define K_BLOCK 128     /* products summed before they join the total: logits of tiny err by 1.1e-6, in one run 3.0e-6 */
#define ROW_BLOCK 96    /* rows a task: x stays in L2 (96 * 768 floats = 288 KiB) */

enum { STORE = 0, STORE_F32 = 1, ADD_RESIDUAL = 2, SILU_GATED = 3 };

typedef struct {
    const void *x;
    const float *norm; /* [K], the zero-centred weight plus one; NULL: no norm */
    const void *w;
    const void *residual;
    void *out;
    float *rows_f32; /* [rows][K], what the prologue made of x */
    int64_t rows, ldx, inputs, K, N, quads; /* K: inputs padded to 16, with zeros in x and W */
    float eps;
    int act_bf16, w_bf16, epilogue;
} linear_args;

static void linear_prologue(void *context, int64_t block) {
    const linear_args *a = context;
    int64_t end = (block + 1) * 16 < a->rows ? (block + 1) * 16 : a->rows;
    for (int64_t r = block * 16; r < end; r++) {
        float *to = a->rows_f32 + r * a->K;
        int64_t whole = a->inputs / VW * VW;
        for (int64_t k = 0; k < whole; k += VW) store_f32(to + k, load_as_f32(a->x, r * a->ldx + k, a->act_bf16));
        for (int64_t k = whole; k < a->K; k++)
            to[k] = k < a->inputs ? load_scalar(a->x, r * a->ldx + k, a->act_bf16) : 0;
        if (!a->norm) continue;
        vf squares = {0};
        for (int64_t k = 0; k < a->K; k += VW) squares = vfma(load_f32(to + k), load_f32(to + k), squares);
        float scale = 1.0f / sqrtf(vsum(squares) / a->inputs + a->eps);
        for (int64_t k = 0; k < a->K; k += VW)
            store_f32(to + k, vkeep(load_f32(to + k) * scale * load_f32(a->norm + k), a->act_bf16));
    }
}

INLINE void linear_tile(int R, const linear_args *a, const float *x, const void *w, int bf16, float *out) {
    const size_t panel = (size_t)a->K * PANEL;
    const size_t item = bf16 ? 2 : 4;
#define AT(p, k) ((const char *)w + ((p)*panel + (k)*PANEL) * item)
#define COVER(R_, P_)                                                                                            \
    for (int p = 0; p < QUAD; p += P_)                                                                           \
        for (int64_t k = 0; k < a->K; k += K_BLOCK)                                                              \
            tile(R_, P_, a->K - k < K_BLOCK ? a->K - k : K_BLOCK, x + k, a->K, AT(p, k), panel, PANEL, bf16,     \
                 out + p * PANEL, QUAD * PANEL, k > 0);                                                          \
    break
    switch (R) {
        case 1: COVER(1, 4);
        case 2: COVER(2, 2);
        case 3: COVER(3, 2);
        case 4: COVER(4, 1);
        case 5: COVER(5, 1);
        default: COVER(6, 1);
    }
#undef COVER
#undef AT
}

static void linear_store(const linear_args *a, int64_t row, int64_t column, const float *acc) {
    const int bf16 = a->act_bf16;
    const int gated = a->epilogue == SILU_GATED; /* panels alternate: gate, up */
    int64_t n = gated ? a->N / 2 : a->N, first = gated ? column / 2 : column;
    float values[QUAD * PANEL];
    for (int i = 0; gated && i < QUAD * PANEL / 2; i += VW) {
        const float *gate = acc + i / PANEL * 2 * PANEL + i % PANEL;
        vf silu = vkeep(vsilu(vkeep(load_f32(gate), bf16)), bf16);
        store_f32(values + i, silu * vkeep(load_f32(gate + PANEL), bf16));
    }
    if (gated) acc = values;
    int64_t width = gated ? QUAD * PANEL / 2 : QUAD * PANEL;
    width = n - first < width ? n - first : width;
    size_t at = row * n + first;
    if (a->epilogue == STORE_F32) {
        memcpy((float *)a->out + at, acc, width * sizeof(float));
        return;
    }
    int residual = a->epilogue == ADD_RESIDUAL;
    int64_t i = 0;
    for (; i + VW <= width; i += VW) {
        vf v = load_f32(acc + i);
        if (residual) v = load_as_f32(a->residual, at + i, bf16) + vkeep(v, bf16);
        store_from_f32(a->out, at + i, v, bf16);
    }
    for (; i < width; i++) {
        float v = acc[i];
        if (residual) v = load_scalar(a->residual, at + i, bf16) + keep(v, bf16);
        store_scalar(a->out, at + i, v, bf16);
    }
}

/* More rows than one pass over the weights takes: 128 rows of a panel (8 KiB, the first cache) serve them all. */
static void linear_block(const linear_args *a, int64_t begin, int64_t end, const void *w, float *acc) {
    float panel[K_BLOCK * PANEL];
    for (int p = 0; p < QUAD; p++)
        for (int64_t k = 0; k < a->K; k += K_BLOCK) {
            int64_t n = a->K - k < K_BLOCK ? a->K - k : K_BLOCK;
            size_t at = ((size_t)p * a->K + k) * PANEL;
            const float *rows = (const float *)w + at;
            if (a->w_bf16) {
                for (int64_t i = 0; i < n * PANEL; i += VW) store_f32(panel + i, load_as_f32(w, at + i, 1));
                rows = panel;
            }
            product(end - begin, n, a->rows_f32 + begin * a->K + k, a->K, rows, PANEL, 0, acc + p * PANEL,
                    QUAD * PANEL, k > 0);
        }
}

static void linear_task(void *context, int64_t task) {
    const linear_args *a = context;
    int64_t quad = task % a->quads, block = task / a->quads;
    int64_t begin = block * ROW_BLOCK, end = begin + ROW_BLOCK < a->rows ? begin + ROW_BLOCK : a->rows;
    const void *w = (const char *)a->w + (size_t)quad * a->K * PANEL * QUAD * (a->w_bf16 ? 2 : 4);
    float acc[ROW_BLOCK * QUAD * PANEL];
    const float *x = a->rows_f32 + begin * a->K;
    if (end - begin > TILE_ROWS) linear_block(a, begin, end, w, acc);
    else if (a->w_bf16) linear_tile((int)(end - begin), a, x, w, 1, acc);
    else linear_tile((int)(end - begin), a, x, w, 0, acc);
    for (int64_t r = begin; r < end; r++) linear_store(a, r, quad * QUAD * PANEL, acc + (r - begin) * QUAD * PANEL);
}

static __thread float *linear_rows;
static __thread size_t linear_rows_capacity;

/* N counts the outputs of W (gate and up together under SILU_GATED). With a norm, `inputs` is a multiple of 16. */
void mstar_linear(const void *x, int64_t rows, int64_t ldx, int64_t inputs, const float *norm, float eps, const void *w,
                  int64_t N, int w_bf16, int act_bf16, int epilogue, const void *residual, void *out) {
    linear_args a = {.x = x, .norm = norm, .w = w, .residual = residual, .out = out, .rows = rows, .ldx = ldx,
                     .inputs = inputs, .K = (inputs + PANEL - 1) / PANEL * PANEL, .N = N, .eps = eps, .act_bf16 = act_bf16, .w_bf16 = w_bf16, .epilogue = epilogue};
    a.quads = (N + QUAD * PANEL - 1) / (QUAD * PANEL);
    a.rows_f32 = scratch(&linear_rows, &linear_rows_capacity, rows * a.K);
    int64_t blocks = (rows + 15) / 16;
    if (blocks == 1) linear_prologue(&a, 0);
    else parallel(linear_prologue, &a, blocks);
    parallel(linear_task, &a, a.quads * ((rows + ROW_BLOCK - 1) / ROW_BLOCK));
}
