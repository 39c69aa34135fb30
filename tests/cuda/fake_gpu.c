/* A CUDA driver for tests on machines without a GPU. Memory is the host's, kernels are their emulations, and nothing
 * runs before somebody waits: then the streams' work is done in an order chosen to be unkind (TVMX_FAKE_ORDER: forward,
 * backward, or a seed), bound only by stream order and events. What is read too early, or ordered by luck, comes out
 * wrong. The emulation of kernel K is <TVMX_FAKE_KERNELS>/K.so. fake_* are for the tests. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define GUARD 8192

typedef struct stream stream;
typedef struct event event;
typedef struct graph graph;
typedef struct { void *library, *entry; int count, limit; const uint64_t* sizes; char name[256]; } function;
typedef struct op {
  enum { LAUNCH, COPY, RECORD, WAIT, GRAPH } what;
  stream* on;
  event* e;
  long number;
  graph* g;
  void *to;
  const void* from;
  size_t bytes;
  function* f;
  unsigned grid[3], block[3], shared;
  uint64_t arguments[64];
  struct op* next;
} op;
typedef struct { op *head, *tail; } queue;
struct stream { queue q; graph* capture; int id; stream* next; };
struct event { long issued, done, captured, replayed; graph* capture; double time; };
struct graph { op* ops; int count; stream* origin; };
typedef int (*emulate_fn)(void*, void**, const uint64_t*, int, const unsigned*, const unsigned*, unsigned, int, int, void*, char*);

static stream legacy = {.id = -1};
static stream* streams = &legacy; /* newest first */
int fake_ptx; /* modules loaded from PTX */
static int made_streams, sticky, live[6]; /* memory, modules, streams, events, graphs, context */
enum { MEMORY, MODULE, STREAM, EVENT, GRAPHS, CONTEXT };
static struct { char name[64]; int calls, fail_in, code; } table[64];

static int entered(const char* name) {
  for (int i = 0; i < 64; ++i) {
    if (!table[i].name[0]) strcpy(table[i].name, name);
    if (strcmp(table[i].name, name)) continue;
    table[i].calls++;
    if (table[i].fail_in && --table[i].fail_in == 0) return table[i].code;
    return 0;
  }
  return 999;
}
#define ENTER                              \
  do {                                     \
    int code = entered(__func__);          \
    if (code >= 700 && code < 720) sticky = code; \
    if (code) return code;                 \
    if (sticky) return sticky;             \
  } while (0)

int fake_calls(const char* name) {
  for (int i = 0; i < 64; ++i)
    if (!strcmp(table[i].name, name)) return table[i].calls;
  return 0;
}
/* The nth call of `name` from now on returns `code`. */
void fake_fail(const char* name, int nth, int code) {
  entered(name);
  for (int i = 0; i < 64; ++i)
    if (!strcmp(table[i].name, name)) table[i].calls--, table[i].fail_in = nth, table[i].code = code;
}
int fake_live(int kind) { return live[kind]; }
/* What a lost context held is gone. */
void fake_forget(void) { memset(live, 0, sizeof live); }
void fake_revive(void) { sticky = 0; memset(table, 0, sizeof table); }

static int number(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}
static stream* real(void* s) { return (uintptr_t)s <= 2 ? &legacy : s; }

static void push(queue* q, op o) {
  op* made = malloc(sizeof o);
  *made = o, made->next = NULL;
  if (q->tail) q->tail->next = made; else q->head = made;
  q->tail = made;
}

static int run_op(op* o);

/* Which of `n` streams goes next, by its head; NULL when none can. `inside` is a graph's replay. */
static op* choose(op** heads, int n, int inside) {
  static unsigned long state = 1;
  const char* order = getenv("TVMX_FAKE_ORDER");
  int first = 0, step = 1;
  if (order && !strcmp(order, "backward")) first = n - 1, step = n - 1;
  else if (order && strcmp(order, "forward")) {
    if (state == 1) state = (unsigned long)atol(order) * 2654435761u + 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    first = (int)((state >> 33) % n);
  }
  for (int i = 0; i < n; ++i) {
    op* o = heads[(first + (long)i * step) % n];
    if (o && (o->what != WAIT || (inside ? o->e->replayed : o->e->done) >= o->number)) return o;
  }
  return NULL;
}

