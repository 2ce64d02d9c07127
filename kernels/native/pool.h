/* A small pool of threads for loops of independent tasks.
 *
 * Tasks are taken one by one from a counter, so a worker that the system has put aside (two ranks, a daemon
 * and a client share two cores) costs only the task in its hands. Workers spin briefly, yield, then sleep:
 * steps follow each other within microseconds while decoding, and an idle rank must cost nothing.
 */
#pragma once
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#define MAX_THREADS 256
#define SPIN_PAUSES 400
#define YIELD_NS 60000 /* past a decode step's gap between two operations, well under an idle period */

typedef void (*task_fn)(void *context, int64_t task);

static struct {
    int threads; /* the caller's included */
    int started;
    task_fn fn;
    void *context;
    int64_t count;
    _Atomic int64_t next;
    _Atomic int busy;          /* workers inside the present loop */
    _Atomic uint32_t round;    /* moves when a loop begins */
    _Atomic int open;          /* workers may still enter the present loop */
    _Atomic int sleepers;
    _Atomic int taken;         /* a caller has the pool; another one runs its loop alone */
    pthread_mutex_t lock;
    pthread_cond_t wake;
} pool = {.threads = 1, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static inline void cpu_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void run_tasks(void) {
    for (;;) {
        int64_t task = atomic_fetch_add_explicit(&pool.next, 1, memory_order_relaxed);
        if (task >= pool.count) return;
        pool.fn(pool.context, task);
    }
}

static uint32_t wait_round(uint32_t seen) {
    uint32_t round;
    for (int i = 0; i < SPIN_PAUSES; i++) {
        if ((round = atomic_load(&pool.round)) != seen) return round;
        cpu_pause();
    }
    for (int64_t end = now_ns() + YIELD_NS; now_ns() < end;) {
        if ((round = atomic_load(&pool.round)) != seen) return round;
        sched_yield();
    }
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.sleepers, 1);
    while ((round = atomic_load(&pool.round)) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
    atomic_fetch_sub(&pool.sleepers, 1);
    pthread_mutex_unlock(&pool.lock);
    return round;
}

static void *worker(void *index) {
    uint32_t seen = 0;
    for (;;) {
        seen = wait_round(seen);
        /* enter first, then look whether the loop is still open: the caller closes it, then waits for busy */
        atomic_fetch_add(&pool.busy, 1);
        if (atomic_load(&pool.open) && (int)(intptr_t)index < pool.threads) run_tasks();
        atomic_fetch_sub(&pool.busy, 1);
    }
    return NULL;
}

void mstar_set_threads(int threads) {
    if (threads < 1) threads = 1;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    for (; pool.started < threads - 1; pool.started++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, (void *)(intptr_t)(pool.started + 1))) break;
        pthread_detach(thread);
    }
    pool.threads = pool.started + 1 < threads ? pool.started + 1 : threads;
}

/* Runs fn(context, 0 .. count-1) on all threads and returns when every task is done. */
static void parallel(task_fn fn, void *context, int64_t count) {
    if (pool.threads == 1 || count < 2 || atomic_exchange(&pool.taken, 1)) {
        for (int64_t i = 0; i < count; i++) fn(context, i);
        return;
    }
    pool.fn = fn;
    pool.context = context;
    pool.count = count;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.open, 1);
    atomic_fetch_add(&pool.round, 1);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    run_tasks();
    atomic_store(&pool.open, 0);
    for (int spins = 0; atomic_load(&pool.busy);) {
        if (++spins < SPIN_PAUSES) cpu_pause();
        else sched_yield();
    }
    atomic_store(&pool.taken, 0);
}

/* Grow-only scratch, one a thread and purpose. */
static float *scratch(float **buffer, size_t *capacity, size_t floats) {
    if (*capacity < floats) {
        free(*buffer);
        *capacity = floats + floats / 4;
        *buffer = aligned_alloc(64, (*capacity * sizeof(float) + 63) / 64 * 64);
        if (!*buffer) abort();
    }
    return *buffer;
}
