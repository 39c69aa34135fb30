/* Runs a compiled program on a CUDA device through the driver alone, which is opened at run time. Every driver call is
 * checked; the tables come from the compiler (cuda_tables.h). */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_tables.h"
#include "tvmx_cuda.h"

#define EXPORT __attribute__((visibility("default")))
#define HIDDEN __attribute__((visibility("hidden")))
#define PLAIN_SHARED (48u << 10) /* dynamic shared memory that a kernel gets without asking */
#define STACK_ARGUMENTS 64

enum { SHARED_BLOCK_OPTIN = 97, CC_MAJOR = 75, CC_MINOR = 76 }; /* CU_DEVICE_ATTRIBUTE_* */
enum { MAX_DYNAMIC_SHARED = 8 };                                /* CU_FUNC_ATTRIBUTE_* */
enum { NON_BLOCKING = 1, NO_TIMING = 2, CAPTURE_RELAXED = 2 };

typedef void* handle;
typedef uint64_t address;

#define DRIVER(X)                                                                              \
  X(cuInit, (unsigned))                                                                        \
  X(cuDriverGetVersion, (int*))                                                                \
  X(cuDeviceGetCount, (int*))                                                                  \
  X(cuDeviceGet, (int*, int))                                                                  \
  X(cuDeviceGetName, (char*, int, int))                                                        \
  X(cuDeviceGetAttribute, (int*, int, int))                                                    \
  X(cuDevicePrimaryCtxRetain, (handle*, int))                                                  \
  X(cuDevicePrimaryCtxRelease_v2, (int))                                                       \
  X(cuCtxPushCurrent_v2, (handle))                                                             \
  X(cuCtxPopCurrent_v2, (handle*))                                                             \
  X(cuModuleLoadData, (handle*, const void*))                                                  \
  X(cuModuleUnload, (handle))                                                                  \
  X(cuModuleGetFunction, (handle*, handle, const char*))                                       \
  X(cuFuncSetAttribute, (handle, int, int))                                                    \
  X(cuMemAlloc_v2, (address*, size_t))                                                         \
  X(cuMemFree_v2, (address))                                                                   \
  X(cuMemcpyHtoDAsync_v2, (address, const void*, size_t, handle))                              \
  X(cuMemcpyDtoHAsync_v2, (void*, address, size_t, handle))                                    \
  X(cuMemcpyDtoDAsync_v2, (address, address, size_t, handle))                                  \
  X(cuStreamCreate, (handle*, unsigned))                                                       \
  X(cuStreamDestroy_v2, (handle))                                                              \
  X(cuStreamSynchronize, (handle))                                                             \
  X(cuStreamWaitEvent, (handle, handle, unsigned))                                             \
  X(cuEventCreate, (handle*, unsigned))                                                        \
  X(cuEventDestroy_v2, (handle))                                                               \
  X(cuEventRecord, (handle, handle))                                                           \
  X(cuEventElapsedTime, (float*, handle, handle))                                              \
  X(cuLaunchKernel, (handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,       \
                     unsigned, handle, void**, void**))                                        \
  X(cuStreamBeginCapture_v2, (handle, int))                                                    \
  X(cuStreamEndCapture, (handle, handle*))                                                     \
  X(cuGraphInstantiateWithFlags, (handle*, handle, unsigned long long))                        \
  X(cuGraphLaunch, (handle, handle))                                                           \
  X(cuGraphExecDestroy, (handle))                                                              \
  X(cuGraphDestroy, (handle))

typedef struct {
#define MEMBER(name, types) int(*name) types;
  DRIVER(MEMBER)
#undef MEMBER
  int (*error_name)(int, const char**);
} driver;

extern HIDDEN const tvmx_device_code tvmx_code;
extern HIDDEN const char tvmx_images[];

struct tvmx_cuda {
  driver call;
  void* library;
  handle context;
  int device, sm, from_ptx;
  int broken; /* the error after which the context accepts nothing more */
  int shared_limit;
  char name[128];
  handle *modules, *functions, *streams, *events;
  address params;
  handle extra; /* event of tvmx_cuda_wait_for */
};

static __thread char error_text[1024];

EXPORT const char* tvmx_cuda_error(void) { return error_text; }

static void say(const char* format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(error_text, sizeof error_text, format, list);
  va_end(list);
}

/* Errors that leave the process without a usable context. */
static int is_sticky(int code) {
  return code == 214 || code == 700 || code == 702 || (code >= 709 && code <= 719) || code == 226 || code == 721 || code == 999;
}

