/* Collectives of the CPU ranks of one machine, over one anonymous shared mapping. C11 atomics, nothing else.
 *
 * Region: a header with one cache line a rank, then two banks (by the parity of the call's number) of one slot a
 * rank. A call: write my slot, publish my number, wait until every rank has published it, read the slots.
 * Two banks make one barrier a call enough: whoever writes a bank again has seen every rank publish the call in
 * between, and a rank publishes that one only after it has read the bank.
 *
 * Sums are taken in rank order in float32 and rounded once, on every rank alike: the same bits everywhere.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define MAX_RANKS 64
#define LINE 64
#define HEADER (LINE * (MAX_RANKS + 1))
/* Larger tensors go in pieces of this: a piece of every rank stays in the last-level cache. */
#define PIECE_BYTES (1 << 20)

/* 2000 pauses are about 40 us: longer than ranks of one step are apart when each has a core. With more ranks
 * than cores the one waited for may need this very core: hardly any. Then the core is offered to whoever shares
 * it, and after about a millisecond of that the wait costs nothing. */
#define SPINS 2000
#define SPINS_SHARED 20
#define YIELDS 2000
#define SLEEP_NS 50000

typedef struct {
    unsigned char *base;
    uint64_t slot_bytes;
    uint64_t call; /* of this rank; equal on all ranks between calls */
    double timeout_s;
    int32_t rank, size, spins;
    int32_t late; /* after a timeout: the first rank that had not come */
} shm_group;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline _Atomic uint64_t *flag_of(const shm_group *g, int rank) {
    return (_Atomic uint64_t *)(g->base + (size_t)LINE * rank);
}

static inline unsigned char *slot_of(const shm_group *g, int rank) {
    uint64_t bank = g->call & 1;
    return g->base + HEADER + (bank * (uint64_t)g->size + (uint64_t)rank) * g->slot_bytes;
}

/* 0 when `rank` has published this call, -1 after timeout_s. */
static int wait_for(shm_group *g, int rank) {
    _Atomic uint64_t *flag = flag_of(g, rank);
    for (int i = 0; i < g->spins; i++) {
        if (atomic_load_explicit(flag, memory_order_acquire) >= g->call) return 0;
        relax();
    }
    double deadline = now_s() + g->timeout_s;
    for (long i = 0;; i++) {
        if (atomic_load_explicit(flag, memory_order_acquire) >= g->call) return 0;
        if (i < YIELDS) {
            sched_yield();
        } else {
            struct timespec pause = {0, SLEEP_NS};
            nanosleep(&pause, NULL);
        }
        if ((i & 15) == 0 && now_s() > deadline) {
            g->late = rank;
            return -1;
        }
    }
}

static int publish_and_wait(shm_group *g) {
    atomic_store_explicit(flag_of(g, g->rank), g->call, memory_order_release);
    for (int r = 0; r < g->size; r++)
        if (r != g->rank && wait_for(g, r)) return -1;
    return 0;
}

/* Bytes of a group struct, for the caller who allocates it. */
int64_t shm_group_bytes(void) { return (int64_t)sizeof(shm_group); }

/* cores: that the ranks share. -1 when the region is too small or the mesh too large. */
int shm_group_init(
    shm_group *g, void *base, int64_t region_bytes, int rank, int size, int cores, double timeout_s
) {
    if (size < 1 || size > MAX_RANKS || region_bytes <= HEADER) return -1;
    uint64_t slot = ((uint64_t)(region_bytes - HEADER) / (2 * (uint64_t)size)) & ~(uint64_t)4095;
    if (slot < 4096) return -1;
    g->base = base;
    g->slot_bytes = slot < PIECE_BYTES ? slot : PIECE_BYTES;
    g->call = 0;
    g->timeout_s = timeout_s;
    g->rank = rank;
    g->size = size;
    g->spins = size > cores ? SPINS_SHARED : SPINS;
    g->late = -1;
    return 0;
}

int shm_late_rank(const shm_group *g) { return g->late; }

int shm_barrier(shm_group *g) {
    g->call++;
    return publish_and_wait(g);
}

