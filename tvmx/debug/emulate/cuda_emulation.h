// What CUDA source needs to compile as C++ for the CPU emulator. The work is done in runtime.cpp.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

namespace tvmx_emu {

struct Dim { unsigned x, y, z; };
extern "C" {
extern Dim tvmx_thread, tvmx_block, tvmx_grid_dim, tvmx_block_dim;
void* tvmx_dynamic_shared();
void* tvmx_static_shared(int slot, unsigned bytes);
void tvmx_barrier();
void tvmx_warp_barrier();
unsigned tvmx_shared_address(const void* p);
void tvmx_ldmatrix(unsigned address, int count, int trans, void** out);
void tvmx_mma(const char* shape, const char* types, void** d, const uint32_t* a, const uint32_t* b, const uint32_t* c);
void tvmx_cp_async(unsigned to, const void* from, int bytes, int source_bytes);
void tvmx_cp_commit();
void tvmx_wgmma(const char* types, void** out, int registers, uint64_t left, uint64_t right, int keep);
void tvmx_wgmma_commit();
void tvmx_wgmma_wait(int groups);
void tvmx_proxy_fence();
void tvmx_cp_wait(int groups);
uint32_t tvmx_shuffle(uint32_t value, int source_lane);
unsigned tvmx_lane();
unsigned tvmx_active_mask();
void tvmx_wmma(int kind, const void* a, int a_col, const void* b, int b_col, const void* c, void* d);
float tvmx_half_to_float(uint16_t bits);
uint16_t tvmx_float_to_half(float value);
void tvmx_unsupported(const char* what);
}

template <class T> inline uint32_t bits(T v) {
  static_assert(sizeof(T) <= 4, "at most a 32-bit register");
  uint32_t r = 0;
  std::memcpy(&r, &v, sizeof v);
  return r;
}
template <class T> inline T from_bits(uint32_t r) {
  T v;
  std::memcpy(&v, &r, sizeof v);
  return v;
}
}  // namespace tvmx_emu

#define threadIdx (tvmx_emu::tvmx_thread)
#define blockIdx (tvmx_emu::tvmx_block)
#define gridDim (tvmx_emu::tvmx_grid_dim)
#define blockDim (tvmx_emu::tvmx_block_dim)

inline void __syncthreads() { tvmx_emu::tvmx_barrier(); }
inline void __syncwarp(unsigned = 0xffffffffu) { tvmx_emu::tvmx_warp_barrier(); }
inline unsigned __cvta_generic_to_shared(const void* p) { return tvmx_emu::tvmx_shared_address(p); }
inline unsigned __activemask() { return tvmx_emu::tvmx_active_mask(); }

template <class T> inline T __shfl_sync(unsigned, T v, int lane, int width = 32) {
  int me = tvmx_emu::tvmx_lane();
  return tvmx_emu::from_bits<T>(tvmx_emu::tvmx_shuffle(tvmx_emu::bits(v), me / width * width + (lane & (width - 1))));
}
template <class T> inline T __shfl_down_sync(unsigned, T v, unsigned d, int width = 32) {
  int me = tvmx_emu::tvmx_lane(), to = me + (int)d;
  return tvmx_emu::from_bits<T>(tvmx_emu::tvmx_shuffle(tvmx_emu::bits(v), to / width == me / width ? to : me));
}
template <class T> inline T __shfl_up_sync(unsigned, T v, unsigned d, int width = 32) {
  int me = tvmx_emu::tvmx_lane(), to = me - (int)d;
  return tvmx_emu::from_bits<T>(tvmx_emu::tvmx_shuffle(tvmx_emu::bits(v), to >= me / width * width ? to : me));
}
template <class T> inline T __shfl_xor_sync(unsigned, T v, int mask, int width = 32) {
  int me = tvmx_emu::tvmx_lane(), to = me ^ mask;
  return tvmx_emu::from_bits<T>(tvmx_emu::tvmx_shuffle(tvmx_emu::bits(v), to / width == me / width ? to : me));
}

