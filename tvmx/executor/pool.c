/* Threads, scratch memory and errors for compiled kernels: what the compiler's runtime library would do, owned by
 * the executor. Kernels reach it through three data symbols that the compiler leaves weak. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "tvmx_abi.h"

#define EXPORT __attribute__((visibility("default")))
#define CACHE_LINE 64
/* A worker spins this long for its next task before it sleeps: about the gap between two parallel kernels. */
#define SPIN_NS 40000
#define MANY_TASKS 1024

typedef struct {
  void* sync_handle;
  int32_t num_task;
} group_env; /* TVMParallelGroupEnv */
typedef int (*parallel_fn)(int task, group_env* env, void* data);

typedef struct {
  char* base;
  size_t capacity, top, wanted;
  int live;
} scratch;

typedef struct {
  tvmx_pool* pool;
  int index;
  pthread_t thread;
  scratch memory;
  _Atomic uint32_t claimed; /* the last round whose lane of this worker somebody has taken */
} __attribute__((aligned(CACHE_LINE))) worker;

struct tvmx_pool {
  int threads;
  worker* workers; /* workers[0] is whoever calls */
  parallel_fn fn;
  void* data;
  int tasks, lanes;
  int backwards; /* see tvmx_pool_backwards */
  cpu_set_t allowed; /* the processors of the thread that made the pool */
  int avoided;       /* the processor that the workers keep off, -1: none yet, -2: they are pinned or have no choice */
  _Alignas(CACHE_LINE) _Atomic uint32_t round; /* a new value is a new launch, or the end */
  _Atomic int stop;
  _Alignas(CACHE_LINE) _Atomic int sleepers;
  _Alignas(CACHE_LINE) _Atomic uint32_t pending; /* lanes of this round that are not finished, the caller's own left out */
  _Atomic int caller_sleeps;
  _Atomic int failed;
};

static __thread tvmx_pool* current_pool;
static __thread scratch* current_scratch;
static __thread int inside_parallel;
static __thread char last_error[512];

static inline void relax_cpu(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

EXPORT int64_t tvmx_ticks(void) {
#if defined(__x86_64__)
  return (int64_t)__builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  int64_t t;
  __asm__ __volatile__("isb; mrs %0, cntvct_el0" : "=r"(t));
  return t;
#else
  return now_ns();
#endif
}

static void futex_wait(_Atomic uint32_t* word, uint32_t seen) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t* word, int count) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

/* Returns once *word differs from `seen`: spins for SPIN_NS, then sleeps; any wake-up starts a new spin. `sleeping`
 * counts sleepers, so that the other side makes a system call only when it must; both sides use sequentially
 * consistent order for that. */
static void wait_change(_Atomic uint32_t* word, uint32_t seen, _Atomic int* sleeping) {
  for (;;) {
    int64_t deadline = 0;
    for (int i = 1;; i++) {
      if (atomic_load_explicit(word, memory_order_acquire) != seen) return;
      relax_cpu();
      if (i % 64 == 0) {
        int64_t t = now_ns();
        if (!deadline) deadline = t + SPIN_NS;
        if (t > deadline) break;
      }
    }
    atomic_fetch_add(sleeping, 1);
    if (atomic_load(word) == seen) futex_wait(word, seen);
    atomic_fetch_sub(sleeping, 1);
  }
}

/* The tasks of one launch are dealt into lanes, a lane a thread: lane i holds the tasks i, i + lanes, ... A worker
 * claims its own lane; the caller claims what no worker has begun, so that a sleeping or preempted worker delays
 * nothing. Only who has claimed a lane of a round may read that round's fn, data and tasks. */
static int claim(worker* lane, uint32_t round) {
  uint32_t seen = atomic_load_explicit(&lane->claimed, memory_order_relaxed);
  /* A worker that slept through rounds holds an old number, which must not win. */
  return (int32_t)(round - seen) > 0 && atomic_compare_exchange_strong(&lane->claimed, &seen, round);
}

static void run_lane(tvmx_pool* pool, int lane) {
  group_env env = {NULL, pool->tasks};
  for (int task = lane; task < pool->tasks; task += pool->lanes)
    if (pool->fn(task, &env, pool->data)) atomic_store_explicit(&pool->failed, 1, memory_order_relaxed);
}

