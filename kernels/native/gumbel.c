/* The words of Philox4x32-10 that kernels/gumbel.py turns into noise: the same bits as its torch reference. */
#include <stdint.h>

/* The counter's last word, _TOKEN_NOISE in kernels/gumbel.py. */
#define TOKEN_NOISE 0x746F6B6Eu

static inline __attribute__((always_inline)) void philox(uint32_t c[4], uint64_t seed)
{
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)c[0] * 0xD2511F53u;
        uint64_t p1 = (uint64_t)c[2] * 0xCD9E8D57u;
        c[0] = (uint32_t)(p1 >> 32) ^ c[1] ^ k0;
        c[1] = (uint32_t)p1;
        c[2] = (uint32_t)(p0 >> 32) ^ c[3] ^ k1;
        c[3] = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

/* out: [rows, 4 * groups], the words of token ids 0, 1, 2, ... as floats. */
void mstar_gumbel_words(const uint64_t *seeds, const uint64_t *positions, int64_t rows, int64_t groups, float *out)
{
    for (int64_t row = 0; row < rows; row++) {
        uint64_t seed = seeds[row], position = positions[row];
        for (int64_t group = 0; group < groups; group++, out += 4) {
            uint32_t c[4] = {(uint32_t)group, (uint32_t)position, (uint32_t)(position >> 32), TOKEN_NOISE};
            philox(c, seed);
            for (int lane = 0; lane < 4; lane++)
                out[lane] = (float)c[lane];
        }
    }
}

/* ids, out: [rows, n], the words of some token ids. */
void mstar_gumbel_words_at(const uint64_t *seeds, const uint64_t *positions, const int64_t *ids, int64_t rows,
                           int64_t n, float *out)
{
    for (int64_t row = 0; row < rows; row++) {
        uint64_t seed = seeds[row], position = positions[row];
        for (int64_t i = 0; i < n; i++, ids++, out++) {
            uint32_t c[4] = {(uint32_t)(*ids >> 2), (uint32_t)position, (uint32_t)(position >> 32), TOKEN_NOISE};
            philox(c, seed);
            *out = (float)c[*ids & 3];
        }
    }
}