static const char* advice(int code) {
  if (is_sticky(code)) return "the device's context is lost, start the process again; compute-sanitizer finds the kernel";
  switch (code) {
    case 2: return "free device memory or use a smaller batch";
    case 3: case 803: case 804: return "the driver does not work on this machine: check nvidia-smi, or update it";
    case 100: return "no NVIDIA GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES";
    case 101: return "use a device that nvidia-smi lists";
    case 200: return "the NVIDIA driver is older than the compiler: update it";
    case 209: case 218: return "compile the model for this GPU";
    case 222: return "the NVIDIA driver is older than the compiler: update it, or compile the model for this very GPU";
    case 900: case 901: case 906: return "this is not possible while a stream is being captured";
    default: return "see the CUDA driver's documentation of this error";
  }
}

static int failed(tvmx_cuda* h, int code, const char* what, const char* about) {
  const char* name = NULL;
  if (h->call.error_name) h->call.error_name(code, &name);
  say("%s%s%s: %s (%d); %s", what, about[0] ? " for " : "", about, name ? name : "unknown error", code, advice(code));
  if (is_sticky(code)) h->broken = code;
  return code;
}

#define TRY_FOR(function, about, ...)                                      \
  do {                                                                     \
    int code_ = h->call.function(__VA_ARGS__);                             \
    if (code_) return failed(h, code_, #function, about);                  \
  } while (0)
#define TRY(function, ...) TRY_FOR(function, "", __VA_ARGS__)

static int enter(tvmx_cuda* h) {
  if (h->broken) {
    say("an earlier error (%d) has left the device's context unusable; start the process again", h->broken);
    return h->broken;
  }
  TRY(cuCtxPushCurrent_v2, h->context);
  return 0;
}

static int leave(tvmx_cuda* h, int status) {
  handle before;
  int code = h->call.cuCtxPopCurrent_v2(&before);
  return !status && code ? failed(h, code, "cuCtxPopCurrent", "") : status;
}

/* A body that runs in the device's context. */
#define IN_CONTEXT(expression)                  \
  do {                                          \
    int status_ = enter(h);                     \
    if (status_) return status_;                \
    return leave(h, (expression));              \
  } while (0)

static int load_driver(tvmx_cuda* h, const char* path) {
  h->library = dlopen(path ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!h->library) {
    say("this model was built for %s and needs an NVIDIA driver, which this machine lacks: %s; run it on a machine "
        "with an NVIDIA GPU, or compile it for a CPU target", tvmx_code.target, dlerror());
    return 100;
  }
#define RESOLVE(symbol, types)                                                                                    \
  *(void**)&h->call.symbol = dlsym(h->library, #symbol);                                                          \
  if (!h->call.symbol) {                                                                                          \
    say("the NVIDIA driver has no %s: it is too old, CUDA 11.4 or newer is needed; update it", #symbol);         \
    return 500;                                                                                                   \
  }
  DRIVER(RESOLVE)
#undef RESOLVE
  *(void**)&h->call.error_name = dlsym(h->library, "cuGetErrorName");
  return 0;
}

static int open_device(tvmx_cuda* h, int device) {
  int count = 0, major = 0, minor = 0;
  TRY_FOR(cuInit, "the NVIDIA driver", 0);
  TRY(cuDeviceGetCount, &count);
  if (device < 0 || device >= count) {
    say("there is no CUDA device %d: the driver finds %d; %s", device, count,
        count ? "use a device that nvidia-smi lists" : advice(100));
    return 101;
  }
  TRY(cuDeviceGet, &h->device, device);
  TRY(cuDeviceGetName, h->name, (int)sizeof h->name, h->device);
  TRY(cuDeviceGetAttribute, &major, CC_MAJOR, h->device);
  TRY(cuDeviceGetAttribute, &minor, CC_MINOR, h->device);
  TRY(cuDeviceGetAttribute, &h->shared_limit, SHARED_BLOCK_OPTIN, h->device);
  h->sm = 10 * major + minor;
  int too_low = h->sm < tvmx_code.sm, other = tvmx_code.exact && h->sm != tvmx_code.sm;
  if (too_low || other) {
    say("this model was built for %s and needs a GPU of compute capability %d.%d%s; device %d (%s) has %d.%d: compile "
        "it for that one", tvmx_code.target, tvmx_code.sm / 10, tvmx_code.sm % 10, other ? "" : " or higher", device,
        h->name, major, minor);
    return 209;
  }
  /* Machine code runs on its own major version, from its minor version on; PTX is compiled for all newer ones. */
  h->from_ptx = h->sm / 10 != tvmx_code.sm / 10;
  for (int i = 0; i < tvmx_code.kernel_count; i++) {
    const tvmx_kernel* k = &tvmx_code.kernels[i];
    if ((int64_t)k->total > h->shared_limit && k->total > PLAIN_SHARED) {
      say("kernel %s needs %u bytes of shared memory a block; device %d (%s) has %d: compile the model for it, as with "
          "--target cuda-sm%d", k->name, k->total, device, h->name, h->shared_limit, h->sm);
      return 209;
    }
  }
  TRY(cuDevicePrimaryCtxRetain, &h->context, h->device);
  return 0;
}

static int load_code(tvmx_cuda* h) {
  int count = tvmx_code.kernel_count;
  h->modules = calloc((size_t)count + 1, sizeof *h->modules);
  h->functions = calloc((size_t)count + 1, sizeof *h->functions);
  h->streams = calloc((size_t)tvmx_code.streams + 1, sizeof *h->streams);
  h->events = calloc((size_t)tvmx_code.events + 1, sizeof *h->events);
  if (!h->modules || !h->functions || !h->streams || !h->events) {
    say("out of memory");
    return 2;
  }
  for (int i = 0; i < count; i++) {
    const tvmx_kernel* k = &tvmx_code.kernels[i];
    if (i && k->cubin == k[-1].cubin) { /* the launches of one program share a module */
      h->modules[i] = h->modules[i - 1];
    } else {
      TRY_FOR(cuModuleLoadData, k->name, &h->modules[i], tvmx_images + (h->from_ptx ? k->ptx : k->cubin));
    }
    TRY_FOR(cuModuleGetFunction, k->name, &h->functions[i], h->modules[i], k->name);
    if (k->shared > PLAIN_SHARED)
      TRY_FOR(cuFuncSetAttribute, k->name, h->functions[i], MAX_DYNAMIC_SHARED, (int)k->shared);
  }
  for (int i = 0; i < tvmx_code.streams; i++) TRY(cuStreamCreate, &h->streams[i], NON_BLOCKING);
  for (int i = 0; i < tvmx_code.events; i++) TRY(cuEventCreate, &h->events[i], NO_TIMING);
  TRY(cuEventCreate, &h->extra, NO_TIMING);
  if (tvmx_code.parameter_bytes) {
    TRY_FOR(cuMemAlloc_v2, "the parameters", &h->params, tvmx_code.parameter_bytes);
    TRY(cuMemcpyHtoDAsync_v2, h->params, tvmx_params(), tvmx_code.parameter_bytes, h->streams[0]);
    TRY(cuStreamSynchronize, h->streams[0]);
  }
  return 0;
}

static int load_in_context(tvmx_cuda* h) { IN_CONTEXT(load_code(h)); }

EXPORT tvmx_cuda* tvmx_cuda_open(const char* path, int device) {
  error_text[0] = 0;
  tvmx_cuda* h = calloc(1, sizeof *h);
  if (!h) {
    say("out of memory");
    return NULL;
  }
  if (load_driver(h, path) || open_device(h, device) || load_in_context(h)) {
    char reason[sizeof error_text];
    memcpy(reason, error_text, sizeof reason);
    tvmx_cuda_close(h);
    memcpy(error_text, reason, sizeof reason);
    return NULL;
  }
  return h;
}

/* Frees what there is; errors here tell nobody anything, and a lost context frees nothing. */
EXPORT void tvmx_cuda_close(tvmx_cuda* h) {
  if (!h) return;
  handle before;
  if (h->context && !h->broken && !h->call.cuCtxPushCurrent_v2(h->context)) {
    if (h->streams)
      for (int i = 0; i < tvmx_code.streams; i++)
        if (h->streams[i]) h->call.cuStreamSynchronize(h->streams[i]), h->call.cuStreamDestroy_v2(h->streams[i]);
    if (h->events)
      for (int i = 0; i < tvmx_code.events; i++)
        if (h->events[i]) h->call.cuEventDestroy_v2(h->events[i]);
    if (h->extra) h->call.cuEventDestroy_v2(h->extra);
    if (h->params) h->call.cuMemFree_v2(h->params);
    if (h->modules)
      for (int i = 0; i < tvmx_code.kernel_count; i++)
        if (h->modules[i] && (!i || h->modules[i] != h->modules[i - 1])) h->call.cuModuleUnload(h->modules[i]);
    h->call.cuCtxPopCurrent_v2(&before);
  }
  if (h->context) h->call.cuDevicePrimaryCtxRelease_v2(h->device);
  free(h->modules), free(h->functions), free(h->streams), free(h->events);
  /* The driver stays loaded: unloading it is not supported. */
  free(h);
}

EXPORT const char* tvmx_cuda_device_name(const tvmx_cuda* h) { return h->name; }
EXPORT int tvmx_cuda_device_sm(const tvmx_cuda* h) { return h->sm; }
EXPORT int tvmx_cuda_from_ptx(const tvmx_cuda* h) { return h->from_ptx; }
EXPORT void* tvmx_cuda_stream(const tvmx_cuda* h) { return h->streams[0]; }

static handle stream_or_own(const tvmx_cuda* h, void* stream) { return stream ? stream : h->streams[0]; }

static int do_alloc(tvmx_cuda* h, size_t bytes, void** out) {
  address found = 0;
  char about[48];
  snprintf(about, sizeof about, "%zu bytes of device memory", bytes);
  TRY_FOR(cuMemAlloc_v2, about, &found, bytes ? bytes : 1);
  *out = (void*)(uintptr_t)found;
  return 0;
}
EXPORT int tvmx_cuda_alloc(tvmx_cuda* h, size_t bytes, void** out) { IN_CONTEXT(do_alloc(h, bytes, out)); }

static int do_free(tvmx_cuda* h, void* at) {
  TRY(cuMemFree_v2, (address)(uintptr_t)at);
  return 0;
}
EXPORT int tvmx_cuda_free(tvmx_cuda* h, void* at) { IN_CONTEXT(do_free(h, at)); }

static int do_copy(tvmx_cuda* h, void* to, const void* from, size_t bytes, int kind, handle stream) {
  if (!bytes) return 0;
  if (kind == 1) TRY(cuMemcpyHtoDAsync_v2, (address)(uintptr_t)to, from, bytes, stream);
  else if (kind == 2) TRY(cuMemcpyDtoHAsync_v2, to, (address)(uintptr_t)from, bytes, stream);
  else TRY(cuMemcpyDtoDAsync_v2, (address)(uintptr_t)to, (address)(uintptr_t)from, bytes, stream);
  return 0;
}
EXPORT int tvmx_cuda_copy(tvmx_cuda* h, void* to, const void* from, size_t bytes, int kind, void* stream) {
  IN_CONTEXT(do_copy(h, to, from, bytes, kind, stream_or_own(h, stream)));
}

static int do_synchronize(tvmx_cuda* h, handle stream) {
  TRY(cuStreamSynchronize, stream);
  return 0;
}
EXPORT int tvmx_cuda_synchronize(tvmx_cuda* h, void* stream) {
  IN_CONTEXT(do_synchronize(h, stream_or_own(h, stream)));
}

static int do_wait_for(tvmx_cuda* h, handle stream, handle other) {
  TRY(cuEventRecord, h->extra, other);
  TRY(cuStreamWaitEvent, stream, h->extra, 0);
  return 0;
}
EXPORT int tvmx_cuda_wait_for(tvmx_cuda* h, void* stream, void* other) {
  IN_CONTEXT(do_wait_for(h, stream_or_own(h, stream), stream_or_own(h, other)));
}

static int do_begin(tvmx_cuda* h) {
  TRY(cuStreamBeginCapture_v2, h->streams[0], CAPTURE_RELAXED);
  return 0;
}
EXPORT int tvmx_cuda_capture_begin(tvmx_cuda* h) { IN_CONTEXT(do_begin(h)); }

static int do_end(tvmx_cuda* h, void** out) {
  handle graph = NULL;
  TRY(cuStreamEndCapture, h->streams[0], &graph);
  int code = h->call.cuGraphInstantiateWithFlags(out, graph, 0);
  int also = h->call.cuGraphDestroy(graph);
  if (code) return failed(h, code, "cuGraphInstantiate", "");
  return also ? failed(h, also, "cuGraphDestroy", "") : 0;
}
EXPORT int tvmx_cuda_capture_end(tvmx_cuda* h, void** graph) { IN_CONTEXT(do_end(h, graph)); }

static int do_replay(tvmx_cuda* h, handle graph, handle stream) {
  TRY(cuGraphLaunch, graph, stream);
  return 0;
}
EXPORT int tvmx_cuda_replay(tvmx_cuda* h, void* graph, void* stream) {
  IN_CONTEXT(do_replay(h, graph, stream_or_own(h, stream)));
}

static int do_drop(tvmx_cuda* h, handle graph) {
  TRY(cuGraphExecDestroy, graph);
  return 0;
}
EXPORT int tvmx_cuda_drop(tvmx_cuda* h, void* graph) { IN_CONTEXT(do_drop(h, graph)); }

static int do_mark_new(tvmx_cuda* h, void** mark) {
  TRY(cuEventCreate, mark, 0);
  return 0;
}
EXPORT int tvmx_cuda_mark_new(tvmx_cuda* h, void** mark) { IN_CONTEXT(do_mark_new(h, mark)); }

static int do_mark_free(tvmx_cuda* h, handle mark) {
  TRY(cuEventDestroy_v2, mark);
  return 0;
}
EXPORT int tvmx_cuda_mark_free(tvmx_cuda* h, void* mark) { IN_CONTEXT(do_mark_free(h, mark)); }

static int do_elapsed(tvmx_cuda* h, handle from, handle to, float* out) {
  TRY(cuEventElapsedTime, out, from, to);
  return 0;
}
EXPORT int tvmx_cuda_elapsed(tvmx_cuda* h, void* from, void* to, float* out) {
  IN_CONTEXT(do_elapsed(h, from, to, out));
}

static address place(const tvmx_cuda* h, const tvmx_cuda_call* c, const tvmx_place* p) {
  switch (p->space) {
    case TVMX_INPUT: return (address)(uintptr_t)c->inputs[p->index] + (address)p->offset;
    case TVMX_OUTPUT: return (address)(uintptr_t)c->outputs[p->index] + (address)p->offset;
    case TVMX_ARENA: return (address)(uintptr_t)c->arena + (address)p->offset;
    default: return h->params + (address)p->offset;
  }
}

static int launch(tvmx_cuda* h, const tvmx_cuda_call* c, const tvmx_program* p, const tvmx_launch* l, handle stream) {
  address values[STACK_ARGUMENTS];
  void* arguments[STACK_ARGUMENTS];
  for (int i = 0; i < l->count; i++) { /* the compiler keeps count within STACK_ARGUMENTS */
    values[i] = place(h, c, &p->places[l->first + i]);
    arguments[i] = &values[i];
  }
  TRY_FOR(cuLaunchKernel, tvmx_code.kernels[l->kernel].name, h->functions[l->kernel], l->grid[0], l->grid[1],
          l->grid[2], l->block[0], l->block[1], l->block[2], l->shared, stream, arguments, NULL);
  return 0;
}

static int run_steps(tvmx_cuda* h, const tvmx_cuda_call* c, const tvmx_program* p) {
  handle main = stream_or_own(h, c->stream);
  int serial = c->marks || c->after; /* in the order of issue all dependencies hold on one stream */
  int done = -1;
  if (c->marks) TRY(cuEventRecord, c->marks[0], main);
  for (int i = 0; i < p->step_count; i++) {
    const tvmx_step* s = &p->steps[i];
    handle stream = s->stream && !serial ? h->streams[s->stream] : main;
    if (s->what == TVMX_RECORD || s->what == TVMX_WAIT) {
      if (serial) continue;
      if (s->what == TVMX_RECORD) TRY(cuEventRecord, h->events[s->index], stream);
      else TRY(cuStreamWaitEvent, stream, h->events[s->index], 0);
      continue;
    }
    if (s->what == TVMX_LAUNCH) {
      int status = launch(h, c, p, &p->launches[s->index], stream);
      if (status) return status;
    } else {
      const tvmx_copy* copy = &p->copies[s->index];
      TRY(cuMemcpyDtoDAsync_v2, place(h, c, &copy->to), place(h, c, &copy->from), copy->bytes, stream);
    }
    if (!serial || (i + 1 < p->step_count && p->steps[i + 1].node == s->node)) continue;
    for (done++; done <= s->node; done++) { /* nodes without a kernel share the mark of the next one */
      if (c->marks) TRY(cuEventRecord, c->marks[done + 1], main);
      if (c->after && done == s->node) {
        TRY(cuStreamSynchronize, main);
        c->after(c->after_context, done);
      }
    }
    done = s->node;
  }
  if (c->marks)
    for (done++; done < p->nodes; done++) TRY(cuEventRecord, c->marks[done + 1], main);
  return 0;
}

HIDDEN int tvmx_cuda_run(tvmx_cuda* h, const tvmx_cuda_call* call, const tvmx_program* program) {
  IN_CONTEXT(run_steps(h, call, program));
}
