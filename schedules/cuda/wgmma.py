"""FP16 and BF16 products on Hopper's own matrix instruction, `wgmma`, as one device function with inline PTX.

A block of 256 threads, two warpgroups, computes 128 × 128 of C; each warpgroup 64 rows. A and B come in steps of 64
along k through `STAGES` buffers of shared memory, filled by `cp.async` in the 128-byte swizzle that wgmma's descriptors
name: chunk c of row r at c ^ (r % 8). While the Tensor Cores work on one step, the next ones are on their way.

It takes products without any padding: rows and columns multiples of 128, k of 64, both operands with k contiguous.
TVM knows nothing of wgmma, so the whole of a block's product is one tensor intrinsic that leaves C in shared memory
for the epilogue. Not measured on a GPU yet: the rule comes after `cuda.mma`, as a space for tuning.
"""

from __future__ import annotations

from typing import Any

from tvmx_schedules.cpu.blocks import inspect
from tvmx_schedules.cpu.matmul import flatten_sink
from tvmx_schedules.cuda.gemm import ANCHOR, inline_around, sink_vector
from tvmx_schedules.cuda.intrinsics import SHARED

from tvmx.cuda.wgmma import STAGES, TILE_K, TILE_M, TILE_N, device_code, function_name, pipeline_bytes
from tvmx.schedule import Workload, schedule_rule
from tvmx.target import Target

THREADS = 256
RASTER = 8  # columns of tiles that blocks walk before the next row


def _fits(workload: Workload) -> bool:
    anchor = workload.anchor
    if workload.op != "cuda.gemm" or not workload.is_static or anchor is None:
        return False
    notes = anchor.annotations
    _, m, n, k = (int(v) for v in notes["tvmx.size"])
    whole = m % TILE_M == 0 and n % TILE_N == 0 and k % TILE_K == 0
    plain = int(notes["tvmx.transposed"]) and not int(notes["tvmx.grouped"])
    return bool(whole and plain and anchor.reads[0] in ("float16", "bfloat16"))


@schedule_rule("cuda.wgmma", match=_fits, when=lambda t: t.gpu is not None and t.gpu.sm == 90, priority=-7)
def gemm_wgmma(sch: Any, target: Target) -> None:
    """wgmma from shared memory that cp.async fills. Raises ValueError where an operand is not read as it lies."""
    sink = inline_around(sch)
    anchor = inspect(sch, sch.get_sblock(ANCHOR))
    _, _, width, _ = (int(v) for v in anchor.block.annotations["tvmx.size"])
    for name in ("load_a", "load_b"):
        value = inspect(sch, sch.get_sblock(name)).block.body.value
        if not (hasattr(value, "source") and hasattr(value, "indices")):
            raise ValueError(f"{name} is more than a copy")
        sch.compute_inline(sch.get_sblock(name))
    anchor = inspect(sch, sch.get_sblock(ANCHOR))
    dtype = str(anchor.loads[0].buffer.dtype)
    flatten_sink(sch, sink, anchor)
    vector = sink_vector(inspect(sch, sink.rv), width)

    block = anchor.rv
    g, i, j, k = sch.get_loops(block)
    sizes = [int(sch.get(l).extent) for l in (i, j, k)]
    i0, i1 = sch.split(i, [None, TILE_M])
    columns = sizes[1] // TILE_N
    near = max(d for d in range(1, RASTER + 1) if columns % d == 0)
    far, near_loop, j1 = sch.split(j, [None, near, TILE_N])
    k0, k1 = sch.split(k, [1, None])  # the loop that the initialisation is taken out of
    sch.reorder(g, far, i0, near_loop, k0, i1, j1, k1)
    whole = sch.blockize(i1)
    sch.bind(g, "blockIdx.z")
    tile = sch.fuse(far, i0, near_loop)
    sch.bind(tile, "blockIdx.x")
    sch.set_scope(whole, 0, SHARED)
    sch.storage_align(whole, 0, axis=-2, factor=32, offset=8)
    sch.reverse_compute_at(sink.rv, tile, preserve_unit_loops=True)
    fused = sch.fuse(*sch.get_loops(sink.rv)[2:])
    _, thread, lanes = sch.split(fused, [None, THREADS, vector])
    sch.bind(thread, "threadIdx.x")
    if vector > 1:
        sch.vectorize(lanes)
    init = sch.decompose_reduction(whole, k0)
    sch.tensorize(sch.get_loops(sch.get_child_blocks(init)[0])[-2], _nothing())
    sch.tensorize(i1, _product(dtype, sizes[2]))


