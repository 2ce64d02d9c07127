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
    int64_t rows, ldx, K, N, quads;
    float eps;
    int act_bf16, w_bf16, epilogue;
} linear_args;

static void linear_prologue(void *context, int64_t block) {
    const linear_args *a = context;
    int64_t end = (block + 1) * 16 < a->rows ? (block + 1) * 16 : a->rows;
    for (int64_t r = block * 16; r < end; r++) {
        float *to = a->rows_f32 + r * a->K;
        for (int64_t k = 0; k < a->K; k++) to[k] = load_scalar(a->x, r * a->ldx + k, a->act_bf16);
        if (!a->norm) continue;
        vf squares = {0};
        for (int64_t k = 0; k < a->K; k += VW) squares += load_f32(to + k) * load_f32(to + k);
        float sum = 0;
        for (int i = 0; i < VW; i++) sum += squares[i];
        float scale = 1.0f / sqrtf(sum / a->K + a->eps);
        for (int64_t k = 0; k < a->K; k++) to[k] = keep(to[k] * scale * a->norm[k], a->act_bf16);
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
    int bf16 = a->act_bf16;
    if (a->epilogue == SILU_GATED) { /* panels alternate: gate, up */
        int64_t I = a->N / 2;
        for (int pair = 0; pair < QUAD / 2; pair++) {
            int64_t first = column / 2 + pair * PANEL;
            float gate[PANEL];
            for (int i = 0; i < PANEL; i++) gate[i] = keep(acc[pair * 2 * PANEL + i], bf16);
            for (int i = 0; i < PANEL; i += VW) store_f32(gate + i, vsilu(load_f32(gate + i)));
            for (int i = 0; i < PANEL && first + i < I; i++) {
                float up = keep(acc[(pair * 2 + 1) * PANEL + i], bf16);
                store_scalar(a->out, row * I + first + i, keep(gate[i], bf16) * up, bf16);
            }
        }
        return;
    }
    int64_t width = a->N - column < QUAD * PANEL ? a->N - column : QUAD * PANEL;
    size_t at = row * a->N + column;
    if (a->epilogue == STORE_F32) {
        memcpy((float *)a->out + at, acc, width * sizeof(float));
    } else if (a->epilogue == ADD_RESIDUAL) {
        for (int64_t i = 0; i < width; i++)
            store_scalar(a->out, at + i, load_scalar(a->residual, at + i, bf16) + keep(acc[i], bf16), bf16);
    } else {
        for (int64_t i = 0; i < width; i++) store_scalar(a->out, at + i, acc[i], bf16);
    }
}

static __thread float *linear_panels;
static __thread size_t linear_panels_capacity;

static void linear_task(void *context, int64_t task) {
    const linear_args *a = context;
    int64_t quad = task % a->quads, block = task / a->quads;
    int64_t begin = block * ROW_BLOCK, end = begin + ROW_BLOCK < a->rows ? begin + ROW_BLOCK : a->rows;
    size_t panels = (size_t)a->K * PANEL * QUAD;
    const void *w = (const char *)a->w + quad * panels * (a->w_bf16 ? 2 : 4);
    int bf16 = a->w_bf16;
    if (bf16 && end - begin > TILE_ROWS) { /* more than one pass over the weights: convert them once */
        float *f32 = scratch(&linear_panels, &linear_panels_capacity, panels);
        for (size_t i = 0; i < panels; i += VW) store_f32(f32 + i, load_as_f32(w, i, 1));
        w = f32;
        bf16 = 0;
    }
    float acc[TILE_ROWS * QUAD * PANEL];
    for (int64_t r = begin; r < end; r += TILE_ROWS) {
        int R = end - r < TILE_ROWS ? (int)(end - r) : TILE_ROWS;
        if (bf16) linear_tile(R, a, a->rows_f32 + r * a->K, w, 1, acc);
        else linear_tile(R, a, a->rows_f32 + r * a->K, w, 0, acc);
        for (int i = 0; i < R; i++) linear_store(a, r + i, quad * QUAD * PANEL, acc + i * QUAD * PANEL);
    }
}

static float *linear_rows;
static size_t linear_rows_capacity;

/* N counts the outputs of W (gate and up together under SILU_GATED); K is a multiple of 16. */
void mstar_linear(const void *x, int64_t rows, int64_t ldx, int64_t K, const float *norm, float eps, const void *w,
                  int64_t N, int w_bf16, int act_bf16, int epilogue, const void *residual, void *out) {
    linear_args a = {.x = x, .norm = norm, .w = w, .residual = residual, .out = out, .rows = rows, .ldx = ldx,
                     .K = K, .N = N, .eps = eps, .act_bf16 = act_bf16, .w_bf16 = w_bf16, .epilogue = epilogue};
    a.quads = (N + QUAD * PANEL - 1) / (QUAD * PANEL);
    a.rows_f32 = scratch(&linear_rows, &linear_rows_capacity, rows * K);
    int64_t blocks = (rows + 15) / 16;
    if (blocks == 1) linear_prologue(&a, 0);
    else parallel(linear_prologue, &a, blocks);
    parallel(linear_task, &a, a.quads * ((rows + ROW_BLOCK - 1) / ROW_BLOCK));
}