// ---- half: 16 bits of storage, arithmetic in float rounded once, which equals IEEE half arithmetic for + - * /.
struct half {
  uint16_t raw;
  half() = default;
  half(float v) : raw(tvmx_emu::tvmx_float_to_half(v)) {}
  half(double v) : half((float)v) {}
  half(int v) : half((float)v) {}
  half(unsigned v) : half((float)v) {}
  half(long v) : half((float)v) {}
  half(bool v) : half((float)v) {}
  half(signed char v) : half((float)v) {}
  half(const half&) = default;
  half(const volatile half& o) : raw(o.raw) {}
  half& operator=(const half&) = default;
  void operator=(half o) volatile { raw = o.raw; }
  operator float() const { return tvmx_emu::tvmx_half_to_float(raw); }
  half& operator+=(half o) { return *this = half((float)*this + (float)o); }
  half& operator-=(half o) { return *this = half((float)*this - (float)o); }
  half& operator*=(half o) { return *this = half((float)*this * (float)o); }
};
using __half = half;
#define TVMX_HALF_OP(op) \
  inline half operator op(half a, half b) { return half((float)a op (float)b); }
TVMX_HALF_OP(+) TVMX_HALF_OP(-) TVMX_HALF_OP(*) TVMX_HALF_OP(/)
#undef TVMX_HALF_OP
#define TVMX_HALF_COMPARE(op) \
  inline bool operator op(half a, half b) { return (float)a op (float)b; }
TVMX_HALF_COMPARE(<) TVMX_HALF_COMPARE(>) TVMX_HALF_COMPARE(<=) TVMX_HALF_COMPARE(>=)
TVMX_HALF_COMPARE(==) TVMX_HALF_COMPARE(!=)
#undef TVMX_HALF_COMPARE
inline half operator-(half a) { half r; r.raw = a.raw ^ 0x8000; return r; }
struct __attribute__((aligned(4))) half2 {
  half x, y;
  half2() = default;
  half2(half a, half b) : x(a), y(b) {}
};
using __half2 = half2;
inline half2 make_half2(half a, half b) { return half2(a, b); }
inline half2 __halves2half2(half a, half b) { return half2(a, b); }
inline float __half2float(half v) { return v; }
inline half __float2half(float v) { return half(v); }
inline half __float2half_rn(float v) { return half(v); }
inline half __short_as_half(short v) { half r; r.raw = (uint16_t)v; return r; }
inline half __ushort_as_half(unsigned short v) { half r; r.raw = v; return r; }
inline unsigned short __half_as_ushort(half v) { return v.raw; }
inline bool __hgt(half a, half b) { return (float)a > (float)b; }
inline bool __hlt(half a, half b) { return (float)a < (float)b; }
inline bool __hle(half a, half b) { return (float)a <= (float)b; }
inline bool __hge(half a, half b) { return (float)a >= (float)b; }
inline half __hmax(half a, half b) { return __hgt(a, b) ? a : b; }
inline half __hmin(half a, half b) { return __hlt(a, b) ? a : b; }
inline half __hfma(half a, half b, half c) { return half(std::fma((double)(float)a, (double)(float)b, (double)(float)c)); }
#define TVMX_HALF_MATH(name, f) \
  inline half name(half x) { return half(f((float)x)); }
