/* The C interface of a compiled model. Plain C, no dependency but libc, libm and pthreads.
 *
 * A program calls, in this order: tvmx_pool_new, any number of tvmx_run_<entry>, tvmx_pool_free.
 * Every pointer to tensor data must be a multiple of 64. Nothing here allocates once a first run has
 * sized the kernels' scratch memory. Two pools of one library may run at the same time in two threads;
 * one pool serves one run at a time.
 */
#ifndef TVMX_ABI_H_
#define TVMX_ABI_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TVMX_ABI_VERSION 1

typedef struct tvmx_pool tvmx_pool;

/* What one run needs. Unused fields are zero. */
typedef struct {
  tvmx_pool* pool;
  void* const* inputs;   /* in the order of the manifest */
  void* const* outputs;  /* in the order of the manifest */
  void* arena;           /* the manifest's arena bytes */
  const int64_t* values; /* symbolic dims and offsets, see the manifest; NULL for a static model */
  int64_t* ticks;        /* NULL, or room for one time stamp more than there are nodes */
  void (*after)(void* context, int32_t node); /* NULL, or called after each node */
  void* after_context;
} tvmx_call;

/* 0, or 1 + the index of the node that failed. Each entry point exports one: tvmx_run_<entry>. */
typedef int (*tvmx_run_fn)(const tvmx_call*);

/* `threads` counts the caller, which takes part and whose affinity never changes. `cpus` (may be NULL)
 * pins thread i to cpus[i]; cpus[0] and negative numbers pin nothing. NULL when a thread cannot start. */
tvmx_pool* tvmx_pool_new(int threads, const int* cpus);
void tvmx_pool_free(tvmx_pool* pool);

/* The caller uses `pool` for the kernels that it runs from now on; returns the pool used before. */
tvmx_pool* tvmx_pool_enter(tvmx_pool* pool);

/* Bytes of scratch memory that kernels have needed so far, all threads of the pool together. */
int64_t tvmx_pool_scratch(const tvmx_pool* pool);

/* What the last failed kernel of the calling thread said, or "". */
const char* tvmx_last_error(void);

/* The clock behind tvmx_call.ticks. */
int64_t tvmx_ticks(void);

/* JSON, not null-terminated; the parameters that the entries share. */
const char* tvmx_manifest(int64_t* bytes);
const void* tvmx_params(void);

#ifdef __cplusplus
}
#endif
#endif
