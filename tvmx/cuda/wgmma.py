"""The device function of `cuda.wgmma`: 128 × 128 of A · Bᵀ on Hopper's wgmma, operands staged by cp.async.

PTX ISA 8.0: "Asynchronous Warpgroup Level Matrix Multiply-Accumulate"; both operands K-major in the 128-byte swizzle.
"""

from __future__ import annotations

TILE_M, TILE_N, TILE_K = 128, 128, 64
STAGES = 4
AHEAD = STAGES - 2  # steps that copies run ahead: one buffer is being read, one may still be
ALIGNMENT = 1024  # bytes that the swizzle's pattern repeats after
STEP = 16  # k of one instruction


def pipeline_bytes(stages: int) -> int:
    """Shared memory of the pipeline, with room to align it."""
    return stages * (TILE_M + TILE_N) * TILE_K * 2 + ALIGNMENT


def function_name(dtype: str) -> str:
    """Of the device function for A and B of `dtype`."""
    return f"tvmx_wgmma_{'bf16' if dtype == 'bfloat16' else 'f16'}"


def device_code(dtype: str) -> str:
    """CUDA source. `function_name(pipeline, a, stride, b, stride, c, stride, depth, thread)`, 256 threads.

    Leaves C in shared memory at `c`; the caller synchronises before it is read.
    """
    kind, name = ("bf16" if dtype == "bfloat16" else "f16"), function_name(dtype)
    registers = TILE_N // 2
    places = ", ".join(f"%{i}" for i in range(registers))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(registers))
    return f"""
__forceinline__ __device__ void {name}_copy(unsigned int to, const void* from) {{
  asm volatile("cp.async.cg.shared.global [%0], [%1], %2;\\n" :: "r"(to), "l"(from), "n"(16) : "memory");
}}
__forceinline__ __device__ unsigned long long {name}_descriptor(unsigned int address) {{
  return (unsigned long long)((address & 0x3FFFFu) >> 4) | 1ull << 16 | (unsigned long long)({ALIGNMENT} >> 4) << 32
      | 1ull << 62;
}}
__forceinline__ __device__ void {name}(void* pipeline, const void* a, int sa, const void* b, int sb,
                                                       float* c, int sc, int depth, int thread) {{
  unsigned int base = (__cvta_generic_to_shared(pipeline) + {ALIGNMENT - 1}u) & ~{ALIGNMENT - 1}u;
  const int steps = depth / {TILE_K}, group = thread / 128, row = thread / 8, chunk = thread % 8;
  const char* from_a = (const char*)a + ((long long)row * sa + chunk * 8) * 2;
  const char* from_b = (const char*)b + ((long long)row * sb + chunk * 8) * 2;
  const unsigned int to = row * 128 + (chunk ^ (row & 7)) * 16;
  float d[{registers}];
#pragma unroll
  for (int i = 0; i < {registers}; ++i) d[i] = 0.0f;
#pragma unroll
  for (int s = 0; s < {AHEAD}; ++s) {{
    if (s < steps) {{
      unsigned int stage = base + s * {(TILE_M + TILE_N) * TILE_K * 2};
#pragma unroll
      for (int r = 0; r < {TILE_M // 32}; ++r) {{
        {name}_copy(stage + to + r * {32 * 128}, from_a + (long long)r * 32 * sa * 2 + s * {TILE_K * 2});
        {name}_copy(stage + {TILE_M * TILE_K * 2} + to + r * {32 * 128},
                                    from_b + (long long)r * 32 * sb * 2 + s * {TILE_K * 2});
      }}
    }}
    asm volatile("cp.async.commit_group;\\n" ::: "memory");
  }}
  for (int k = 0; k < steps; ++k) {{
    asm volatile("cp.async.wait_group {AHEAD - 1};\\n" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;\\n" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;\\n" ::: "memory");
    __syncthreads();
    int next = k + {AHEAD};
    if (next < steps) {{
      unsigned int stage = base + (next % {STAGES}) * {(TILE_M + TILE_N) * TILE_K * 2};
#pragma unroll
      for (int r = 0; r < {TILE_M // 32}; ++r) {{
        {name}_copy(stage + to + r * {32 * 128},
                                    from_a + (long long)r * 32 * sa * 2 + (long long)next * {TILE_K * 2});
        {name}_copy(stage + {TILE_M * TILE_K * 2} + to + r * {32 * 128},
                                    from_b + (long long)r * 32 * sb * 2 + (long long)next * {TILE_K * 2});
      }}
    }}
    asm volatile("cp.async.commit_group;\\n" ::: "memory");
    unsigned int stage = base + (k % {STAGES}) * {(TILE_M + TILE_N) * TILE_K * 2};
    unsigned long long left = {name}_descriptor(stage + group * {64 * 128});
    unsigned long long right = {name}_descriptor(stage + {TILE_M * TILE_K * 2});
    asm volatile("wgmma.fence.sync.aligned;\\n" ::: "memory");
#pragma unroll
    for (int s = 0; s < {TILE_K // STEP}; ++s)
      asm volatile("wgmma.mma_async.sync.aligned.m64n{TILE_N}k{STEP}.f32.{kind}.{kind} {{{places}}}, %{registers}, "
                   "%{registers + 1}, 1, 1, 1, 0, 0;\\n"
                   : {outputs}
                   : "l"(left + s * {STEP * 2 // 16}), "l"(right + s * {STEP * 2 // 16}));
    asm volatile("wgmma.commit_group.sync.aligned;\\n" ::: "memory");
  }}
  asm volatile("wgmma.wait_group.sync.aligned 0;\\n" ::: "memory");
  asm volatile("cp.async.wait_group 0;\\n" ::: "memory");
  float* corner = c + (thread / 32 * 16 + thread % 32 / 4) * sc + thread % 4 * 2;
#pragma unroll
  for (int j = 0; j < {TILE_N // 8}; ++j) {{
    *(float2*)(corner + j * 8) = make_float2(d[4 * j], d[4 * j + 1]);
    *(float2*)(corner + 8 * sc + j * 8) = make_float2(d[4 * j + 2], d[4 * j + 3]);
  }}
}}
"""
