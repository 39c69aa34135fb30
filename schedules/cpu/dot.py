"""Integer matrix products and convolutions on CPU: a register tile of int32 sums fed by a dot-product unit.

parallel (groups, blocks of rows, panels)
  [pack]                                  activations in the unit's dtype, zero point around, whole steps
  panel                                   one weight panel stays in L1 ...
    tile of rows                          ... while it serves the rows of this block
      k                                   one step of the unit: rows (unrolled) × vectors (unrolled)
      epilogue                            requantisation, residual, activation
"""

from __future__ import annotations

import math
from typing import Any

from tvmx_schedules.cpu import amx
from tvmx_schedules.cpu.blocks import Info, as_int, inspect, leaves
from tvmx_schedules.cpu.conv_common import extent, perfect
from tvmx_schedules.cpu.dot_intrinsics import imported_text, name_of
from tvmx_schedules.cpu.loops import lanes_of, vectorize_loop
from tvmx_schedules.cpu.matmul import flatten_sink

from tvmx.passes.legalize.conv_model import MIN_PARALLEL_MACS, divisors, split_parallel, tile_of_panel
from tvmx.passes.legalize.integer_te import TILE_ANNOTATION, UNIT_ANNOTATION
from tvmx.schedule import schedule_rule
from tvmx.target import Target

PACKS = ("pack", "pack_b")