int shm_all_reduce_f32(shm_group *g, float *x, int64_t count) {
    int64_t piece = (int64_t)(g->slot_bytes / sizeof(float));
    for (int64_t done = 0; done < count; done += piece) {
        int64_t n = count - done < piece ? count - done : piece;
        float *out = x + done;
        g->call++;
        memcpy(slot_of(g, g->rank), out, (size_t)n * sizeof(float));
        if (publish_and_wait(g)) return -1;
        const float *a = (const float *)slot_of(g, 0), *b = (const float *)slot_of(g, 1);
        for (int64_t i = 0; i < n; i++) out[i] = a[i] + b[i];
        for (int r = 2; r < g->size; r++) {
            const float *c = (const float *)slot_of(g, r);
            for (int64_t i = 0; i < n; i++) out[i] += c[i];
        }
    }
    return 0;
}

enum { STRIP = 256 };

static inline float widen(uint16_t h) {
    union { uint32_t bits; float value; } u = {(uint32_t)h << 16};
    return u.value;
}

/* To nearest, ties to even; a NaN stays one. Bits only, so that the loop becomes vector code. */
static inline uint16_t narrow(float f) {
    union { float value; uint32_t bits; } u = {f};
    uint32_t rounded = (u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16;
    uint32_t nan = (u.bits >> 16) | 0x40;
    return (uint16_t)((u.bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

static void widen_sum(float *restrict sum, const uint16_t *restrict a, const uint16_t *restrict b, int64_t n) {
    for (int64_t i = 0; i < n; i++) sum[i] = widen(a[i]) + widen(b[i]);
}

static void widen_add(float *restrict sum, const uint16_t *restrict a, int64_t n) {
    for (int64_t i = 0; i < n; i++) sum[i] += widen(a[i]);
}

static void narrow_all(uint16_t *restrict out, const float *restrict sum, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = narrow(sum[i]);
}

int shm_all_reduce_bf16(shm_group *g, uint16_t *x, int64_t count) {
    int64_t piece = (int64_t)(g->slot_bytes / sizeof(uint16_t));
    for (int64_t done = 0; done < count; done += piece) {
        int64_t n = count - done < piece ? count - done : piece;
        uint16_t *out = x + done;
        const uint16_t *in[MAX_RANKS];
        g->call++;
        memcpy(slot_of(g, g->rank), out, (size_t)n * sizeof(uint16_t));
        if (publish_and_wait(g)) return -1;
        for (int r = 0; r < g->size; r++) in[r] = (const uint16_t *)slot_of(g, r);
        /* a strip's sums stay in the first-level cache */
        for (int64_t s = 0; s < n; s += STRIP) {
            int64_t m = n - s < STRIP ? n - s : STRIP;
            float sum[STRIP];
            widen_sum(sum, in[0] + s, in[1] + s, m);
            for (int r = 2; r < g->size; r++) widen_add(sum, in[r] + s, m);
            narrow_all(out + s, sum, m);
        }
    }
    return 0;
}

/* out: size * bytes, rank r's x at out + r * bytes. */
int shm_all_gather(shm_group *g, const unsigned char *x, unsigned char *out, int64_t bytes) {
    int64_t piece = (int64_t)g->slot_bytes;
    for (int64_t done = 0; done < bytes; done += piece) {
        int64_t n = bytes - done < piece ? bytes - done : piece;
        g->call++;
        memcpy(slot_of(g, g->rank), x + done, (size_t)n);
        if (publish_and_wait(g)) return -1;
        for (int r = 0; r < g->size; r++) memcpy(out + r * bytes + done, slot_of(g, r), (size_t)n);
    }
    return 0;
}

int shm_broadcast(shm_group *g, unsigned char *x, int64_t bytes, int root) {
    int64_t piece = (int64_t)g->slot_bytes;
    for (int64_t done = 0; done < bytes; done += piece) {
        int64_t n = bytes - done < piece ? bytes - done : piece;
        g->call++;
        if (g->rank == root) memcpy(slot_of(g, root), x + done, (size_t)n);
        if (publish_and_wait(g)) return -1;
        if (g->rank != root) memcpy(x + done, slot_of(g, root), (size_t)n);
    }
    return 0;
}