TVMX_HALF_MATH(hexp, std::exp) TVMX_HALF_MATH(hexp2, std::exp2) TVMX_HALF_MATH(hexp10, exp10f)
TVMX_HALF_MATH(hlog, std::log) TVMX_HALF_MATH(hlog2, std::log2) TVMX_HALF_MATH(hlog10, std::log10)
TVMX_HALF_MATH(hsqrt, std::sqrt) TVMX_HALF_MATH(hfloor, std::floor) TVMX_HALF_MATH(hceil, std::ceil)
TVMX_HALF_MATH(htrunc, std::trunc) TVMX_HALF_MATH(hrint, std::rint) TVMX_HALF_MATH(hsin, std::sin)
TVMX_HALF_MATH(hcos, std::cos) TVMX_HALF_MATH(htanh, std::tanh) TVMX_HALF_MATH(__habs, std::fabs)
TVMX_HALF_MATH(herf, std::erf) TVMX_HALF_MATH(htan, std::tan) TVMX_HALF_MATH(hatan, std::atan)
#undef TVMX_HALF_MATH
inline half hrsqrt(half x) { return half(1.0f / std::sqrt((float)x)); }
inline half hrcp(half x) { return half(1.0f / (float)x); }
inline half hpow(half x, half y) { return half(std::pow((float)x, (float)y)); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __log10f(float x) { return std::log10(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __tanf(float x) { return std::tan(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline int __float2int_rn(float x) { return (int)std::nearbyint(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <class T> inline T __ldg(const T* p) { return *p; }
template <class A, class B> inline typename std::common_type<A, B>::type max(A a, B b) { return a > b ? a : b; }
template <class A, class B> inline typename std::common_type<A, B>::type min(A a, B b) { return a < b ? a : b; }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += (int)(int8_t)(a >> 8 * i) * (int)(int8_t)(b >> 8 * i);
  return c;
}

// ---- bfloat16, by float with one rounding to nearest even
struct nv_bfloat16 {
  uint16_t raw;
  nv_bfloat16() = default;
  nv_bfloat16(float v) {
    uint32_t u = tvmx_emu::bits(v);
    raw = (u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  }
  nv_bfloat16(double v) : nv_bfloat16((float)v) {}
  nv_bfloat16(int v) : nv_bfloat16((float)v) {}
  nv_bfloat16(const nv_bfloat16&) = default;
  nv_bfloat16(const volatile nv_bfloat16& o) : raw(o.raw) {}
  nv_bfloat16& operator=(const nv_bfloat16&) = default;
  void operator=(nv_bfloat16 o) volatile { raw = o.raw; }
  operator float() const { return tvmx_emu::from_bits<float>((uint32_t)raw << 16); }
};
using __nv_bfloat16 = nv_bfloat16;
#define TVMX_BF16_OP(op) \
  inline nv_bfloat16 operator op(nv_bfloat16 a, nv_bfloat16 b) { return nv_bfloat16((float)a op (float)b); }
TVMX_BF16_OP(+) TVMX_BF16_OP(-) TVMX_BF16_OP(*) TVMX_BF16_OP(/)
#undef TVMX_BF16_OP
struct __attribute__((aligned(4))) nv_bfloat162 {
  nv_bfloat16 x, y;
  nv_bfloat162() = default;
  nv_bfloat162(nv_bfloat16 a, nv_bfloat16 b) : x(a), y(b) {}
};
using __nv_bfloat162 = nv_bfloat162;
struct __attribute__((aligned(8))) nv_bfloat164 {
  nv_bfloat16 x, y, z, w;
  nv_bfloat164() = default;
  nv_bfloat164(nv_bfloat16 a, nv_bfloat16 b, nv_bfloat16 c, nv_bfloat16 d) : x(a), y(b), z(c), w(d) {}
};
inline nv_bfloat162 make_nv_bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return nv_bfloat162(x, y); }
inline nv_bfloat164 make_nv_bfloat164(nv_bfloat16 x, nv_bfloat16 y, nv_bfloat16 z, nv_bfloat16 w) {
  return nv_bfloat164(x, y, z, w);
}
#define TVMX_BF16_MATH(name, f) \
  inline nv_bfloat16 name(nv_bfloat16 x) { return nv_bfloat16(f((float)x)); }
TVMX_BF16_MATH(hexp, std::exp) TVMX_BF16_MATH(hexp2, std::exp2) TVMX_BF16_MATH(hlog, std::log)
TVMX_BF16_MATH(hlog2, std::log2) TVMX_BF16_MATH(hsqrt, std::sqrt) TVMX_BF16_MATH(hfloor, std::floor)
TVMX_BF16_MATH(hceil, std::ceil) TVMX_BF16_MATH(htrunc, std::trunc) TVMX_BF16_MATH(hrint, std::rint)
TVMX_BF16_MATH(hsin, std::sin) TVMX_BF16_MATH(hcos, std::cos) TVMX_BF16_MATH(htanh, std::tanh)
TVMX_BF16_MATH(__habs, std::fabs) TVMX_BF16_MATH(herf, std::erf)
#undef TVMX_BF16_MATH
inline float __bfloat162float(nv_bfloat16 v) { return v; }
inline nv_bfloat16 __float2bfloat16(float v) { return nv_bfloat16(v); }
inline nv_bfloat16 __float2bfloat16_rn(float v) { return nv_bfloat16(v); }

// ---- vector types
#define TVMX_VECTORS(T, name) \
  struct __attribute__((aligned(2 * sizeof(T)))) name##2 { T x, y; }; \
  struct name##3 { T x, y, z; }; \
  struct __attribute__((aligned(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16))) name##4 { T x, y, z, w; }; \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
TVMX_VECTORS(signed char, char) TVMX_VECTORS(unsigned char, uchar)
TVMX_VECTORS(short, short) TVMX_VECTORS(unsigned short, ushort)
TVMX_VECTORS(int, int) TVMX_VECTORS(unsigned, uint)
TVMX_VECTORS(float, float) TVMX_VECTORS(double, double)
TVMX_VECTORS(long long, longlong) TVMX_VECTORS(unsigned long long, ulonglong)
#undef TVMX_VECTORS

// ---- wmma 16x16x16. NVIDIA leaves the layout open; here lane l holds elements 8l .. 8l+7 in row-major order.
namespace nvcuda {
namespace wmma {
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };
template <class Use, int M, int N, int K, class T, class Layout = void> struct fragment {
  static_assert(M == 16 && N == 16 && K == 16, "the emulator knows 16x16x16 fragments");
  enum { num_elements = 8 };
  T x[8];
};
template <class U, int M, int N, int K, class T, class L, class V>
inline void fill_fragment(fragment<U, M, N, K, T, L>& f, V v) {
  for (int i = 0; i < 8; ++i) f.x[i] = T(v);
}
template <class U, int M, int N, int K, class T, class L>
inline void load_matrix_sync(fragment<U, M, N, K, T, L>& f, const T* p, unsigned ld) {
  bool col = std::is_same<L, col_major>::value;
  for (int i = 0; i < 8; ++i) {
    int e = tvmx_emu::tvmx_lane() * 8 + i, r = e / 16, c = e % 16;
    f.x[i] = p[col ? c * ld + r : r * ld + c];
  }
}
template <int M, int N, int K, class T>
inline void store_matrix_sync(T* p, const fragment<accumulator, M, N, K, T>& f, unsigned ld, layout_t layout) {
  for (int i = 0; i < 8; ++i) {
    int e = tvmx_emu::tvmx_lane() * 8 + i, r = e / 16, c = e % 16;
    p[layout == mem_col_major ? c * ld + r : r * ld + c] = f.x[i];
  }
}
inline constexpr int wmma_kind(half, float) { return 0; }
inline constexpr int wmma_kind(half, half) { return 1; }
inline constexpr int wmma_kind(signed char, int) { return 2; }
template <int M, int N, int K, class T, class LA, class LB, class D>
inline void mma_sync(fragment<accumulator, M, N, K, D>& d, const fragment<matrix_a, M, N, K, T, LA>& a,
                     const fragment<matrix_b, M, N, K, T, LB>& b, const fragment<accumulator, M, N, K, D>& c) {
  tvmx_emu::tvmx_wmma(wmma_kind(T(), D()), a.x, 0, b.x, 0, c.x, d.x);
}
}  // namespace wmma
}  // namespace nvcuda