static void* worker_main(void* arg) {
  worker* self = arg;
  tvmx_pool* pool = self->pool;
  current_pool = pool;
  current_scratch = &self->memory;
  inside_parallel = 1;
  uint32_t seen = 0;
  for (;;) {
    wait_change(&pool->round, seen, &pool->sleepers);
    seen = atomic_load_explicit(&pool->round, memory_order_acquire);
    if (atomic_load_explicit(&pool->stop, memory_order_acquire)) return NULL;
    if (!claim(self, seen)) continue;
    run_lane(pool, self->index);
    if (atomic_fetch_sub(&pool->pending, 1) == 1 && atomic_load(&pool->caller_sleeps))
      futex_wake(&pool->pending, 1);
  }
}

static void release(tvmx_pool* pool, int started) {
  atomic_store(&pool->stop, 1);
  atomic_fetch_add(&pool->round, 1);
  futex_wake(&pool->round, pool->threads);
  for (int i = 1; i < started; i++) pthread_join(pool->workers[i].thread, NULL);
  for (int i = 0; i < pool->threads; i++) free(pool->workers[i].memory.base);
  free(pool->workers);
  free(pool);
}

static void pin(pthread_t thread, int cpu) {
  if (cpu < 0 || cpu >= CPU_SETSIZE) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(thread, sizeof set, &set);
}

/* A scheduler that wakes a worker on its waker's processor leaves it waiting there for milliseconds, behind a caller
 * that does not sleep, while another processor is idle. So workers keep off the caller's. */
static void spread(tvmx_pool* pool) {
  int cpu = sched_getcpu();
  if (cpu == pool->avoided || cpu < 0 || cpu >= CPU_SETSIZE) return;
  cpu_set_t others = pool->allowed;
  CPU_CLR(cpu, &others);
  if (CPU_COUNT(&others) == 0) return;
  pool->avoided = cpu;
  for (int i = 1; i < pool->threads; i++) pthread_setaffinity_np(pool->workers[i].thread, sizeof others, &others);
}

EXPORT tvmx_pool* tvmx_pool_new(int threads, const int* cpus) {
#ifdef TVMX_TILES
  /* Of the process: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA. Threads that exist already have it too. */
  if (syscall(SYS_arch_prctl, 0x1023, 18)) {
    snprintf(last_error, sizeof last_error, "the system does not grant AMX tiles: %s", strerror(errno));
    return NULL;
  }
#endif
  if (threads < 1) threads = 1;
  tvmx_pool* pool = aligned_alloc(CACHE_LINE, sizeof(tvmx_pool));
  worker* workers = aligned_alloc(CACHE_LINE, sizeof(worker) * (size_t)threads);
  if (!pool || !workers) {
    free(pool);
    free(workers);
    return NULL;
  }
  memset(pool, 0, sizeof *pool);
  memset(workers, 0, sizeof(worker) * (size_t)threads);
  pool->threads = threads;
  pool->workers = workers;
  pool->avoided = threads == 1 || cpus || sched_getaffinity(0, sizeof pool->allowed, &pool->allowed) ? -2 : -1;
  for (int i = 1; i < threads; i++) {
    workers[i].pool = pool;
    workers[i].index = i;
    if (pthread_create(&workers[i].thread, NULL, worker_main, &workers[i])) {
      release(pool, i);
      return NULL;
    }
    if (cpus) pin(workers[i].thread, cpus[i]);
  }
  return pool;
}

EXPORT void tvmx_pool_free(tvmx_pool* pool) {
  if (pool) release(pool, pool->threads);
}

EXPORT tvmx_pool* tvmx_pool_enter(tvmx_pool* pool) {
  tvmx_pool* before = current_pool;
  current_pool = pool;
  current_scratch = pool ? &pool->workers[0].memory : NULL;
  return before;
}

/* From now on the tasks of each launch, cut as small as can be, run on the caller alone, the last one first. Tasks that
 * write into each other's part give other outputs than forwards, every time and not only when threads collide. */
EXPORT void tvmx_pool_backwards(tvmx_pool* pool) { pool->backwards = 1; }

/* Sleepers take microseconds to wake: called before the first kernel, so that the first parallel one finds them
 * spinning, on processors of their own. */
void tvmx_pool_rouse(tvmx_pool* pool) {
  if (!pool) return;
  if (pool->avoided != -2) spread(pool);
  if (atomic_load_explicit(&pool->sleepers, memory_order_relaxed))
    futex_wake(&pool->round, pool->threads);
}

EXPORT int64_t tvmx_pool_scratch(const tvmx_pool* pool) {
  int64_t total = 0;
  for (int i = 0; i < pool->threads; i++) total += (int64_t)pool->workers[i].memory.capacity;
  return total;
}