def _nothing() -> str:
    """C need not be zero: the product that follows overwrites it."""
    from tvm.s_tir import TensorIntrin
    from tvm.script import tirx as T

    from tvmx.compat import fast_stack

    name = "tvmx_wgmma_init"
    if TensorIntrin.get(name, True) is not None:
        return name
    with fast_stack():

        @T.prim_func(s_tir=True)
        def desc(c: T.handle) -> None:
            C = T.match_buffer(c, (TILE_M, TILE_N), "float32", offset_factor=1, scope="shared.dyn")
            with T.sblock("root"):
                T.reads()
                T.writes(C[0:TILE_M, 0:TILE_N])
                for i, j in T.grid(TILE_M, TILE_N):
                    with T.sblock("init"):
                        vi, vj = T.axis.remap("SS", [i, j])
                        C[vi, vj] = T.float32(0)

        @T.prim_func(s_tir=True)
        def impl(c: T.handle) -> None:
            C = T.match_buffer(c, (TILE_M, TILE_N), "float32", offset_factor=1, scope="shared.dyn", strides=["s", 1])
            with T.sblock("root"):
                T.reads()
                T.writes(C[0:TILE_M, 0:TILE_N])
                T.evaluate(0)

    TensorIntrin.register(name, desc, impl)
    return name


def _product(dtype: str, depth: int) -> str:
    """C[128, 128] = A[128, depth] · B[128, depth]ᵀ by all threads of a block."""
    from tvm.backend.cuda.op import cuda_func_call
    from tvm.s_tir import TensorIntrin
    from tvm.script import tirx as T

    from tvmx.compat import fast_stack

    name = f"tvmx_wgmma_{dtype}_{depth}"
    if TensorIntrin.get(name, True) is not None:
        return name
    code, called, elements = device_code(dtype), function_name(dtype), pipeline_bytes(STAGES) // 2
    with fast_stack():

        @T.prim_func(s_tir=True)
        def desc(a: T.handle, b: T.handle, c: T.handle) -> None:
            A = T.match_buffer(a, (TILE_M, depth), dtype, offset_factor=1)
            B = T.match_buffer(b, (TILE_N, depth), dtype, offset_factor=1)
            C = T.match_buffer(c, (TILE_M, TILE_N), "float32", offset_factor=1, scope="shared.dyn")
            with T.sblock("root"):
                T.reads(C[0:TILE_M, 0:TILE_N], A[0:TILE_M, 0:depth], B[0:TILE_N, 0:depth])
                T.writes(C[0:TILE_M, 0:TILE_N])
                for i, j, k in T.grid(TILE_M, TILE_N, depth):
                    with T.sblock("update"):
                        vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                        C[vi, vj] = C[vi, vj] + T.Cast("float32", A[vi, vk]) * T.Cast("float32", B[vj, vk])

        @T.prim_func(s_tir=True)
        def impl(a: T.handle, b: T.handle, c: T.handle) -> None:
            sa = T.int32()
            sb = T.int32()
            sc = T.int32()
            A = T.match_buffer(a, (TILE_M, depth), dtype, offset_factor=1, strides=[sa, 1])
            B = T.match_buffer(b, (TILE_N, depth), dtype, offset_factor=1, strides=[sb, 1])
            C = T.match_buffer(c, (TILE_M, TILE_N), "float32", offset_factor=1, scope="shared.dyn", strides=[sc, 1])
            with T.sblock("root"):
                T.reads(C[0:TILE_M, 0:TILE_N], A[0:TILE_M, 0:depth], B[0:TILE_N, 0:depth])
                T.writes(C[0:TILE_M, 0:TILE_N])
                pipeline = T.alloc_buffer((elements,), "float16", scope="shared.dyn")
                for tx in T.thread_binding(0, THREADS, "threadIdx.x"):
                    with T.sblock("wgmma"):
                        T.reads(C[0:TILE_M, 0:TILE_N], A[0:TILE_M, 0:depth], B[0:TILE_N, 0:depth])
                        T.writes(C[0:TILE_M, 0:TILE_N], pipeline[0:elements])
                        T.evaluate(
                            cuda_func_call(
                                called,
                                pipeline.access_ptr("rw"),
                                A.access_ptr("r"),
                                sa,
                                B.access_ptr("r"),
                                sb,
                                C.access_ptr("w"),
                                sc,
                                depth,
                                tx,
                                source_code=code,
                            )
                        )

    TensorIntrin.register(name, desc, impl)
    return name
