"""GEMM and implicit-GEMM convolution on Tensor Cores; the loops of one block:

blockIdx.z  groups
blockIdx.x  tiles of C, up to eight columns of tiles at a time so that neighbours share A and B in L2
threadIdx.y warps, wm × wn
  k0        pipeline: tiles of A and B, global → shared, `stages` deep (cp.async where the GPU has it)
    k1      one matrix instruction's k: fragments shared → registers, then 16 × 16 products
  16 rows   of the warp's part of C: registers → shared → epilogue → global, coalesced and vectorised

Rows in shared memory are permuted (`tvmx.cuda.permuted`) or, for wmma, 16 bytes longer than the tile, so that the
eight rows of an ldmatrix fall into different banks. `tvmx.passes.legalize.gemm_te` writes the blocks and chooses the
default tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvmx_schedules.cpu.blocks import Info, as_int, inspect, leaves
from tvmx_schedules.cpu.matmul import flatten_sink
from tvmx_schedules.cuda import intrinsics
from tvmx_schedules.cuda.intrinsics import SHARED, Intrinsics

from tvmx.cuda.permuted import PERMUTED
from tvmx.passes.legalize.gemm_model import Tile
from tvmx.schedule import Workload, schedule_rule
from tvmx.target import Target

WARP = 32
RASTER = 8  # columns of tiles that blocks walk before the next row
ANCHOR = "gemm"


def _is_gemm(workload: Workload) -> bool:
    return workload.op == "cuda.gemm"  # all is static but, perhaps, the number of rows


@schedule_rule("cuda.mma", match=_is_gemm, when=lambda t: t.gpu is not None and t.gpu.has_mma)
def gemm_mma(sch: Any, target: Target) -> None:
    """mma.sync + ldmatrix + cp.async, sm_80 and newer."""
    schedule_gemm(sch, intrinsics.mma, asynchronous=True, permute=True)


@schedule_rule("cuda.mma_padded", match=_is_gemm, when=lambda t: t.gpu is not None and t.gpu.has_mma, priority=-5)
def gemm_mma_padded(sch: Any, target: Target) -> None:
    """The same with padded rows in shared memory: simpler addresses, more bytes. A space for tuning."""
    schedule_gemm(sch, intrinsics.mma, asynchronous=True)


@schedule_rule("cuda.wmma", match=_is_gemm, when=lambda t: t.gpu is not None, priority=-10)
def gemm_wmma(sch: Any, target: Target) -> None:
    """wmma, with register-staged double buffering: what sm_75 has, and the fallback elsewhere."""
    schedule_gemm(sch, intrinsics.wmma, asynchronous=False)


def schedule_gemm(
    sch: Any, family: Callable[[str, str, bool], Intrinsics], asynchronous: bool, permute: bool = False
) -> None:
    """Schedule load_a, load_b, gemm and everything after it. Raises ValueError, ScheduleError where it cannot."""
    sink = inline_around(sch)
    anchor = inspect(sch, sch.get_sblock(ANCHOR))
    notes = anchor.block.annotations
    tm, tn, tk, wm, wn, stages = (int(v) for v in notes["tvmx.tile"])
    vectors = [int(v) for v in notes["tvmx.vectors"]]
    transposed = bool(int(notes["tvmx.transposed"]))
    dtype, accumulate = str(anchor.loads[0].buffer.dtype), str(anchor.output.dtype)
    names = family(dtype, accumulate, transposed)
    _, _, width, _ = (int(v) for v in notes["tvmx.size"])
    if int(notes["tvmx.grouped"]):
        _flatten_groups(sch, sink)
    else:
        flatten_sink(sch, sink, anchor)
    vector_c = sink_vector(inspect(sch, sink.rv), width)

    # Loops.
    block = anchor.rv
    g, i, j, k = sch.get_loops(block)
    sizes = [as_int(sch.get(l).extent) or 0 for l in (i, j, k)]  # 0: a symbolic number of rows
    i, it = sch.split(i, [None, 16])
    j, jt = sch.split(j, [None, 16])
    k, kt = sch.split(k, [None, names.step])
    sch.reorder(g, i, j, k, it, jt, kt)
    inner, outer = block, sch.blockize(it)
    rows: list[Any] = [None, tm // wm // 16, wm]
    if sizes[0]:
        rows = sch.sample_perfect_tile(i, 3, 4, decision=[sizes[0] // tm, tm // wm // 16, wm])
    near = max(d for d in range(1, RASTER + 1) if sizes[1] // tn % d == 0)
    columns = sch.sample_perfect_tile(j, 4, 8, decision=[sizes[1] // tn // near, near, wn, tn // wn // 16])
    depth = sch.sample_perfect_tile(k, 2, 8, decision=[sizes[2] // tk, tk // names.step])
    i0, i2, i1 = sch.split(i, rows)  # the warps' rows alternate: 16 rows of each are one piece of C
    far, near, j1, j2 = sch.split(j, columns)
    k0, k1 = sch.split(k, depth)
    sch.reorder(g, far, i0, near, i1, j1, k0, k1, i2, j2)
    sch.bind(g, "blockIdx.z")
    tile = sch.fuse(far, i0, near)
    sch.bind(tile, "blockIdx.x")
    sch.bind(sch.fuse(i1, j1), "threadIdx.y")
    for loop in (k1, i2, j2):
        _unroll(sch, loop)

    # Global → shared.
    element = 1 if dtype == "int8" else 2
    wide = []
    for name, vector, count in (("load_a", vectors[0], tm * tk), ("load_b", vectors[1], tn * tk)):
        while count % (wm * wn * WARP * vector):
            vector //= 2
        wide.append(vector * element >= 4 and _is_copy(inspect(sch, sch.get_sblock(name))))
        _fetch(sch, sch.get_sblock(name), k0, rows[2], columns[2], vector, element)
        if permute and (name == "load_a" or transposed or element == 2):  # TVM has no ldmatrix for the other
            sch.annotate(sch.get_sblock(name), PERMUTED, 1)

    # Registers.
    a, b = sch.cache_read(outer, 0, names.scope_a), sch.cache_read(outer, 1, names.scope_b)
    sch.compute_at(a, i2)  # one fragment: the rows of a warp do not lie together
    sch.compute_at(b, k1)
    c = sch.cache_write(outer, 0, names.scope_c)
    store = _epilogue(sch, c, sink, tile, (rows[2], columns[2]), vector_c)
    _tensorize(sch, names, dtype, transposed, (outer, inner), (a, b, c), k0, store)

    if stages > 1:
        last = sch.sample_categorical([1, 2, 3, 4], [0.25] * 4, decision=stages - 2)
        sch.annotate(k0, "software_pipeline_stage", [0, 0, last])
        sch.annotate(k0, "software_pipeline_order", [0, 1, 2])
        if asynchronous and all(wide):
            sch.annotate(k0, "software_pipeline_async_stages", [0])


def tile_of(decisions: Sequence[Any], step: int) -> Tile:
    """The tile that these decisions of `schedule_gemm` make; `step` is k of one matrix instruction.

    Raises ValueError for decisions of something else.
    """
    try:
        (_, i2, i1), (_, _, j1, j2), (_, k1), *rest = decisions
        stages = int(rest[0]) + 2 if rest else 1
    except (TypeError, ValueError):
        raise ValueError(f"not the decisions of a matrix product: {decisions}") from None
    return Tile(16 * i1 * i2, 16 * j1 * j2, k1 * step, i1, j1, stages)


def inline_around(sch: Any) -> Info:
    """Inline every block but the loads, the product and the last block; return the last.

    Raises ValueError for a function with several outputs.
    """
    infos = leaves(sch)
    position = next(i for i, info in enumerate(infos) if info.name == ANCHOR)
    sinks = [i for i in infos[position + 1 :] if not sch.get_consumers(i.rv)]
    if len(sinks) != 1:
        raise ValueError(f"a matrix product with {len(sinks)} output blocks")
    keep = {"load_a", "load_b", ANCHOR, sinks[0].name}
    for info in infos:
        if info.name not in keep:
            sch.compute_inline(info.rv)
    return inspect(sch, sinks[0].rv)


def _flatten_groups(sch: Any, sink: Info) -> None:
    """A grouped convolution's output (n, h, w, group, column) → (group, row, column)."""
    from tvm.tirx import IndexMap

    shape = [as_int(v.dom.extent) or 1 for v in sink.block.iter_vars]

    def flat(*index: Any) -> tuple[Any, ...]:
        row: Any = None
        for i, extent in zip(index[:-2], shape[:-2]):
            if extent != 1:
                row = i if row is None else row * extent + i
        return index[-2], index[0] if row is None else row, index[-1]

    kind = str(sink.block.iter_vars[-1].var.ty.dtype)
    sch.transform_block_layout(sink.rv, IndexMap.from_func(flat, ndim=len(shape), index_dtype=kind))


