/* What the compiler writes for the CUDA host code: images, kernels, launches and steps as constant tables. */
#ifndef TVMX_CUDA_TABLES_H_
#define TVMX_CUDA_TABLES_H_

#include <stdint.h>

enum { TVMX_INPUT, TVMX_OUTPUT, TVMX_ARENA, TVMX_PARAMETER };
enum { TVMX_LAUNCH, TVMX_COPY, TVMX_RECORD, TVMX_WAIT };

typedef struct {
  const char* name;
  uint64_t cubin, ptx; /* offsets from tvmx_images; a kernel's PTX is 0 where there is none */
  uint32_t shared;     /* bytes of dynamic shared memory, the most of its launches */
  uint32_t total;      /* with static shared memory */
} tvmx_kernel;

typedef struct {
  int32_t space, index; /* index of an input or output */
  int64_t offset;       /* bytes into it, the arena or the parameters */
} tvmx_place;

typedef struct {
  int32_t kernel;
  uint32_t grid[3], block[3], shared;
  int32_t first, count; /* its arguments among the entry's places */
} tvmx_launch;

typedef struct {
  tvmx_place to, from;
  uint64_t bytes;
} tvmx_copy;

typedef struct {
  int32_t what, stream, index; /* of a launch, a copy or an event */
  int32_t node;                /* that a launch or copy belongs to, -1 */
} tvmx_step;

typedef struct {
  const tvmx_step* steps;
  const tvmx_launch* launches;
  const tvmx_copy* copies;
  const tvmx_place* places;
  int32_t step_count, streams, events, nodes;
} tvmx_program;

typedef struct {
  const tvmx_kernel* kernels;
  int32_t kernel_count;
  int32_t sm;    /* the cubins' compute capability */
  int32_t exact; /* they run on that one alone ("sm_90a") */
  int32_t streams, events, arguments; /* the most of all entries */
  uint64_t parameter_bytes;
  const char* target;
} tvmx_device_code;

#endif