static int replay(graph* g) {
  stream* on[64];
  op* heads[64];
  int at[64], n = 0, left = g->count;
  for (int i = 0; i < g->count; ++i) {
    if (g->ops[i].e) g->ops[i].e->replayed = 0;
    int k = 0;
    while (k < n && on[k] != g->ops[i].on) ++k;
    if (k == n) on[n] = g->ops[i].on, at[n++] = i;
  }
  while (left) {
    for (int k = 0; k < n; ++k) {
      while (at[k] < g->count && g->ops[at[k]].on != on[k]) at[k]++;
      heads[k] = at[k] < g->count ? &g->ops[at[k]] : NULL;
    }
    op* o = choose(heads, n, 1);
    if (!o) return 719;
    if (o->what == RECORD) o->e->replayed = o->number;
    else if (o->what != WAIT) {
      int code = run_op(o);
      if (code) return code;
    }
    for (int k = 0; k < n; ++k)
      if (heads[k] == o) at[k]++;
    left--;
  }
  return 0;
}

static int run_op(op* o) {
  if (o->what == COPY) memcpy(o->to, o->from, o->bytes);
  if (o->what == GRAPH) return replay(o->g);
  if (o->what == RECORD) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    o->e->done = o->number, o->e->time = t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
  }
  if (o->what == LAUNCH) {
    void* pointers[64];
    long figures[16];
    char reason[512] = "";
    /* The emulator wants its tensors apart from each other, so that every access out of bounds shows. */
    char* homes[64];
    for (int i = 0; i < o->f->count; ++i) {
      homes[i] = aligned_alloc(256, (o->f->sizes[i] + 2 * GUARD + 255) / 256 * 256);
      pointers[i] = memcpy(homes[i] + GUARD, (void*)o->arguments[i], o->f->sizes[i]);
    }
    emulate_fn emulate = (emulate_fn)dlsym(o->f->library, "tvmx_emulate");
    int bad = emulate(o->f->entry, pointers, o->f->sizes, o->f->count, o->grid, o->block, o->shared, 0, 0, figures, reason);
    for (int i = 0; i < o->f->count; ++i) {
      memcpy((void*)o->arguments[i], pointers[i], o->f->sizes[i]);
      free(homes[i]);
    }
    if (bad) fprintf(stderr, "%s: %s\n", o->f->name, reason);
    if (bad) return 700;
  }
  return 0;
}

/* Work until `target` has nothing left; NULL: until nobody has. */
static int drain(stream* target) {
  for (;;) {
    op* heads[256];
    stream* of[256];
    int n = 0, busy = 0;
    for (stream* s = streams; s && n < 256; s = s->next) of[n] = s, heads[n++] = s->q.head, busy |= s->q.head != NULL;
    if (target ? !target->q.head : !busy) return sticky;
    op* o = choose(heads, n, 0);
    if (!o) return sticky = 719; /* everybody waits */
    int code = run_op(o);
    for (int i = 0; i < n; ++i)
      if (heads[i] == o) {
        of[i]->q.head = o->next;
        if (!o->next) of[i]->q.tail = NULL;
      }
    free(o);
    if (code) return sticky = code;
  }
}

static void issue(stream* s, op o) {
  o.on = s;
  if (!s->capture) { push(&s->q, o); return; }
  graph* g = s->capture;
  g->ops = realloc(g->ops, (g->count + 1) * sizeof o);
  g->ops[g->count++] = o;
}