def sink_vector(sink: Info, columns: int) -> int:
    """Elements that the sink stores at a time: 16 bytes of its widest tensor, of what divides `columns`."""
    widest = max(_bits(str(b.dtype)) // 8 for b in (sink.output, *(l.buffer for l in sink.loads)))
    vector = 16 // max(1, widest)
    while columns % vector:
        vector //= 2
    return vector


def _bits(dtype: str) -> int:
    import tvm

    return int(tvm.DataType(dtype).bits)


def _is_copy(info: Info) -> bool:
    """Is the block's value one element of one tensor, or zero? Only then can cp.async move it."""
    value = info.block.body.value
    if getattr(getattr(value, "op", None), "name", "") == "prim.if_then_else":
        value = value.args[1]
    return hasattr(value, "source") and hasattr(value, "indices")


def _fetch(sch: Any, block: Any, at: Any, wm: Any, wn: Any, vector: int, element: int) -> None:
    """All threads of a block move one tile, `vector` elements each at a time."""
    sch.set_scope(block, 0, SHARED)
    sch.compute_at(block, at, preserve_unit_loops=True)
    fused = sch.fuse(*sch.get_loops(block)[-2:])
    _, y0, y1, x, v = sch.split(fused, [None, wm, wn, WARP, vector])
    sch.bind(x, "threadIdx.x")
    sch.bind(sch.fuse(y0, y1), "threadIdx.y")
    if vector > 1:
        sch.vectorize(v)
    sch.storage_align(block, 0, axis=-2, factor=32, offset=16 // element)


def _epilogue(sch: Any, c: Any, sink: Info, at: Any, warps: tuple[Any, Any], vector: int) -> Any:
    """C leaves its warps 16 rows each at a time through shared memory; all threads run the sink on those rows.

    Returns the first loop of one 16 × 16 fragment's store.
    """
    sch.set_scope(c, 0, SHARED)
    sch.reverse_compute_at(c, at, preserve_unit_loops=True)
    m, n = sch.get_loops(c)[-2:]
    chunk, y0, line = sch.split(m, [None, warps[0], 16])
    y1, n0, column = sch.split(n, [warps[1], None, 16])
    sch.reorder(chunk, y0, y1, n0, line, column)
    _unroll(sch, chunk)
    _unroll(sch, n0)
    depth = len(sch.get_loops(c)) - 5
    sch.reverse_compute_at(sink.rv, chunk, preserve_unit_loops=True)
    sch.bind(sch.fuse(y0, y1), "threadIdx.y")
    fused = sch.fuse(*sch.get_loops(sink.rv)[depth:])
    _, y0, y1, lane, lanes = sch.split(fused, [None, *warps, WARP, vector])
    sch.bind(sch.fuse(y0, y1), "threadIdx.y")
    sch.bind(lane, "threadIdx.x")
    if vector > 1:
        sch.vectorize(lanes)
    sch.storage_align(c, 0, axis=-2, factor=32, offset=8)
    return line


def _tensorize(
    sch: Any,
    names: Intrinsics,
    dtype: str,
    transposed: bool,
    blocks: tuple[Any, Any],
    caches: tuple[Any, Any, Any],
    k0: Any,
    store: Any,
) -> None:
    outer, inner = blocks
    a, b, c = caches
    step = names.step
    init = sch.decompose_reduction(outer, k0)
    init_inner = sch.get_child_blocks(init)[0]
    left = _tile(sch, a, 16, step)
    right = _tile(sch, b, 16, step) if transposed else _tile(sch, b, step, 16)
    if names.is_mma:
        of_a, of_b, of_c = intrinsics.layouts(names, dtype, transposed)
        sch.transform_layout(a, ("write", 0), _lanes(of_a, 16, step))
        sch.transform_layout(b, ("write", 0), _lanes(of_b, *((16, step) if transposed else (step, 16))))
        sch.transform_layout(c, ("read", 0), _lanes(of_c, 16, 16))
    sch.tensorize(left, names.load_a)
    sch.tensorize(right, names.load_b)
    sch.tensorize(sch.get_loops(inner)[-3], names.compute)
    sch.tensorize(sch.get_loops(init_inner)[-2], names.init)
    sch.tensorize(store, names.store)


def _unroll(sch: Any, loop: Any) -> None:
    """`#pragma unroll` for the CUDA compiler in place of TVM's unrolled text, which takes long to compile."""
    sch.unroll(loop)
    sch.annotate(loop, "pragma_unroll_explicit", 0)


def _tile(sch: Any, block: Any, height: int, width: int) -> Any:
    """Split a block's last two loops into fragments; return the first loop of a fragment."""
    x, y = sch.get_loops(block)[-2:]
    x0, x1 = sch.split(x, [None, height])
    y0, y1 = sch.split(y, [None, width])
    sch.reorder(x0, y0, x1, y1)
    return x1


def _lanes(layout: Any, height: int, width: int) -> Any:
    return lambda g, x, y: (g, x // height, y // width, *layout(x % height, y % width))
