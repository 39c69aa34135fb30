/* A CUDA driver for tests on machines without a GPU: memory is the host's, and a launch runs the kernel's emulation.
 * The emulation of a cubin is <TVMX_FAKE_KERNELS>/<FNV-1a of the cubin>.so, as tests/cuda/fake_device.py puts it there.
 * After a kernel's fault every call fails, as on a device. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define GUARD 8192
#define LIMIT 65536
typedef struct { char* data; size_t size; } allocation;
typedef struct { void *library, *entry; int count; } kernel;
typedef struct { kernel* k; unsigned grid[3], block[3], shared; uint64_t arguments[64]; int count; } launch;
typedef struct { launch* items; int count; } graph;
typedef int (*emulate_fn)(void*, void**, const uint64_t*, int, const unsigned*, const unsigned*, unsigned, int, int, void*, char*);

static allocation allocations[LIMIT];
static int allocated, sticky, capturing;
static graph* captured;

static int number(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}

int cuInit(unsigned flags) { return number("TVMX_FAKE_DEVICES", 1) ? 0 : 100; }
int cuDriverGetVersion(int* v) { return *v = 12040, 0; }
int cuDeviceGetCount(int* n) { return *n = number("TVMX_FAKE_DEVICES", 1), 0; }
int cuDeviceGet(int* d, int ordinal) { return *d = ordinal, 0; }
int cuDeviceGetName(char* name, int size, int d) { return snprintf(name, size, "Emulated GPU"), 0; }
int cuDeviceGetAttribute(int* v, int which, int d) {
  int sm = number("TVMX_FAKE_SM", 80);
  *v = which == 75 ? sm / 10 : which == 76 ? sm % 10 : which == 16 ? 4 : which == 38 ? 1 << 16 : which == 13 ? 1000000 : 0;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** c, int d) { return *c = (void*)1, 0; }
int cuCtxSetCurrent(void* c) { return 0; }
int cuCtxSynchronize(void) { return sticky; }
int cuStreamCreate(void** s, unsigned flags) { return *s = (void*)2, 0; }
int cuStreamSynchronize(void* s) { return sticky; }

int cuMemAlloc_v2(uint64_t* p, size_t size) {
  if (sticky) return sticky;
  if (allocated == LIMIT) return 2;
  size_t whole = (size + 2 * GUARD + 255) / 256 * 256;
  char* data = aligned_alloc(256, whole);
  if (!data) return 2;
  allocations[allocated++] = (allocation){data + GUARD, size};
  *p = (uint64_t)(data + GUARD);
  return 0;
}
int cuMemFree_v2(uint64_t p) {
  for (int i = 0; i < allocated; ++i)
    if (allocations[i].data == (char*)p) {
      free(allocations[i].data - GUARD);
      allocations[i] = allocations[--allocated];
      return 0;
    }
  return 1;
}
int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t n) { return sticky ? sticky : (memcpy((void*)to, from, n), 0); }
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t n) { return sticky ? sticky : (memcpy(to, (void*)from, n), 0); }
int cuMemsetD8Async(uint64_t p, unsigned char v, size_t n, void* s) { return sticky ? sticky : (memset((void*)p, v, n), 0); }

int cuModuleLoadData(void** m, const unsigned char* image) {
  uint64_t at, hash = 0xcbf29ce484222325u;
  uint16_t entry, count;
  if (memcmp(image, "\177ELF", 4)) return 200;
  memcpy(&at, image + 40, 8), memcpy(&entry, image + 58, 2), memcpy(&count, image + 60, 2);
  size_t size = at + (size_t)entry * count;
  for (size_t i = 0; i < size; ++i) hash = (hash ^ image[i]) * 0x100000001b3u;
  char path[4096];
  snprintf(path, sizeof path, "%s/%016lx.so", getenv("TVMX_FAKE_KERNELS") ?: ".", (unsigned long)hash);
  *m = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  return *m ? 0 : 209;
}
int cuModuleUnload(void* m) { return 0; }
int cuModuleGetFunction(void** f, void* m, const char* name) {
  char symbol[512];
  kernel* k = calloc(1, sizeof *k);
  snprintf(symbol, sizeof symbol, "tvmx_entry_%s", name);
  k->library = m, k->entry = dlsym(m, symbol);
  snprintf(symbol, sizeof symbol, "tvmx_count_%s", name);
  int* count = dlsym(m, symbol);
  k->count = count ? *count : 0;
  *f = k;
  return k->entry && count ? 0 : 500;
}
int cuFuncSetAttribute(void* f, int which, int value) { return which == 8 && value <= (227 << 10) ? 0 : 1; }

static int execute(launch* l) {
  if (sticky) return sticky;
  void* pointers[64];
  uint64_t sizes[64];
  long figures[16];
  char reason[512] = "";
  for (int i = 0; i < l->count; ++i) {
    pointers[i] = (void*)l->arguments[i], sizes[i] = 0;
    for (int a = 0; a < allocated; ++a)
      if (allocations[a].data == (char*)pointers[i]) sizes[i] = allocations[a].size;
  }
  emulate_fn emulate = (emulate_fn)dlsym(l->k->library, "tvmx_emulate");
  if (emulate(l->k->entry, pointers, sizes, l->count, l->grid, l->block, l->shared, 0, 0, figures, reason)) {
    fprintf(stderr, "%s\n", reason);
    sticky = 700;
  }
  return 0;
}

int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void* stream, void** parameters, void** extra) {
  kernel* k = f;
  launch l = {k, {gx, gy, gz}, {bx, by, bz}, shared};
  if (bx * by * bz > 1024 || !gx || !gy || !gz) return 1;
  l.count = k->count;
  for (int i = 0; i < l.count; ++i) l.arguments[i] = *(uint64_t*)parameters[i];
  if (!capturing) return execute(&l);
  captured->items = realloc(captured->items, (captured->count + 1) * sizeof l);
  captured->items[captured->count++] = l;
  return 0;
}

int cuEventCreate(void** e, unsigned flags) { return *e = calloc(1, sizeof(double)), 0; }
int cuEventRecord(void* e, void* s) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  *(double*)e = t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
  return sticky;
}
int cuEventSynchronize(void* e) { return sticky; }
int cuEventElapsedTime(float* ms, void* a, void* b) { return *ms = (float)(*(double*)b - *(double*)a), 0; }

int cuStreamBeginCapture_v2(void* s, int mode) { return captured = calloc(1, sizeof(graph)), capturing = 1, sticky; }
int cuStreamEndCapture(void* s, void** g) { return *g = captured, capturing = 0, sticky; }
int cuGraphInstantiateWithFlags(void** e, void* g, unsigned long long flags) { return *e = g, sticky; }
int cuGraphLaunch(void* e, void* s) {
  graph* g = e;
  int failed = 0;
  for (int i = 0; i < g->count && !failed; ++i) failed = execute(&g->items[i]);
  return failed;
}
int cuGraphExecDestroy(void* e) {
  free(((graph*)e)->items), free(e);
  return 0;
}
int cuGraphDestroy(void* g) { return 0; }
int cuGetErrorName(int code, const char** text) {
  *text = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == 100 ? "CUDA_ERROR_NO_DEVICE" : code == 209
              ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : "CUDA_ERROR_UNKNOWN";
  return 0;
}
