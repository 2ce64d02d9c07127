/* Vectors of float32 in the widest registers that the compiler targets, and the conversions to bf16.
 *
 * Sums of products run over k in order within one lane, by `vfma`. Where it is left to the compiler to fuse a
 * product and a sum, it may do so in one copy of an inlined loop and not in another (GCC avoids chains of fused
 * operations for some processors), and a row's bits would depend on how many rows are computed with it. */
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__FMA__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VW 16
#else
#define VW 8
#endif
#define PANEL 16         /* outputs that lie side by side in packed weights, keys of a KV block */
#define NV (PANEL / VW)  /* vectors a panel */
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(VW * 4)));
typedef float vf_any __attribute__((vector_size(VW * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint16_t vh __attribute__((vector_size(VW * 2)));
typedef uint16_t vh_any __attribute__((vector_size(VW * 2), aligned(2), may_alias));

/* a * b + c, fused on every processor that can; elsewhere two roundings, everywhere alike. */
INLINE vf vfma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_FEATURE_FMA)
    for (int i = 0; i < VW; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}
/* x in every lane: a difference, because x - 0 is x to the compiler, and 0 + x is not (x may be -0). */
INLINE vf vall(float x) { return x - (vf){0}; }

INLINE vf load_f32(const float *p) { return *(const vf_any *)p; }
INLINE void store_f32(float *p, vf v) { *(vf_any *)p = v; }

/* VW elements from `index` of an array of float32, or of bf16 kept as uint16. */
INLINE vf load_as_f32(const void *base, size_t index, int bf16) {
    if (bf16) {
        vh_any h = *(const vh_any *)((const uint16_t *)base + index);
        return (vf)(__builtin_convertvector(h, vu) << 16);
    }
    return load_f32((const float *)base + index);
}

INLINE float bf16_to_f32(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Round to nearest even; a NaN stays one. */
INLINE uint16_t f32_to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (f != f) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float round_bf16(float f) { return bf16_to_f32(f32_to_bf16(f)); }

INLINE float load_scalar(const void *base, size_t index, int bf16) {
    return bf16 ? bf16_to_f32(((const uint16_t *)base)[index]) : ((const float *)base)[index];
}

INLINE void store_scalar(void *base, size_t index, float value, int bf16) {
    if (bf16) ((uint16_t *)base)[index] = f32_to_bf16(value);
    else ((float *)base)[index] = value;
}

INLINE vu bf16_bits(vf v) {
    vu bits = (vu)v;
    vu nan = (vu)(v != v);
    return (((bits + 0x7fff + ((bits >> 16) & 1)) & ~nan) | ((bits | 0x400000) & nan)) >> 16;
}

/* VW elements to `index` of an array of float32 or bf16, rounded to nearest even. */
INLINE void store_from_f32(void *base, size_t index, vf v, int bf16) {
    if (bf16) *(vh_any *)((uint16_t *)base + index) = __builtin_convertvector(bf16_bits(v), vh);
    else store_f32((float *)base + index, v);
}

/* What the value is once it has been kept in the model's dtype. */
INLINE float keep(float value, int bf16) { return bf16 ? round_bf16(value) : value; }
INLINE vf vkeep(vf v, int bf16) { return bf16 ? (vf)(bf16_bits(v) << 16) : v; }

INLINE float vsum(vf v) {
    float sum = 0;
    for (int i = 0; i < VW; i++) sum += v[i];
    return sum;
}

/* exp to about 2 ulp (range reduction by ln 2 in two parts, Cephes' polynomial); 0 below -87. */
INLINE vf vexp(vf x) {
    const vf zero = {0};
    vi small = x < -87.0f;
    x = (vf)((vi)x & ~small) + (vf)((vi)(zero - 87.0f) & small);
    vi large = x > 88.0f;
    x = (vf)((vi)x & ~large) + (vf)((vi)(zero + 88.0f) & large);
    vf n = vfma(x, vall(1.44269504088896341f), vall(12582912.0f)) - 12582912.0f;
    vf r = vfma(n, vall(-0.693359375f), x);
    r = vfma(n, vall(2.12194440e-4f), r);
    vf p = vfma(vall(1.9875691500e-4f), r, vall(1.3981999507e-3f));
    p = vfma(p, r, vall(8.3334519073e-3f));
    p = vfma(p, r, vall(4.1665795894e-2f));
    p = vfma(p, r, vall(1.6666665459e-1f));
    p = vfma(p, r, vall(5.0000001201e-1f));
    p = vfma(p, r * r, r) + 1.0f;
    vi scale = (__builtin_convertvector(n, vi) + 127) << 23;
    return (vf)((vi)(p * (vf)scale) & ~small);
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
INLINE vf vsigmoid(vf x) { return 1.0f / (1.0f + vexp(-x)); }
INLINE vf vsilu(vf x) { return x / (1.0f + vexp(-x)); }

/* out[r][c] (+)= sum over k of x[r][k] * w[p][k][c]: R rows by P panels of 16 columns, R and P constants.
 * The panels' rows are `row_stride` apart, the panels `panel_stride` (elements). */
INLINE void tile(const int R, const int P, int64_t K, const float *x, size_t ldx, const void *w,
                 size_t panel_stride, size_t row_stride, const int bf16, float *out, size_t ldo,
                 const int accumulate) {
    vf acc[6][8];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < P * NV; c++) acc[r][c] = (vf){0};
    for (int64_t k = 0; k < K; k++) {
        vf wv[8];
#pragma GCC unroll 8
        for (int c = 0; c < P * NV; c++)
            wv[c] = load_as_f32(w, (size_t)(c / NV) * panel_stride + k * row_stride + (c % NV) * VW, bf16);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            vf xv = vall(x[r * ldx + k]);
#pragma GCC unroll 8
            for (int c = 0; c < P * NV; c++) acc[r][c] = vfma(xv, wv[c], acc[r][c]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < P * NV; c++) {
            float *to = out + r * ldo + c * VW;
            store_f32(to, accumulate ? load_f32(to) + acc[r][c] : acc[r][c]);
        }
}

#define TILE_ROWS 6 /* 6 rows of 2 vectors: 12 of AVX2's 16 registers accumulate */

INLINE void tile_rows(int R, int64_t K, const float *x, size_t ldx, const void *w, size_t stride, const int bf16,
                      float *out, size_t ldo, int accumulate) {
    switch (R) {
        case 1: tile(1, 1, K, x, ldx, w, 0, stride, bf16, out, ldo, accumulate); break;
        case 2: tile(2, 1, K, x, ldx, w, 0, stride, bf16, out, ldo, accumulate); break;
        case 3: tile(3, 1, K, x, ldx, w, 0, stride, bf16, out, ldo, accumulate); break;
        case 4: tile(4, 1, K, x, ldx, w, 0, stride, bf16, out, ldo, accumulate); break;
        case 5: tile(5, 1, K, x, ldx, w, 0, stride, bf16, out, ldo, accumulate); break;
        default: tile(6, 1, K, x, ldx, w, 0, stride, bf16, out, ldo, accumulate);
    }
}

/* out[M][16] (+)= x[M][K] times 16 columns of w, in runs of rows that fit the registers. */
static void product(int64_t M, int64_t K, const float *x, size_t ldx, const void *w, size_t stride, int bf16,
                    float *out, size_t ldo, int accumulate) {
    for (int64_t m = 0; m < M; m += TILE_ROWS) {
        int R = M - m < TILE_ROWS ? (int)(M - m) : TILE_ROWS;
        if (bf16) tile_rows(R, K, x + m * ldx, ldx, w, stride, 1, out + m * ldo, ldo, accumulate);
        else tile_rows(R, K, x + m * ldx, ldx, w, stride, 0, out + m * ldo, ldo, accumulate);
    }
}