@schedule_rule("cpu.dot_matmul", match=lambda w: w.op == "dot_matmul", when=lambda t: t.kind == "cpu")
def dot_matmul(sch: Any, target: Target) -> None:
    """C[g, m, j] over tiles of `tvmx.tile`: matrix products and 1×1 convolutions."""
    anchor = next(i for i in leaves(sch) if i.op == "dot_matmul")
    sink = inline_around(sch, anchor)
    packs = {i.name: i for i in leaves(sch) if i.name in PACKS}
    rows, panel, *tile = (int(v) for v in anchor.block.annotations[TILE_ANNOTATION])
    block = anchor.rv
    g, m, j, k, ki = sch.get_loops(block)
    groups, height, width, depth, step = (as_int(sch.get(l).extent) for l in (g, m, j, k, ki))
    assert None not in (groups, height, width, depth, step)
    tiles, panels, reduction = height // rows, width // panel, depth * step  # type: ignore[operator]
    bytes_ = _bytes(anchor.block.reads[0].source)

    threads = target.threads if groups * height * width * reduction >= 4 * MIN_PARALLEL_MACS else 1  # type: ignore[operator]
    blocks = max(1, height * reduction * bytes_ // (target.l2_bytes // 4))  # type: ignore[operator]
    whole = "pack_b" in packs and groups > 1  # type: ignore[operator]
    outer_panels = divisors(panels) if threads > 1 and not packs else [1]
    ideal = max(blocks, 1 if whole else 2 * threads if threads > 1 else 1)
    mo, po = split_parallel([(a, b) for a in divisors(tiles) for b in outer_panels], 1 if whole else threads, ideal)

    flatten_sink(sch, sink, anchor)
    if tile:
        _amx(sch, anchor, sink, packs.get("pack"), (mo, po), (rows, panel, tile[0]), target, threads > 1)
        return
    m0, m1, m2 = perfect(sch, m, [mo, tiles // mo, rows])
    j0, j1, j2 = perfect(sch, j, [po, panels // po, panel], innermost=panel)
    sch.reorder(g, m0, j0, j1, m1, k, m2, j2, ki)
    outer = [g, m0, j0]
    if "pack_b" in packs:
        _before(sch, packs["pack_b"], g if whole else None, threads)
    outer_loop = sch.fuse(m0, j0) if whole else sch.fuse(*outer)
    lane = _finish(sch, block, sink, m1, outer_loop, packs.get("pack"), j2, tile_of_panel(panel, target)[1], target)
    if threads > 1:
        sch.parallel(g if whole else outer_loop)
    _tensorize(sch, block, k, lane, anchor, target)


@schedule_rule(
    "cpu.dot_conv", match=lambda w: w.op in ("dot_conv", "dot_conv_detached"), when=lambda t: t.kind == "cpu"
)
def dot_conv(sch: Any, target: Target) -> None:
    """Direct integer convolution; the register tile runs along an output row."""
    anchor = next(i for i in leaves(sch) if i.op and i.op.startswith("dot_conv"))
    sink = inline_around(sch, anchor)
    packs = {i.name: i for i in leaves(sch) if i.name in PACKS}
    rows, panel = (int(v) for v in anchor.block.annotations[TILE_ANNOTATION])
    block = anchor.rv
    n, h, w, o, kh, kw, k, ki = sch.get_loops(block)
    batch, height, width, channels, *reduction = (int(sch.get(l).extent) for l in sch.get_loops(block))
    panels = channels // panel
    macs = batch * height * width * channels
    for r in reduction:
        macs *= r
    parallel = target.threads > 1 and macs >= 4 * MIN_PARALLEL_MACS
    threads = target.threads if parallel else 1
    source = anchor.block.reads[0].source
    bytes_ = _bytes(source)
    row_bytes = bytes_ * math.prod(int(d) for d in source.shape[1:]) // height
    ideal = max(threads * 2 if parallel else 1, batch * height * row_bytes // (target.l2_bytes // 4))
    outer_panels = divisors(panels) if parallel and "pack" not in packs else [1]
    ho, po = split_parallel([(batch * a, b) for a in divisors(height) for b in outer_panels], threads, ideal)
    ho //= batch

    detached = anchor.op == "dot_conv_detached"
    if detached:
        loops = sch.get_loops(sink.rv)
        vectorize_loop(sch, loops[-1], lanes_of(sink, target))
        if parallel:
            sch.parallel(sch.fuse(*sch.get_loops(sink.rv)[:2]))
        sink = inspect(sch, sch.cache_write(block, 0, "local"))
    h0, h1 = perfect(sch, h, [ho, height // ho])
    w0, w1 = perfect(sch, w, [width // rows, rows])
    o0, o1, oi = perfect(sch, o, [po, panels // po, panel], innermost=panel)
    sch.reorder(n, h0, o0, o1, h1, w0, kh, kw, k, w1, oi, ki)
    outer = sch.fuse(n, h0, o0)
    lanes = tile_of_panel(panel, target)[1]
    lane = _finish(sch, block, sink, w0, outer, packs.get("pack"), oi, lanes, target, local=not detached)
    if parallel:
        sch.parallel(outer)
    _tensorize(sch, block, kh, lane, anchor, target)


def _amx(
    sch: Any,
    anchor: Info,
    sink: Info,
    pack: Info | None,
    outermost: tuple[int, int],
    tile: tuple[int, int, int],
    target: Target,
    parallel: bool,
) -> None:
    """One call of the tile function per block of rows and panel; what follows reads its sums from the stack."""
    block = anchor.rv
    g, m, j, k, ki = sch.get_loops(block)
    (mo, po), (rows, panel, tile_rows) = outermost, tile
    (blocks, m2), (panels, j2) = sch.split(m, [None, rows]), sch.split(j, [None, panel])
    m0, m1 = perfect(sch, blocks, [mo, extent(sch, blocks) // mo])
    j0, j1 = perfect(sch, panels, [po, extent(sch, panels) // po])
    sch.reorder(g, m0, j0, j1, m1, m2, j2, k, ki)
    outer = sch.fuse(g, m0, j0)
    sch.reverse_compute_at(sink.rv, m1, preserve_unit_loops=True)
    sch.set_scope(block, 0, "local")
    if pack is not None:
        sch.compute_at(pack.rv, outer, preserve_unit_loops=True)
        _copy_channels(sch, pack, target)
    lanes = target.lanes("int32")
    vectorize_loop(sch, sch.get_loops(sink.rv)[-1], lanes)
    if parallel:
        sch.parallel(outer)
    init = sch.decompose_reduction(block, m2)
    vectorize_loop(sch, sch.get_loops(init)[-1], lanes)
    sizes = (str(anchor.block.annotations[UNIT_ANNOTATION]), tile_rows, rows, panel, 4 * extent(sch, k))
    sch.annotate(sch.get_loops(block)[0], "pragma_import_llvm", amx.imported_text(*sizes))
    sch.tensorize(m2, amx.install(*sizes))


def _finish(
    sch: Any,
    block: Any,
    sink: Info,
    tile: Any,
    outer: Any,
    pack: Info | None,
    panel: Any,
    lanes: int,
    target: Target,
    local: bool = True,
) -> Any:
    """Epilogue at the tile, packing at the outer loop, unrolled rows and vectors. Returns the loop over lanes."""
    sch.reverse_compute_at(sink.rv, tile, preserve_unit_loops=True)
    _, lane = sch.split(panel, [None, lanes])  # only now: a panel that lanes do not divide is rounded up here
    if local:
        sch.set_scope(block, 0, "local")
    if pack is not None:
        sch.compute_at(pack.rv, outer, preserve_unit_loops=True)
        _copy_channels(sch, pack, target)
    loops = sch.get_loops(sink.rv)
    columns, rows = loops[-1], loops[-2]
    split = vectorize_loop(sch, columns, lanes)
    if len(split) > 1 and as_int(sch.get(split[0]).extent) is not None:
        sch.unroll(split[0])
    if as_int(sch.get(rows).extent) is not None:
        sch.unroll(rows)
    return lane


def _tensorize(sch: Any, block: Any, reduction: Any, lane: Any, anchor: Info, target: Target) -> None:
    """The unit's step on the innermost (lanes × depth) loops, the tile's rows and vectors unrolled around it."""
    unit = str(anchor.block.annotations[UNIT_ANNOTATION])
    lanes = int(sch.get(lane).extent)
    loops = sch.get_loops(block)
    at = next(i for i, l in enumerate(loops) if sch.get(l).same_as(sch.get(lane)))
    sch.unroll(loops[at - 1])
    sch.unroll(loops[at - 2])
    if unit == "plain":
        sch.vectorize(lane)
    init = sch.decompose_reduction(block, reduction)
    zeros = sch.get_loops(init)
    sch.vectorize(zeros[-1])
    for loop in zeros[-3:-1]:
        sch.unroll(loop)
    if unit != "plain":
        if unit == "pair16" and target.has("avx512_vnni") and target.vector_bytes == 64:
            unit = "pair16_vnni"
        text = imported_text(unit, lanes)
        if text is not None:
            sch.annotate(sch.get_loops(block)[0], "pragma_import_llvm", text)
        sch.tensorize(lane, name_of(unit, lanes))


def _bytes(buffer: Any) -> int:
    """Of one element."""
    return int("".join(c for c in str(buffer.dtype).removeprefix("bfloat") if c.isdigit())) // 8


def _before(sch: Any, info: Info, group: Any, threads: int) -> None:
    """What a computed right operand needs: when its group starts, or for a single one before everything else."""
    if group is not None:
        sch.compute_at(info.rv, group, preserve_unit_loops=True)
    elif threads > 1:
        sch.parallel(sch.get_loops(info.rv)[1])


def _copy_channels(sch: Any, pack: Info, target: Target) -> None:
    """Vectorise a packing block over its channels where they are contiguous on both sides."""
    from tvmx_schedules.cpu.blocks import uses
    from tvmx_schedules.cpu.loops import has_varying_condition

    info = inspect(sch, pack.rv)
    column = info.block.iter_vars[-1].var
    if not has_varying_condition(info, lambda e: uses(e, column)):
        vectorize_loop(sch, sch.get_loops(pack.rv)[-1], target.lanes("int32") * 2)


def inline_around(sch: Any, anchor: Info) -> Info:
    """Inline everything around the anchor but its packing blocks and the last block.

    Raises ValueError for a function with several outputs.
    """
    infos = leaves(sch)
    position = next(i for i, info in enumerate(infos) if info.name == anchor.name)
    before = [i for i in infos[:position] if i.name not in PACKS]
    after = infos[position + 1 :]
    sinks = [i for i in after if not sch.get_consumers(i.rv)]
    if len(sinks) != 1:
        raise ValueError(f"an integer product with {len(sinks)} output blocks")
    for info in (*before, *after):
        if info.name != sinks[0].name:
            sch.compute_inline(info.rv)
    return inspect(sch, sinks[0].rv)
