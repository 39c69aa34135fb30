/* What this machine reaches at most: fused multiply-adds on full vectors, and a copy that no cache holds. Compiled for
 * the vector width of the target; the yardstick of profile(). */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tvmx_abi.h"

#ifndef TVMX_VECTOR
#define TVMX_VECTOR 16
#endif
#define EXPORT __attribute__((visibility("default")))
#define LANES (TVMX_VECTOR / 4)
#define CHAINS 12 /* enough independent chains to hide the latency of an FMA on two pipes */
#define ROUNDS 20000
#define COPY_BYTES ((size_t)16 << 20)

#if defined(__x86_64__)
#define KEEP(c) "+v"(c)
#else
#define KEEP(c) "+w"(c)
#endif

typedef float vec __attribute__((vector_size(TVMX_VECTOR)));
typedef struct {
  void* sync_handle;
  int32_t num_task;
} group_env;
extern int (*__TVMBackendParallelLaunch)(int (*)(int, group_env*, void*), void*, int);

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int multiply_add(int task, group_env* env, void* data) {
  (void)env;
  const vec a = (vec){0} + 0.999f, b = (vec){0} + 0.001f;
  /* Variables, not an array: an array would be kept in memory. */
  vec c0 = (vec){0} + (float)task, c1 = c0, c2 = c0, c3 = c0, c4 = c0, c5 = c0;
  vec c6 = c0, c7 = c0, c8 = c0, c9 = c0, c10 = c0, c11 = c0;
  for (int round = 0; round < ROUNDS; round++) {
    c0 = c0 * a + b, c1 = c1 * a + b, c2 = c2 * a + b, c3 = c3 * a + b;
    c4 = c4 * a + b, c5 = c5 * a + b, c6 = c6 * a + b, c7 = c7 * a + b;
    c8 = c8 * a + b, c9 = c9 * a + b, c10 = c10 * a + b, c11 = c11 * a + b;
    /* Equal chains would be merged; the compiler must believe that they differ. */
    __asm__ __volatile__("" : KEEP(c0), KEEP(c1), KEEP(c2), KEEP(c3), KEEP(c4), KEEP(c5));
    __asm__ __volatile__("" : KEEP(c6), KEEP(c7), KEEP(c8), KEEP(c9), KEEP(c10), KEEP(c11));
  }
  vec sum = c0 + c1 + c2 + c3 + c4 + c5 + c6 + c7 + c8 + c9 + c10 + c11;
  ((volatile float*)data)[task % 16] = sum[0]; /* keeps the loop alive */
  return 0;
}

static int copy(int task, group_env* env, void* data) {
  char* base = data;
  size_t part = COPY_BYTES / (size_t)env->num_task;
  memcpy(base + COPY_BYTES + part * (size_t)task, base + part * (size_t)task, part);
  return 0;
}

/* FLOP/s in fp32 with all threads of the pool. */
EXPORT double tvmx_peak_flops(tvmx_pool* pool, int threads) {
  float sink[16];
  double best = 1e30;
  tvmx_pool* before = tvmx_pool_enter(pool);
  for (int i = 0; i < 20; i++) {
    double begin = now();
    __TVMBackendParallelLaunch(multiply_add, sink, threads);
    double took = now() - begin;
    if (took < best) best = took;
  }
  tvmx_pool_enter(before);
  return 2.0 * LANES * CHAINS * ROUNDS * threads / best;
}

/* Bytes read plus written a second, out of cache; 0 when there is no memory to try. */
EXPORT double tvmx_peak_bandwidth(tvmx_pool* pool, int threads) {
  char* memory = aligned_alloc(64, 2 * COPY_BYTES);
  if (!memory) return 0;
  memset(memory, 1, 2 * COPY_BYTES);
  double best = 1e30;
  tvmx_pool* before = tvmx_pool_enter(pool);
  for (int i = 0; i < 5; i++) {
    double begin = now();
    __TVMBackendParallelLaunch(copy, memory, threads);
    double took = now() - begin;
    if (took < best) best = took;
  }
  tvmx_pool_enter(before);
  free(memory);
  return 2.0 * (double)COPY_BYTES / best;
}
