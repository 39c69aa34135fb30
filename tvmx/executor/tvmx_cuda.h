/* The C interface of a model compiled for a CUDA target. It needs libc alone: the driver (libcuda.so.1) is opened
 * when a model is, so that the library loads and can be asked for its manifest anywhere.
 *
 * A program calls tvmx_cuda_open, any number of tvmx_cuda_run_<entry>, tvmx_cuda_close. Addresses of inputs, outputs
 * and arena are the device's, multiples of 64. Every function that returns an int returns 0 or the driver's error
 * code; tvmx_cuda_error says what it means and what to do. One handle serves one thread at a time.
 */
#ifndef TVMX_CUDA_H_
#define TVMX_CUDA_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TVMX_CUDA_ABI_VERSION 1

typedef struct tvmx_cuda tvmx_cuda;

/* What one run needs. Unused fields are zero. */
typedef struct {
  void* const* inputs;  /* device addresses, in the order of the manifest */
  void* const* outputs; /* device addresses, in the order of the manifest */
  void* arena;          /* device memory, the manifest's arena bytes */
  void* stream;         /* CUstream; NULL: the handle's own */
  void** marks;         /* NULL, or one timing event more than there are nodes: all run on one stream, each timed */
  void (*after)(void* context, int32_t node); /* NULL, or called when a node has finished: all run on one stream */
  void* after_context;
} tvmx_cuda_call;

/* Returns as soon as all is issued; the outputs are ready when what `stream` holds then is. */
typedef int (*tvmx_cuda_run_fn)(tvmx_cuda*, const tvmx_cuda_call*);

/* `driver`: path of the driver's library, NULL for libcuda.so.1. Uses the device's primary context, loads the machine
 * code that fits the device and uploads the parameters. NULL when that fails: see tvmx_cuda_error. */
tvmx_cuda* tvmx_cuda_open(const char* driver, int device);
void tvmx_cuda_close(tvmx_cuda*);

/* What the last failed call of this thread said, or "". */
const char* tvmx_cuda_error(void);

/* "NAME", compute capability (80 for 8.0), and whether PTX was compiled for this device while loading. */
const char* tvmx_cuda_device_name(const tvmx_cuda*);
int tvmx_cuda_device_sm(const tvmx_cuda*);
int tvmx_cuda_from_ptx(const tvmx_cuda*);

void* tvmx_cuda_stream(const tvmx_cuda*);
int tvmx_cuda_alloc(tvmx_cuda*, size_t bytes, void** address);
int tvmx_cuda_free(tvmx_cuda*, void* address);
/* kind 1: host to device, 2: device to host, 3: on the device. In the order of `stream` (NULL: the handle's own). */
int tvmx_cuda_copy(tvmx_cuda*, void* to, const void* from, size_t bytes, int kind, void* stream);
int tvmx_cuda_synchronize(tvmx_cuda*, void* stream);
/* `stream` waits for all that `other` holds now. */
int tvmx_cuda_wait_for(tvmx_cuda*, void* stream, void* other);

/* Record what is issued on the handle's own stream between begin and end, then replay it as one launch. */
int tvmx_cuda_capture_begin(tvmx_cuda*);
int tvmx_cuda_capture_end(tvmx_cuda*, void** graph);
int tvmx_cuda_replay(tvmx_cuda*, void* graph, void* stream);
int tvmx_cuda_drop(tvmx_cuda*, void* graph);

int tvmx_cuda_mark_new(tvmx_cuda*, void** mark);
int tvmx_cuda_mark_free(tvmx_cuda*, void* mark);
int tvmx_cuda_elapsed(tvmx_cuda*, void* from, void* to, float* milliseconds);

/* JSON, not null-terminated; the parameters that the entries share, in host memory. */
const char* tvmx_manifest(int64_t* bytes);
const void* tvmx_params(void);

#ifdef __cplusplus
}
#endif
#endif
