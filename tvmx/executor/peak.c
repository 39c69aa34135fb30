/* What this machine reaches at most: fused multiply-adds on full vectors, steps of the target's dot units, and a copy that
 * no cache holds. Compiled for the vector width of the target; the yardstick of profile(). TVMX_INT8_STEP and
 * TVMX_BF16_STEP are the units' instructions: %0 the sums, %1 scratch, %2 an operand. */
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
#define READ(c) "v"(c)
#else
#define KEEP(c) "+w"(c)
#define READ(c) "w"(c)
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

/* Twelve chains of `step`. Variables, not an array: an array would be kept in memory. The chains go through an asm that
 * the compiler cannot look into, since it would merge equal ones. */
#define DEFINE_CHAINS(name, step)                                                         \
  static int name(int task, group_env* env, void* data) {                                 \
    (void)env;                                                                            \
    const vec a = (vec){0} + 0.999f, b = (vec){0} + 0.001f;                               \
    vec c0 = (vec){0} + (float)task, c1 = c0, c2 = c0, c3 = c0, c4 = c0, c5 = c0;         \
    vec c6 = c0, c7 = c0, c8 = c0, c9 = c0, c10 = c0, c11 = c0;                           \
    for (int round = 0; round < ROUNDS; round++) {                                        \
      step(c0), step(c1), step(c2), step(c3), step(c4), step(c5);                         \
      step(c6), step(c7), step(c8), step(c9), step(c10), step(c11);                       \
    }                                                                                     \
    vec sum = b + c0 + c1 + c2 + c3 + c4 + c5 + c6 + c7 + c8 + c9 + c10 + c11;            \
    ((volatile float*)data)[task % 16] = sum[0]; /* keeps the loop alive */               \
    return 0;                                                                             \
  }
#define FMA(c) ({ c = c * a + b; __asm__ __volatile__("" : KEEP(c)); })
DEFINE_CHAINS(multiply_add, FMA)
#define UNIT(c, instructions) ({ vec t = b; __asm__ __volatile__(instructions : KEEP(c), KEEP(t) : READ(a)); })
#ifdef TVMX_INT8_STEP
#define INT8(c) UNIT(c, TVMX_INT8_STEP)
DEFINE_CHAINS(int8_products, INT8)
#endif
#ifdef TVMX_BF16_STEP
#define BF16(c) UNIT(c, TVMX_BF16_STEP)
DEFINE_CHAINS(bf16_products, BF16)
#endif

static int copy(int task, group_env* env, void* data) {
  char* base = data;
  size_t part = COPY_BYTES / (size_t)env->num_task;
  memcpy(base + COPY_BYTES + part * (size_t)task, base + part * (size_t)task, part);
  return 0;
}

static double rate(int (*chains)(int, group_env*, void*), double each, tvmx_pool* pool, int threads) {
  float sink[16];
  double best = 1e30;
  tvmx_pool* before = tvmx_pool_enter(pool);
  for (int i = 0; i < 20; i++) {
    double begin = now();
    __TVMBackendParallelLaunch(chains, sink, threads);
    double took = now() - begin;
    if (took < best) best = took;
  }
  tvmx_pool_enter(before);
  return each * CHAINS * ROUNDS * threads / best;
}

/* Operations a second (a multiplication and an addition are two) with all threads of the pool: `rates` becomes those of
 * float32, of int8 and of bfloat16 products; 0 where the target has no unit for them. */
EXPORT void tvmx_peak_rates(tvmx_pool* pool, int threads, double* rates) {
  rates[0] = rate(multiply_add, 2.0 * LANES, pool, threads);
  rates[1] = rates[2] = 0;
#ifdef TVMX_INT8_STEP
  rates[1] = rate(int8_products, 8.0 * LANES, pool, threads);
#endif
#ifdef TVMX_BF16_STEP
  rates[2] = rate(bf16_products, 4.0 * LANES, pool, threads);
#endif
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