static int launch(parallel_fn fn, void* data, int tasks) {
  tvmx_pool* pool = current_pool;
  int threads = pool ? pool->threads : 1;
  if (pool && pool->backwards) {
    group_env env = {NULL, tasks > 0 ? tasks : MANY_TASKS};
    for (int task = env.num_task - 1; task >= 0; task--)
      if (fn(task, &env, data)) return -1;
    return 0;
  }
  if (tasks <= 0) tasks = threads;
  if (threads == 1 || tasks == 1 || inside_parallel) {
    group_env env = {NULL, tasks};
    for (int task = 0; task < tasks; task++)
      if (fn(task, &env, data)) return -1;
    return 0;
  }
  int lanes = tasks < threads ? tasks : threads;
  pool->fn = fn;
  pool->data = data;
  pool->tasks = tasks;
  pool->lanes = lanes;
  atomic_store_explicit(&pool->pending, (uint32_t)lanes - 1, memory_order_relaxed);
  uint32_t round = atomic_load_explicit(&pool->round, memory_order_relaxed) + 1;
  /* Lanes that this launch does not use are taken, so that their workers do not read it. */
  for (int i = lanes; i < threads; i++) atomic_store_explicit(&pool->workers[i].claimed, round, memory_order_relaxed);
  atomic_store(&pool->round, round);
  if (atomic_load(&pool->sleepers)) futex_wake(&pool->round, threads);
  inside_parallel = 1;
  run_lane(pool, 0);
  for (int i = 1; i < lanes; i++) {
    if (!claim(&pool->workers[i], round)) continue;
    run_lane(pool, i);
    atomic_fetch_sub_explicit(&pool->pending, 1, memory_order_relaxed);
  }
  inside_parallel = 0;
  uint32_t left;
  while ((left = atomic_load_explicit(&pool->pending, memory_order_acquire)) != 0)
    wait_change(&pool->pending, left, &pool->caller_sleeps);
  return atomic_exchange_explicit(&pool->failed, 0, memory_order_relaxed) ? -1 : 0;
}

/* Scratch memory is a stack a thread: kernels free in the reverse order of allocation. What does not fit is
 * taken from malloc this once, and the stack grows as soon as it is empty. */
static void* scratch_alloc(int device_type, int device_id, uint64_t bytes, int code, int bits) {
  (void)device_type, (void)device_id, (void)code, (void)bits;
  scratch* s = current_scratch;
  size_t need = ((size_t)bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
  if (need == 0) need = CACHE_LINE;
  if (!s) return aligned_alloc(CACHE_LINE, need);
  if (s->live == 0 && s->wanted > s->capacity) {
    free(s->base);
    s->base = aligned_alloc(CACHE_LINE, s->wanted);
    s->capacity = s->base ? s->wanted : 0;
  }
  s->live++;
  s->top += need;
  if (s->top > s->wanted) s->wanted = s->top;
  if (s->top <= s->capacity) return s->base + s->top - need;
  void* extra = aligned_alloc(CACHE_LINE, need);
  if (!extra) s->live--, s->top -= need;
  return extra;
}

static int scratch_free(int device_type, int device_id, void* memory) {
  (void)device_type, (void)device_id;
  scratch* s = current_scratch;
  if (!s) {
    free(memory);
    return 0;
  }
  int ours = s->base && (char*)memory >= s->base && (char*)memory < s->base + s->capacity;
  if (!ours) free(memory);
  if (--s->live == 0)
    s->top = 0;
  else if (ours)
    s->top = (size_t)((char*)memory - s->base);
  return 0;
}

int (*__TVMBackendParallelLaunch)(parallel_fn, void*, int) = launch;
void* (*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = scratch_alloc;
int (*__TVMBackendFreeWorkspace)(int, int, void*) = scratch_free;

#ifndef TVMX_FOR_VM
/* Kernels with assertions report through this function of the compiler's ffi library. */
void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, int32_t count) {
  size_t used = (size_t)snprintf(last_error, sizeof last_error, "%s: ", kind);
  for (int32_t i = 0; i < count && used < sizeof last_error; i++)
    if (parts[i]) used += (size_t)snprintf(last_error + used, sizeof last_error - used, "%s", parts[i]);
}

void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* text) {
  TVMFFIErrorSetRaisedFromCStrParts(kind, &text, 1);
}
#endif

EXPORT const char* tvmx_last_error(void) { return last_error; }
