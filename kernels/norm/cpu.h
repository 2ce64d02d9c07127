/* Root-mean-square norm of rows, with the sums of the one that linears run over their input. */
#pragma once
#include "../native/pool.h"
#include "../native/vec.h"

#define NORM_TASK 16 /* rows a task */

typedef struct {
    const void *x; /* [rows][ldx], model dtype */
    void *out;     /* [rows][dim], model dtype */
    const float *weight; /* [dim], the zero-centred weight plus one */
    int64_t rows, ldx, dim;
    float eps;
    int bf16;
} norm_args;

static void norm_task(void *context, int64_t task) {
    const norm_args *a = context;
    int64_t end = (task + 1) * NORM_TASK < a->rows ? (task + 1) * NORM_TASK : a->rows;
    for (int64_t r = task * NORM_TASK; r < end; r++) {
        vf squares = {0};
        for (int64_t k = 0; k < a->dim; k += VW) {
            vf v = load_as_f32(a->x, r * a->ldx + k, a->bf16);
            squares = vfma(v, v, squares);
        }
        float scale = 1.0f / sqrtf(vsum(squares) / a->dim + a->eps);
        for (int64_t k = 0; k < a->dim; k += VW)
            store_from_f32(a->out, r * a->dim + k,
                           load_as_f32(a->x, r * a->ldx + k, a->bf16) * scale * load_f32(a->weight + k), a->bf16);
    }
}

/* dim is a multiple of 16. */
void mstar_rms_norm(const void *x, int64_t rows, int64_t ldx, int64_t dim, const float *weight, float eps, int bf16,
                    void *out) {
    norm_args a = {.x = x, .out = out, .weight = weight, .rows = rows, .ldx = ldx, .dim = dim, .eps = eps,
                   .bf16 = bf16};
    parallel(norm_task, &a, (rows + NORM_TASK - 1) / NORM_TASK);
}