int cuInit(unsigned flags) { ENTER; return number("TVMX_FAKE_DEVICES", 1) ? 0 : 100; }
int cuDriverGetVersion(int* v) { ENTER; return *v = 12040, 0; }
int cuDeviceGetCount(int* n) { ENTER; return *n = number("TVMX_FAKE_DEVICES", 1), 0; }
int cuDeviceGet(int* d, int ordinal) { ENTER; return *d = ordinal, 0; }
int cuDeviceGetName(char* name, int size, int d) { ENTER; return snprintf(name, size, "Fake GPU"), 0; }
int cuDeviceGetAttribute(int* v, int which, int d) {
  ENTER;
  int sm = number("TVMX_FAKE_SM", 80);
  *v = which == 75 ? sm / 10 : which == 76 ? sm % 10 : which == 97 ? number("TVMX_FAKE_SHARED", 163 << 10) : 0;
  return 0;
}
int cuGetErrorName(int code, const char** name) {
  static const struct { int code; const char* name; } names[] = {
      {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {100, "CUDA_ERROR_NO_DEVICE"},
      {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"}, {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {719, "CUDA_ERROR_LAUNCH_FAILED"},
      {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"}};
  for (size_t i = 0; i < sizeof names / sizeof *names; ++i)
    if (names[i].code == code) return *name = names[i].name, 0;
  return 1;
}
int cuDevicePrimaryCtxRetain(void** c, int d) { ENTER; live[CONTEXT]++; return *c = (void*)16, 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { return live[CONTEXT]--, 0; }
int cuCtxPushCurrent_v2(void* c) { ENTER; return 0; }
int cuCtxPopCurrent_v2(void** c) { return *c = (void*)16, 0; }

int cuMemAlloc_v2(uint64_t* p, size_t size) {
  ENTER;
  char* data = aligned_alloc(256, (size + 255) / 256 * 256);
  if (!data) return 2;
  memset(data, 0xff, size); /* as a kernel finds it: NaN */
  live[MEMORY]++;
  return *p = (uint64_t)data, 0;
}
int cuMemFree_v2(uint64_t p) { ENTER; int code = drain(NULL); free((void*)p); live[MEMORY]--; return code; }

static int copy(void* to, const void* from, size_t n, void* s) {
  return issue(real(s), (op){.what = COPY, .to = to, .from = from, .bytes = n}), 0;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t n, void* s) { ENTER; return copy((void*)to, from, n, s); }
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t n, void* s) { ENTER; return copy(to, (void*)from, n, s); }
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t n, void* s) { ENTER; return copy((void*)to, (void*)from, n, s); }

int cuModuleLoadData(void** m, const char* image) {
  ENTER;
  int is_ptx = strstr(image, ".version") != NULL && strstr(image, ".target") != NULL;
  if (memcmp(image, "\177ELF", 4) && !is_ptx) return 200;
  live[MODULE]++;
  fake_ptx += is_ptx;
  return *m = malloc(1), 0;
}
int cuModuleUnload(void* m) { free(m); live[MODULE]--; return 0; }
int cuModuleGetFunction(void** f, void* m, const char* name) {
  ENTER;
  char text[4096];
  function* k = calloc(1, sizeof *k);
  snprintf(k->name, sizeof k->name, "%s", name);
  snprintf(text, sizeof text, "%s/%s.so", getenv("TVMX_FAKE_KERNELS") ?: ".", name);
  k->library = dlopen(text, RTLD_NOW | RTLD_LOCAL);
  if (!k->library) { fprintf(stderr, "%s\n", dlerror()); return 500; }
  snprintf(text, sizeof text, "tvmx_entry_%s", name);
  k->entry = dlsym(k->library, text);
  snprintf(text, sizeof text, "tvmx_sizes_%s", name);
  uint64_t* sizes = dlsym(k->library, text);
  if (!k->entry || !sizes) return 500;
  k->count = (int)sizes[0], k->sizes = sizes + 1, k->limit = 48 << 10;
  return *f = k, 0;
}
int cuFuncSetAttribute(void* f, int which, int value) {
  ENTER;
  if (which != 8 || value > number("TVMX_FAKE_SHARED", 163 << 10)) return 1;
  return ((function*)f)->limit = value, 0;
}
int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void* s, void** parameters, void** extra) {
  ENTER;
  function* k = f;
  if (bx * by * bz > 1024 || !gx || !gy || !gz || gy > 65535 || gz > 65535 || (int)shared > k->limit) return 1;
  op o = {.what = LAUNCH, .f = k, .grid = {gx, gy, gz}, .block = {bx, by, bz}, .shared = shared};
  for (int i = 0; i < k->count; ++i) o.arguments[i] = *(uint64_t*)parameters[i];
  return issue(real(s), o), 0;
}

int cuStreamCreate(void** s, unsigned flags) {
  ENTER;
  stream* made = calloc(1, sizeof *made);
  made->id = made_streams++, made->next = streams, streams = made;
  live[STREAM]++;
  return *s = made, 0;
}
int cuStreamDestroy_v2(void* s) {
  drain(s);
  for (stream** at = &streams; *at; at = &(*at)->next)
    if (*at == s) { *at = (*at)->next; break; }
  free(s);
  live[STREAM]--;
  return 0;
}
int cuStreamSynchronize(void* s) { ENTER; return real(s)->capture ? 900 : drain(real(s)); }

int cuEventCreate(void** e, unsigned flags) { ENTER; live[EVENT]++; return *e = calloc(1, sizeof(event)), 0; }
int cuEventDestroy_v2(void* e) { drain(NULL); free(e); live[EVENT]--; return 0; }
int cuEventRecord(void* e, void* s) {
  ENTER;
  event* v = e;
  stream* on = real(s);
  v->capture = on->capture;
  issue(on, (op){.what = RECORD, .e = v, .number = on->capture ? ++v->captured : ++v->issued});
  return 0;
}
int cuStreamWaitEvent(void* s, void* e, unsigned flags) {
  ENTER;
  event* v = e;
  stream* on = real(s);
  if (v->capture) on->capture = v->capture; /* a stream that waits for a capture joins it */
  else if (on->capture) return 905;
  issue(on, (op){.what = WAIT, .e = v, .number = v->capture ? v->captured : v->issued});
  return 0;
}
int cuEventElapsedTime(float* ms, void* a, void* b) {
  ENTER;
  event *x = a, *y = b;
  if (x->done < x->issued || y->done < y->issued) return 600;
  return *ms = (float)(y->time - x->time), 0;
}

int cuStreamBeginCapture_v2(void* s, int mode) {
  ENTER;
  if ((uintptr_t)s <= 2) return 901;
  graph* g = calloc(1, sizeof *g);
  g->origin = s;
  ((stream*)s)->capture = g;
  return 0;
}
int cuStreamEndCapture(void* s, void** out) {
  ENTER;
  graph* g = ((stream*)s)->capture;
  if (!g) return 901;
  int unjoined = 0;
  for (stream* t = streams; t; t = t->next) {
    if (t->capture != g) continue;
    t->capture = NULL;
    if (t == g->origin) continue;
    int last = -1, joined = 0;
    for (int i = 0; i < g->count; ++i)
      if (g->ops[i].on == t) last = i;
    if (last >= 0 && g->ops[last].what == RECORD)
      for (int i = last; i < g->count; ++i) joined |= g->ops[i].what == WAIT && g->ops[i].e == g->ops[last].e;
    unjoined |= !joined;
  }
  for (int i = 0; i < g->count; ++i)
    if (g->ops[i].e) g->ops[i].e->capture = NULL;
  if (unjoined) return 904;
  live[GRAPHS]++;
  return *out = g, 0;
}
int cuGraphInstantiateWithFlags(void** e, void* g, unsigned long long flags) { ENTER; live[GRAPHS]++; return *e = g, 0; }
int cuGraphLaunch(void* e, void* s) { ENTER; return issue(real(s), (op){.what = GRAPH, .g = e}), 0; }
int cuGraphExecDestroy(void* e) { drain(NULL); free(((graph*)e)->ops), free(e); live[GRAPHS]--; return 0; }
int cuGraphDestroy(void* g) { live[GRAPHS]--; return 0; }
