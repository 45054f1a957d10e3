/* The caller publishes a batch of tasks under a new number; whoever is awake takes tasks by a shared counter.
 *
 * A step has a hundred batches of some ten microseconds, so threads spin between them: a sleeping thread would wake up
 * later than its share takes. Between steps they sleep on a condition. */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* After this many looks a spinning thread lets others have the core. */
#define SPINS_BEFORE_YIELD 2000

struct Pool {
    int num_threads;
    pthread_t *threads;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool awake, stopping;
    Task task;
    void *context;
    /* Batch number in the high half and the next task in the low half: a late thread can never take from a new batch. */
    _Atomic uint64_t next;
    _Atomic uint32_t limit;
    _Atomic int num_done;
};

typedef struct {
    Pool *pool;
    int index;
} Start;

/* Decayed state ends in denormals, which cost a hundred times a normal multiply and carry no information. The flag is
 * the thread's own, and all threads must round alike. */
static void flush_denormals(void) {
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | 0x8040);
#elif defined(__aarch64__)
    uint64_t control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    __asm__ volatile("msr fpcr, %0" : : "r"(control | (1u << 24)));
#endif
}

static void relax(int spins) {
    if (spins > SPINS_BEFORE_YIELD) {
        sched_yield();
        return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Takes tasks of the current batch until none is left; returns how many it ran. */
static int take_tasks(Pool *pool, int thread) {
    int taken = 0;
    for (;;) {
        uint64_t now = atomic_load(&pool->next);
        for (;;) {
            if ((uint32_t)now >= atomic_load(&pool->limit))
                return taken;
            if (atomic_compare_exchange_weak(&pool->next, &now, now + 1))
                break;
        }
        pool->task(pool->context, (int)(uint32_t)now, thread);
        atomic_fetch_add(&pool->num_done, 1);
        taken++;
    }
}

static bool sleep_until_awake(Pool *pool) {
    pthread_mutex_lock(&pool->lock);
    while (!pool->awake && !pool->stopping)
        pthread_cond_wait(&pool->wake, &pool->lock);
    bool stopping = pool->stopping;
    pthread_mutex_unlock(&pool->lock);
    return !stopping;
}

static void *work(void *argument) {
    Start start = *(Start *)argument;
    free(argument);
    flush_denormals();
    while (sleep_until_awake(start.pool)) {
        int spins = 0;
        while (__atomic_load_n(&start.pool->awake, __ATOMIC_ACQUIRE)) {
            if (take_tasks(start.pool, start.index))
                spins = 0;
            else
                relax(spins++);
        }
    }
    return NULL;
}

Pool *pool_new(int num_threads) {
    Pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return NULL;
    pool->num_threads = num_threads;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->threads = calloc((size_t)num_threads, sizeof *pool->threads);
    for (int i = 1; i < num_threads; i++) {
        Start *start = malloc(sizeof *start);
        if (start)
            *start = (Start){pool, i};
        if (!start || !pool->threads || pthread_create(&pool->threads[i], NULL, work, start)) {
            /* Fewer threads give the same numbers, later. */
            free(start);
            pool->num_threads = i;
            break;
        }
    }
    return pool;
}

void pool_free(Pool *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->stopping = true;
    __atomic_store_n(&pool->awake, false, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 1; i < pool->num_threads; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
    free(pool->threads);
    free(pool);
}

int pool_num_threads(const Pool *pool) { return pool->num_threads; }

static void set_awake(Pool *pool, bool awake) {
    if (pool->num_threads == 1)
        return;
    pthread_mutex_lock(&pool->lock);
    __atomic_store_n(&pool->awake, awake, __ATOMIC_RELEASE);
    if (awake)
        pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
}

void pool_wake(Pool *pool) {
    flush_denormals();
    set_awake(pool, true);
}

void pool_rest(Pool *pool) { set_awake(pool, false); }

void pool_run(Pool *pool, Task task, void *context, int num_tasks) {
    if (pool->num_threads == 1 || num_tasks == 1) {
        for (int i = 0; i < num_tasks; i++)
            task(context, i, 0);
        return;
    }
    /* No thread holds a task here: the last batch is done, and its counter stands at its limit. */
    uint64_t batch = (atomic_load(&pool->next) >> 32) + 1;
    atomic_store(&pool->limit, 0);
    pool->task = task;
    pool->context = context;
    atomic_store(&pool->num_done, 0);
    atomic_store(&pool->next, batch << 32);
    atomic_store(&pool->limit, (uint32_t)num_tasks);
    take_tasks(pool, 0);
    for (int spins = 0; atomic_load(&pool->num_done) < num_tasks; spins++)
        relax(spins);
}
