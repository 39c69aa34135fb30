// Runs a CUDA kernel on one CPU thread: every CUDA thread is a fiber, blocks run one after another.
// Memory accesses of the kernel arrive through the hooks that GCC's -fsanitize=thread inserts; they check bounds,
// alignment, and that accesses of different threads to one address are ordered by a barrier.
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdarg>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__F16C__)
#include <immintrin.h>
#endif

struct Dim { unsigned x, y, z; };
extern "C" {
Dim tvmx_thread, tvmx_block, tvmx_grid_dim, tvmx_block_dim;
// This library's own data, as the linker lays it out: the kernel may read threadIdx and constants there.
extern char __ehdr_start[] __attribute__((visibility("hidden")));
extern char _end[] __attribute__((visibility("hidden")));
}

namespace {

enum State { READY, AT_BARRIER, AT_WARP, DONE };
struct Pending { unsigned to; const void* from; int bytes, source_bytes, group; };

// Sums of wgmma on their way to a thread's registers, and what its warpgroup's instructions read meanwhile.
struct Sums { std::vector<void*> out; std::vector<float> values; int group; };
struct Reads { unsigned warpgroup; int group; std::vector<unsigned> chunks; };

struct Fiber {
  Dim index;
  unsigned id, warp, lane;
  State state;
  void* sp;
  ucontext_t context;
  int group;  // commit groups so far
  std::vector<Pending> pending;
  // a warp operation in flight
  int op;
  const uint32_t *a, *b, *c;
  const void *fa, *fb, *fc;
  void** out;
  void* fd;
  unsigned address;
  int count, trans, source;
  unsigned issued;  // cp.async so far
  int committed;    // groups of wgmma so far
  std::vector<Sums> sums;
  std::vector<std::pair<unsigned, int>> dirty;  // (byte of shared memory, size) written since the last proxy fence
  uint64_t left, right;
  bool keep;
  uint32_t value;
  const char *shape, *types;
};

struct Shadow { uint32_t write_epoch, read_epoch; uint16_t writer, reader; uint16_t write_warp, read_warp; uint8_t many, pending, dirty, matrix_reads; };
struct Region { char *begin, *end; uint32_t* writers; };

constexpr size_t STACK = 256 << 10, SHARED = 256 << 10;

std::vector<Fiber*> fibers;
char* stacks = nullptr;
size_t stack_count = 0;
Fiber* me = nullptr;
ucontext_t scheduler;
char* shared = nullptr;
Shadow* shadow = nullptr;
unsigned dynamic_bytes, static_bytes, slots[256];
int slot_count;
uint32_t epoch, first_epoch;
std::vector<uint32_t> warp_epoch;
std::vector<Region> regions;
uint32_t launch_thread;  // number of the first thread of this block within the launch
bool check_races = true;
bool failed;
char message[512];
long conflicts, matrix_loads, barriers, copies, mmas, copy_conflicts;
// Destinations of each warp's n-th cp.async, lane by lane: what the hardware writes together.
struct WarpCopy { unsigned to[32]; int bytes, lanes; };
std::vector<std::vector<WarpCopy>> warp_copies;
void (*kernel)(void**);
void** arguments;

void fault(const char* format, ...) {
  if (!failed) {
    failed = true;
    va_list list;
    va_start(list, format);
    int n = 0;
    if (me) n = snprintf(message, sizeof message, "thread (%u,%u,%u): ", me->index.x, me->index.y, me->index.z);
    vsnprintf(message + n, sizeof message - n, format, list);
    va_end(list);
  }
  if (me) {
    me = nullptr;
    setcontext(&scheduler);  // the block is given up: its fibers are never resumed
  }
}

#if defined(__x86_64__)
extern "C" void tvmx_switch(void** save, void* load);
asm(R"(
.text
.globl tvmx_switch
.hidden tvmx_switch
tvmx_switch:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");
void* scheduler_sp;
void enter(Fiber* f) { tvmx_switch(&scheduler_sp, f->sp); }
void leave(Fiber* f) { tvmx_switch(&f->sp, scheduler_sp); }
#else
void enter(Fiber* f) { swapcontext(&scheduler, &f->context); }
void leave(Fiber* f) { swapcontext(&f->context, &scheduler); }
#endif

void wait(State s) {
  Fiber* self = me;
  self->state = s;
  leave(self);
  me = self;
  tvmx_thread = self->index;
}

void body() {
  Fiber* self = me;
  tvmx_thread = self->index;
  kernel(arguments);
  me = self;
  wait(DONE);
}

float half_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023, u;
  if (e == 0) {
    float f = m * 5.9604644775390625e-8f;
    memcpy(&u, &f, 4);
    u |= sign;
  } else {
    u = sign | (e == 31 ? 0x7f800000u : (e + 112) << 23) | m << 13;
  }
  float f;
  memcpy(&f, &u, 4);
  return f;
#endif
}

uint16_t float_to_half(float f) {
#if defined(__F16C__)
  return _cvtss_sh(f, 0);
#else
  uint32_t u;
  memcpy(&u, &f, 4);
  uint32_t sign = (u >> 16) & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return sign | 0x7e00 | ((u >> 13) & 0x1ff);
  if (u >= 0x47800000) return sign | 0x7c00;
  if (u < 0x38800000) {  // subnormal: the addition rounds to nearest even at 2^-24
    float g;
    memcpy(&g, &u, 4);
    g += 0.5f;
    memcpy(&u, &g, 4);
    return sign | (u - 0x3f000000);
  }
  u += 0xfff + ((u >> 13) & 1);
  return sign | ((u - 0x38000000) >> 13 > 0x7c00 ? 0x7c00 : (u - 0x38000000) >> 13);
#endif
}

float bf16_to_float(uint16_t h) {
  uint32_t u = (uint32_t)h << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

// Two accesses of one warp are also ordered by __syncwarp.
bool ordered(uint32_t at, uint16_t who, uint16_t warp_at) {
  if (at != epoch || who == me->id) return true;
  return who / 32 == me->warp && warp_at != (uint16_t)warp_epoch[me->warp];
}

void shared_access(size_t at, int size, bool write, bool async = false) {
  if (at + size > dynamic_bytes + static_bytes)
    return fault("%s of %d bytes at %zu of shared memory, which has %u", write ? "write" : "read", size, at,
                 dynamic_bytes + static_bytes);
  if (!check_races) return;
  if (write && me->dirty.size() < (1 << 16)) me->dirty.push_back({(unsigned)at, size});
  for (int i = 0; i < size; ++i) {
    Shadow& s = shadow[at + i];
    if (write && s.matrix_reads)
      return fault("write of byte %zu of shared memory that a wgmma in flight reads", at + i);
    if (s.pending && !async)
      return fault("%s of byte %zu of shared memory while an asynchronous copy to it is in flight",
                   write ? "write" : "read", at + i);
    bool written = s.write_epoch >= first_epoch;
    if (!write && !written) return fault("read of byte %zu of shared memory, which nobody wrote", at + i);
    if (written && !ordered(s.write_epoch, s.writer, s.write_warp))
      return fault("race on byte %zu of shared memory: %s, and thread %u wrote it with no barrier between", at + i,
                   write ? "written" : "read", s.writer);
    if (write) {
      if (s.read_epoch == epoch && (s.many || !ordered(s.read_epoch, s.reader, s.read_warp)))
        return fault("race on byte %zu of shared memory: written, and thread %u read it with no barrier between",
                     at + i, s.reader);
      s.write_epoch = epoch;
      s.dirty = 1;
      s.writer = me->id;
      s.write_warp = warp_epoch[me->warp];
      s.many = 0;
    } else {
      if (s.read_epoch == epoch && s.reader != me->id) s.many = 1;
      if (s.read_epoch != epoch) s.many = 0;
      s.read_epoch = epoch;
      s.reader = me->id;
      s.read_warp = warp_epoch[me->warp];
    }
  }
}

void access(const void* pointer, size_t size, bool write, bool aligned) {
  if (!me) return;
  char* p = (char*)pointer;
  if (p >= stacks && p < stacks + stack_count * STACK) return;
  if (aligned && size <= 16 && (uintptr_t)p % size)
    return fault("%s of %zu bytes at an address that is %zu past a multiple of it", write ? "write" : "read", size,
                 (size_t)((uintptr_t)p % size));
  if (p >= shared && p < shared + SHARED) return shared_access(p - shared, size, write);
  for (Region& r : regions) {
    if (r.begin == r.end) continue;  // a scalar argument, or an empty tensor
    if (p + size <= r.begin - 4096 || p >= r.end + 4096) continue;
    if (p < r.begin || p + size > r.end)
      return fault("%s of %zu bytes at offset %ld of argument %zu, which has %zu bytes", write ? "write" : "read", size,
                   (long)(p - r.begin), (size_t)(&r - regions.data()), (size_t)(r.end - r.begin));
    if (!check_races) return;
    uint32_t self = launch_thread + me->id + 1;
    for (size_t i = 0; i < size; ++i) {
      uint32_t& w = r.writers[p - r.begin + i];
      if (w && w != self)
        return fault("%s of byte %ld of argument %zu, which another thread of this kernel wrote",
                     write ? "write" : "read", (long)(p - r.begin + i), (size_t)(&r - regions.data()));
      if (write) w = self;
    }
    return;
  }
  if (p >= __ehdr_start && p < _end) return;
  fault("%s of %zu bytes at %p, which is no tensor", write ? "write" : "read", size, pointer);
}

// ---- warp operations: the last lane to arrive does the work for all
enum { OP_LDMATRIX = 1, OP_MMA, OP_SHUFFLE, OP_WMMA, OP_SYNC, OP_WGMMA, OP_WGMMA_WAIT };

std::vector<Fiber*> group_of(Fiber* f, unsigned size) {
  std::vector<Fiber*> w;
  unsigned first = f->id / size * size;
  for (unsigned i = first; i < fibers.size() && i < first + size; ++i) w.push_back(fibers[i]);
  return w;
}
std::vector<Fiber*> warp_of(Fiber* f) { return group_of(f, 32); }
std::vector<Reads> matrix_reads;

void full(const std::vector<Fiber*>& w, const char* what) {
  if (w.size() != 32) fault("%s in a warp of %zu threads", what, w.size());
}

void do_ldmatrix(std::vector<Fiber*>& w) {
  full(w, "ldmatrix");
  int count = w[0]->count;
  for (int m = 0; m < count; ++m) {
    unsigned groups[8] = {}, worst = 1;
    for (int r = 0; r < 8; ++r) {
      Fiber* f = w[m * 8 + r];
      unsigned g = f->address / 16 % 8;
      for (int q = 0; q < r; ++q)
        if (w[m * 8 + q]->address == f->address) goto next;  // the same row twice is a broadcast
      if (++groups[g] > worst) worst = groups[g];
    next:;
    }
    matrix_loads += 1;
    conflicts += worst - 1;
    for (int l = 0; l < 32; ++l) {
      uint16_t v[2];
      for (int h = 0; h < 2; ++h) {
        int row = w[0]->trans ? l % 4 * 2 + h : l / 4, column = w[0]->trans ? l / 4 : l % 4 * 2 + h;
        memcpy(&v[h], shared + w[m * 8 + row]->address + column * 2, 2);
      }
      memcpy(w[l]->out[m], v, 4);
    }
  }
}

template <class A, class C> void mma_lanes(std::vector<Fiber*>& w, int k, A element, C) {
  // PTX ISA, matrix fragments for mma.m16n8k16 (16-bit) and m16n8k32 (8-bit): `per` elements to a register
  int per = k / 8;
  static thread_local C a[16][64], b[64][8];
  for (int l = 0; l < 32; ++l) {
    int g = l / 4, t = l % 4;
    for (int r = 0; r < 4; ++r)
      for (int e = 0; e < per; ++e)
        a[g + 8 * (r % 2)][t * per + e + 4 * per * (r / 2)] = element(w[l]->a[r], e);
    for (int r = 0; r < 2; ++r)
      for (int e = 0; e < per; ++e) b[t * per + e + 4 * per * r][g] = element(w[l]->b[r], e);
  }
  bool narrow = strncmp(w[0]->types, "f16", 3) == 0;  // f16 accumulators: two to a register
  for (int l = 0; l < 32; ++l) {
    int g = l / 4, t = l % 4;
    for (int i = 0; i < 4; ++i) {
      int row = g + 8 * (i / 2), column = t * 2 + i % 2;
      C sum = 0;
      for (int x = 0; x < k; ++x) sum += a[row][x] * b[x][column];
      if (narrow) {
        uint16_t h = w[l]->c[i / 2] >> 16 * (i % 2);
        h = float_to_half((float)(sum + (C)half_to_float(h)));
        memcpy((char*)w[l]->out[i / 2] + 2 * (i % 2), &h, 2);
      } else {
        C c;
        memcpy(&c, &w[l]->c[i], 4);
        c += sum;
        memcpy(w[l]->out[i], &c, 4);
      }
    }
  }
}

void do_mma(std::vector<Fiber*>& w) {
  full(w, "mma");
  const char *shape = w[0]->shape, *types = w[0]->types;
  auto f16 = [](uint32_t r, int e) { return half_to_float(r >> 16 * e); };
  auto bf16 = [](uint32_t r, int e) { return bf16_to_float(r >> 16 * e); };
  auto s8 = [](uint32_t r, int e) { return (int32_t)(int8_t)(r >> 8 * e); };
  auto is = [&](const char* s, const char* t) { return !strcmp(shape, s) && !strcmp(types, t); };
  mmas += 1;
  if (is("m16n8k16", "f32.f16.f16.f32") || is("m16n8k16", "f16.f16.f16.f16")) return mma_lanes(w, 16, f16, 0.0f);
  if (is("m16n8k16", "f32.bf16.bf16.f32")) return mma_lanes(w, 16, bf16, 0.0f);
  if (is("m16n8k32", "s32.s8.s8.s32")) return mma_lanes(w, 32, s8, (int32_t)0);
  fault("the emulator does not know mma %s %s", shape, types);
}

template <class T, class C, class E> void wmma_lanes(std::vector<Fiber*>& w, E element, C) {
  C a[256], b[256];
  for (int l = 0; l < 32; ++l)
    for (int i = 0; i < 8; ++i) {
      a[l * 8 + i] = element(((const T*)w[l]->fa)[i]);
      b[l * 8 + i] = element(((const T*)w[l]->fb)[i]);
    }
  bool narrow = w[0]->count == 1;
  for (int l = 0; l < 32; ++l)
    for (int i = 0; i < 8; ++i) {
      int r = (l * 8 + i) / 16, c = (l * 8 + i) % 16;
      C sum = 0;
      for (int k = 0; k < 16; ++k) sum += a[r * 16 + k] * b[k * 16 + c];
      if (narrow) {
        ((uint16_t*)w[l]->fd)[i] = float_to_half((float)(sum + (C)half_to_float(((const uint16_t*)w[l]->fc)[i])));
      } else {
        C add;
        memcpy(&add, (const C*)w[l]->fc + i, sizeof add);
        add += sum;
        memcpy((C*)w[l]->fd + i, &add, sizeof add);
      }
    }
}

void do_wmma(std::vector<Fiber*>& w) {
  full(w, "wmma");
  mmas += 1;
  if (w[0]->count == 2)
    wmma_lanes<int8_t>(w, [](int8_t v) { return (int32_t)v; }, (int32_t)0);
  else
    wmma_lanes<uint16_t>(w, [](uint16_t v) { return half_to_float(v); }, 0.0f);
}

void do_shuffle(std::vector<Fiber*>& w) {
  std::vector<uint32_t> values;
  for (Fiber* f : w) values.push_back(f->value);
  for (Fiber* f : w) f->value = f->source >= 0 && f->source < (int)w.size() ? values[f->source] : values[f->lane];
}

// wgmma m64nNk16, both operands K-major in shared memory, as their descriptors say (PTX ISA, matrix descriptor).
struct Descriptor {
  unsigned address, stride;
  explicit Descriptor(uint64_t d) : address((d & 0x3fff) << 4), stride((d >> 32 & 0x3fff) << 4) {
    if (d >> 62 != 1) fault("the emulator knows wgmma operands in the 128-byte swizzle only");
    if (d >> 49 & 7) fault("the emulator knows no base offset of a wgmma operand");
  }
  // Where element (row, k) lies: rows of 128 bytes in groups of eight, 16-byte chunks permuted by the address's bits.
  unsigned at(int row, int k) const {
    unsigned plain = address + row / 8 * stride + row % 8 * 128 + k * 2;
    return plain ^ (plain >> 7 & 7) << 4;
  }
};

float matrix_element(unsigned at, bool bf16, std::vector<unsigned>& chunks) {
  if (at + 2 > dynamic_bytes + static_bytes) fault("wgmma reads byte %u of shared memory, which has %u", at, dynamic_bytes);
  if (at % 16 == 0) {
    for (unsigned i = at; check_races && i < at + 16; ++i) {
      Shadow& s = shadow[i];
      if (s.pending) fault("wgmma reads byte %u of shared memory while an asynchronous copy to it is in flight", i);
      if (s.write_epoch < first_epoch) fault("wgmma reads byte %u of shared memory, which nobody wrote", i);
      if (s.write_epoch == epoch) fault("race on byte %u of shared memory: thread %u wrote it, and wgmma reads it with no "
                                        "barrier between", i, s.writer);
      if (s.dirty) fault("wgmma reads byte %u of shared memory, written with no fence.proxy.async after it", i);
    }
    chunks.push_back(at);
  }
  uint16_t bits;
  memcpy(&bits, shared + at, 2);
  return bf16 ? bf16_to_float(bits) : half_to_float(bits);
}

void do_wgmma(std::vector<Fiber*>& w) {
  if (w.size() != 128) return fault("wgmma in a warpgroup of %zu threads", w.size());
  int registers = w[0]->count, n = registers * 2;
  bool bf16 = strstr(w[0]->types, "bf16") != nullptr;
  for (Fiber* f : w)
    if (f->left != w[0]->left || f->right != w[0]->right) return fault("the threads of a warpgroup give wgmma other operands");
  Descriptor left(w[0]->left), right(w[0]->right);
  Reads reads = {me->id / 128, me->committed, {}};
  std::vector<float> a(64 * 16), b(n * 16);
  for (int r = 0; r < 64; ++r)
    for (int k = 0; k < 16; ++k) a[r * 16 + k] = matrix_element(left.at(r, k), bf16, reads.chunks);
  for (int r = 0; r < n; ++r)
    for (int k = 0; k < 16; ++k) b[r * 16 + k] = matrix_element(right.at(r, k), bf16, reads.chunks);
  for (unsigned c : reads.chunks)
    for (int i = 0; i < 16; ++i) ++shadow[c + i].matrix_reads;
  matrix_reads.push_back(reads);
  mmas += 4;
  for (Fiber* f : w) {
    const Sums* before = nullptr;
    for (const Sums& s : f->sums)
      if (s.out[0] == f->out[0]) before = &s;
    Sums made = {std::vector<void*>(f->out, f->out + registers), std::vector<float>(registers), f->committed};
    int t = f->id % 128;
    for (int i = 0; i < registers; ++i) {
      int row = t / 32 * 16 + t % 32 / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
      float sum = 0;
      if (f->keep) {
        if (before) sum = before->values[i];
        else memcpy(&sum, f->out[i], 4);
      }
      float product = 0;
      for (int k = 0; k < 16; ++k) product += a[row * 16 + k] * b[column * 16 + k];
      made.values[i] = sum + product;
    }
    f->sums.push_back(std::move(made));
  }
}

void do_wgmma_wait(std::vector<Fiber*>& w) {
  for (Fiber* f : w) {
    std::vector<Sums> left;
    for (Sums& s : f->sums) {
      if (s.group >= f->committed - f->count) {
        left.push_back(std::move(s));
        continue;
      }
      for (size_t i = 0; i < s.out.size(); ++i) memcpy(s.out[i], &s.values[i], 4);
    }
    f->sums.swap(left);
  }
  std::vector<Reads> left;
  for (Reads& r : matrix_reads) {
    if (r.warpgroup != w[0]->id / 128 || r.group >= w[0]->committed - w[0]->count) {
      left.push_back(std::move(r));
      continue;
    }
    for (unsigned c : r.chunks)
      for (int i = 0; i < 16; ++i) --shadow[c + i].matrix_reads;
  }
  matrix_reads.swap(left);
}

const char* const OP_NAMES[] = {"", "ldmatrix", "mma", "shuffle", "wmma", "__syncwarp", "wgmma", "wgmma.wait_group"};

void warp_operation(int op) {
  me->op = op;
  auto w = group_of(me, op >= OP_WGMMA ? 128 : 32);
  bool last = true;
  for (Fiber* f : w)
    if (f != me && f->state != AT_WARP) last = false;
  if (!last) return wait(AT_WARP);
  for (Fiber* f : w)
    if (f->op != op) return fault("%s while lane %u of its warp is at %s", OP_NAMES[op], f->lane, OP_NAMES[f->op]);
  if (op == OP_LDMATRIX) do_ldmatrix(w);
  if (op == OP_MMA) do_mma(w);
  if (op == OP_SHUFFLE) do_shuffle(w);
  if (op == OP_WMMA) do_wmma(w);
  if (op == OP_WGMMA) do_wgmma(w);
  if (op == OP_WGMMA_WAIT) do_wgmma_wait(w);
  if (op == OP_SYNC) warp_epoch[me->warp] += 1;
  for (Fiber* f : w)
    if (f != me) f->state = READY;
}

bool run_block(bool reverse) {
  unsigned n = fibers.size();
  for (unsigned left = n; left;) {
    bool moved = false;
    for (unsigned k = 0; k < n; ++k) {
      Fiber* f = fibers[reverse ? n - 1 - k : k];
      if (f->state != READY) continue;
      me = f;
      enter(f);
      me = nullptr;
      if (failed) return false;
      moved = true;
      if (f->state == DONE) --left;
    }
    if (moved) continue;
    unsigned at_barrier = 0, at_warp = 0;
    for (Fiber* f : fibers) at_barrier += f->state == AT_BARRIER, at_warp += f->state == AT_WARP;
    if (at_warp || at_barrier != n) {
      fault("%u threads wait at a barrier and %u in a warp operation while %u have ended", at_barrier, at_warp,
            n - at_barrier - at_warp);
      return false;
    }
    ++epoch, ++barriers;
    for (Fiber* f : fibers) f->state = READY;
  }
  return true;
}

void prepare(unsigned count, Dim block) {
  if (stack_count < count) {
    if (stacks) munmap(stacks, stack_count * STACK);
    stacks = (char*)mmap(nullptr, count * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    stack_count = count;
  }
  while (fibers.size() < count) fibers.push_back(new Fiber());
  while (fibers.size() > count) {
    delete fibers.back();
    fibers.pop_back();
  }
  for (unsigned i = 0; i < count; ++i) {
    Fiber* f = fibers[i];
    f->index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
    f->id = i, f->warp = i / 32, f->lane = i % 32, f->state = READY, f->group = 0, f->issued = 0, f->committed = 0;
    f->sums.clear(), f->dirty.clear();
    f->pending.clear();
    char* top = stacks + (i + 1) * STACK - 64;
#if defined(__x86_64__)
    void** sp = (void**)((uintptr_t)top & ~(uintptr_t)63);
    *--sp = nullptr;  // body's return address: at its entry the stack is 8 past a multiple of 16
    *--sp = (void*)body;
    for (int r = 0; r < 6; ++r) *--sp = nullptr;
    f->sp = sp;
#else
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = stacks + i * STACK;
    f->context.uc_stack.ss_size = top - (stacks + i * STACK);
    makecontext(&f->context, body, 0);
#endif
  }
  warp_epoch.assign((count + 31) / 32, 0);
  warp_copies.assign((count + 31) / 32, {});
  matrix_reads.clear();
}

// 128 bytes are written at a time: by 8 lanes of 16 bytes, 16 of 8, 32 of 4. Extra wavefronts beyond those are conflicts.
void count_copy_conflicts() {
  for (auto& warp : warp_copies)
    for (WarpCopy& c : warp) {
      if (c.lanes != 32) continue;  // lanes went different ways
      int together = 128 / c.bytes;
      for (int start = 0; start < 32; start += together) {
        unsigned words[32] = {}, worst = 1;
        for (int l = start; l < start + together; ++l)
          for (int b = 0; b < c.bytes; b += 4) {
            unsigned& n = words[(c.to[l] + b) / 4 % 32];
            if (++n > worst) worst = n;
          }
        copy_conflicts += worst - 1;
      }
    }
}

}  // namespace

extern "C" {

void* tvmx_dynamic_shared() { return shared; }

void* tvmx_static_shared(int slot, unsigned bytes) {
  if (slot >= 256) fault("more than 256 shared arrays"), slot = 255;
  while (slot_count <= slot) slots[slot_count++] = ~0u;
  if (slots[slot] == ~0u) {
    unsigned at = (dynamic_bytes + static_bytes + 127) / 128 * 128;
    if (at + bytes > SHARED) {
      fault("more than %zu bytes of shared memory", SHARED);
      return shared;
    }
    slots[slot] = at;
    static_bytes = at + bytes - dynamic_bytes;
  }
  return shared + slots[slot];
}

void tvmx_barrier() { wait(AT_BARRIER); }
void tvmx_warp_barrier() { warp_operation(OP_SYNC); }
unsigned tvmx_lane() { return me->lane; }
unsigned tvmx_active_mask() {
  unsigned n = warp_of(me).size();
  return n == 32 ? 0xffffffffu : (1u << n) - 1;
}

unsigned tvmx_shared_address(const void* p) {
  if ((char*)p < shared || (char*)p >= shared + SHARED) fault("%p is not in shared memory", p);
  return (char*)p - shared;
}

void tvmx_ldmatrix(unsigned address, int count, int trans, void** out) {
  if ((int)me->lane < count * 8) {
    if (address % 16) fault("ldmatrix of a row at byte %u, which is no multiple of 16", address);
    shared_access(address, 16, false);
  }
  me->address = address, me->count = count, me->trans = trans, me->out = out;
  warp_operation(OP_LDMATRIX);
}

void tvmx_mma(const char* shape, const char* types, void** d, const uint32_t* a, const uint32_t* b, const uint32_t* c) {
  me->shape = shape, me->types = types, me->out = d, me->a = a, me->b = b, me->c = c;
  warp_operation(OP_MMA);
}

void tvmx_wmma(int kind, const void* a, int, const void* b, int, const void* c, void* d) {
  me->count = kind, me->fa = a, me->fb = b, me->fc = c, me->fd = d;
  warp_operation(OP_WMMA);
}

void tvmx_wgmma(const char* types, void** out, int registers, uint64_t left, uint64_t right, int keep) {
  me->types = types, me->out = out, me->count = registers, me->left = left, me->right = right, me->keep = keep != 0;
  warp_operation(OP_WGMMA);
}

void tvmx_wgmma_commit() { ++me->committed; }

void tvmx_wgmma_wait(int groups) {
  me->count = groups;
  warp_operation(OP_WGMMA_WAIT);
}

void tvmx_proxy_fence() {
  for (auto& d : me->dirty)
    for (int i = 0; i < d.second; ++i) shadow[d.first + i].dirty = 0;
  me->dirty.clear();
}

uint32_t tvmx_shuffle(uint32_t value, int source) {
  me->value = value, me->source = source;
  warp_operation(OP_SHUFFLE);
  return me->value;
}

void tvmx_cp_async(unsigned to, const void* from, int bytes, int source_bytes) {
  if (to % bytes) fault("cp.async of %d bytes to byte %u of shared memory", bytes, to);
  if (source_bytes != 0 && source_bytes != bytes) fault("cp.async of %d bytes with %d of source", bytes, source_bytes);
  if (source_bytes) access(from, source_bytes, false, true);
  // The hardware may write at any time from now on: nobody may still be reading what was there.
  shared_access(to, bytes, true);
  for (int i = 0; i < bytes; ++i) shadow[to + i].pending = 1;
  auto& mine = warp_copies[me->warp];
  if (me->issued == mine.size()) mine.push_back({{}, bytes, 0});
  WarpCopy& one = mine[me->issued++];
  if (one.bytes == bytes) one.to[me->lane] = to, ++one.lanes;
  me->pending.push_back({to, from, bytes, source_bytes, me->group});
  ++copies;
}

void tvmx_cp_commit() { ++me->group; }

void tvmx_cp_wait(int groups) {
  std::vector<Pending> left;
  for (Pending& p : me->pending) {
    if (p.group >= me->group - groups) {
      left.push_back(p);
      continue;
    }
    memset(shared + p.to, 0, p.bytes);
    memcpy(shared + p.to, p.from, p.source_bytes);
    for (int i = 0; i < p.bytes; ++i) shadow[p.to + i].pending = 0;
    shared_access(p.to, p.bytes, true);
  }
  me->pending.swap(left);
}

float tvmx_half_to_float(uint16_t bits) { return half_to_float(bits); }
uint16_t tvmx_float_to_half(float value) { return float_to_half(value); }
void tvmx_unsupported(const char* what) { fault("the emulator does not know this instruction: %s", what); }

// ---- hooks of -fsanitize=thread
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
#define HOOK(n) \
  void __tsan_read##n(void* p) { access(p, n, false, true); } \
  void __tsan_write##n(void* p) { access(p, n, true, true); } \
  void __tsan_volatile_read##n(void* p) { access(p, n, false, true); } \
  void __tsan_volatile_write##n(void* p) { access(p, n, true, true); } \
  void __tsan_unaligned_read##n(void* p) { access(p, n, false, false); } \
  void __tsan_unaligned_write##n(void* p) { access(p, n, true, false); }
HOOK(1) HOOK(2) HOOK(4) HOOK(8) HOOK(16)
void __tsan_read_range(void* p, size_t n) { access(p, n, false, false); }
void __tsan_write_range(void* p, size_t n) { access(p, n, true, false); }
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  access(from, n, false, false), access(to, n, true, false);
  return memcpy(to, from, n);
}
void* __tsan_memset(void* to, int v, size_t n) {
  access(to, n, true, false);
  return memset(to, v, n);
}

struct Figures { long conflicts, matrix_loads, barriers, copies, mmas, copy_conflicts; };

// Run one launch. 0, or 1 with the reason in `reason` (512 bytes).
int tvmx_emulate(void (*entry)(void**), void** pointers, const uint64_t* sizes, int count, const unsigned* grid,
                 const unsigned* block, unsigned shared_bytes, int reverse, int races, Figures* figures, char* reason) {
  static bool once = false;
  if (!once) {
    shared = (char*)mmap(nullptr, SHARED, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    shadow = (Shadow*)calloc(SHARED, sizeof(Shadow));
    once = true;
  }
  failed = false, check_races = races != 0, kernel = entry, arguments = pointers;
  conflicts = matrix_loads = barriers = copies = mmas = copy_conflicts = 0;
  for (int i = 0; i < count; ++i)
    regions.push_back({(char*)pointers[i], (char*)pointers[i] + sizes[i], (uint32_t*)calloc(sizes[i] ? sizes[i] : 1, 4)});
  tvmx_grid_dim = {grid[0], grid[1], grid[2]};
  tvmx_block_dim = {block[0], block[1], block[2]};
  unsigned threads = block[0] * block[1] * block[2];
  launch_thread = 0;
  dynamic_bytes = shared_bytes;
  for (unsigned z = 0; z < grid[2] && !failed; ++z)
    for (unsigned y = 0; y < grid[1] && !failed; ++y)
      for (unsigned x = 0; x < grid[0] && !failed; ++x) {
        tvmx_block = {x, y, z};
        prepare(threads, tvmx_block_dim);
        static_bytes = 0, slot_count = 0;
        memset(shared, 0xff, SHARED > shared_bytes ? shared_bytes : SHARED);
        first_epoch = ++epoch;
        for (unsigned i = 0; i < SHARED; ++i) shadow[i].pending = shadow[i].dirty = shadow[i].matrix_reads = 0;
        getcontext(&scheduler);
        if (!failed) run_block(reverse != 0);
        count_copy_conflicts();
        launch_thread += threads;
      }
  me = nullptr;
  for (Region& r : regions) free(r.writers);
  regions.clear();
  *figures = {conflicts, matrix_loads, barriers, copies, mmas, copy_conflicts};
  if (failed) snprintf(reason, 512, "block (%u,%u,%u) %s", tvmx_block.x, tvmx_block.y, tvmx_block.z, message);
  return failed;
}
}
