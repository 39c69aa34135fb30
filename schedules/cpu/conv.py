"""conv2d on CPU: 1×1 as a packed GEMM over fused rows, k×k directly, both with the accumulators in registers.

parallel (positions, panels)          balanced over the threads
  [padding of these rows]             stays in L2
  panel                               one weight panel, resident in L1/L2 ...
    rows of positions                 ... while it serves many positions
      kh kw k                         streams one panel
        position (unrolled) × vector  position outside vector: LLVM keeps the accumulators in registers
      epilogue
"""

from __future__ import annotations

import math
from typing import Any

from tvmx_schedules.cpu.blocks import as_int
from tvmx_schedules.cpu.conv_common import copy_rows, extent, finish_last, perfect, stages

from tvmx.passes.legalize.conv_model import (
    MIN_PARALLEL_MACS,
    divisors,
    rows_of_panel,
    split_parallel,
    tile_of_panel,
)
from tvmx.passes.legalize.conv_te import ROWS_ANNOTATION, SYMBOLIC
from tvmx.schedule import schedule_rule
from tvmx.schedule.workload import OP_ANNOTATION
from tvmx.target import Target

BYTES = 4  # float32


DETACHED = "_detached"
"""Suffix of an operator whose last block moves values elsewhere (phases of a transposed convolution, padded groups):
it cannot be computed at the register tile, so the tile is stored and the last block runs after all."""


@schedule_rule(
    "cpu.conv2d_1x1", match=lambda w: w.op in ("conv2d_1x1", "conv2d_1x1" + DETACHED), when=lambda t: t.kind == "cpu"
)
def conv2d_1x1(sch: Any, target: Target) -> None:
    """x[m, k] · packed[panel, k, nb]: register tile rows × panel, L2 block of positions, parallel over both."""
    stage = stages(sch, "conv2d_1x1")
    detached = is_detached(sch, stage.anchor)
    conv, last = stage.anchor, stage.last
    m, o, k = sch.get_loops(conv)
    positions, channels, depth = extent(sch, m), extent(sch, o), extent(sch, k)
    panel = int(sch.get(conv).reads[-1].source.shape[-1])
    _, lanes = tile_of_panel(panel, target)
    rows = rows_of_panel(positions, panel, depth, target)
    panels = channels // panel

    macs = positions * channels * depth
    parallel = target.threads > 1 and macs >= MIN_PARALLEL_MACS
    outer_positions = [d for d in divisors(positions // rows)]
    outer_panels = divisors(panels) if parallel and stage.before is None else [1]
    blocks = max(1, positions * depth * BYTES // (target.l2_bytes // 2))
    ideal = max(blocks, target.threads * 2 if parallel else 1)
    mo, po = split_parallel(
        [(a, b) for a in outer_positions for b in outer_panels], target.threads if parallel else 1, ideal
    )

    if detached:
        finish_detached(sch, last, target, parallel)
        last = sch.cache_write(conv, 0, "local")
    else:
        flatten_rows(sch, last)
    if stage.before is not None:
        height, width = (int(v.dom.extent) for v in sch.get(stage.before).iter_vars[1:3])
        sch.transform_layout(
            stage.before,
            ("write", 0),
            lambda n, h, w, c: ((n * height + h) * width + w, c),
            assume_injective_transform=True,
        )
        flatten_rows(sch, stage.before)
    m0, m1, m2 = perfect(sch, m, [mo, positions // rows // mo, rows])
    o0, o1, oi = perfect(sch, o, [po, panels // po, panel], innermost=panel)
    sch.reorder(m0, o0, o1, m1, k, m2, oi)
    outer = sch.fuse(m0, o0)
    sch.reverse_compute_at(last, m1, preserve_unit_loops=True)
    sch.split(oi, [None, lanes])  # after `last` has its place: a tile that lanes do not divide is rounded up here
    if not detached:
        sch.set_scope(conv, 0, "local")
    if stage.before is not None:
        sch.compute_at(stage.before, outer, preserve_unit_loops=True)
        copy_rows(sch, stage.before, 1, target)
    if parallel:
        sch.parallel(outer)
    _finish(sch, conv, k, last, 3, lanes)


@schedule_rule("cpu.conv2d", match=lambda w: w.op in ("conv2d", "conv2d" + DETACHED), when=lambda t: t.kind == "cpu")
def conv2d(sch: Any, target: Target) -> None:
    """Direct convolution; the register tile runs along an output row."""
    stage = stages(sch, "conv2d")
    detached = is_detached(sch, stage.anchor)
    conv, last = stage.anchor, stage.last
    n, h, w, o, kh, kw, k = sch.get_loops(conv)
    batch, height, width, channels = (extent(sch, l) for l in (n, h, w, o))
    reduction = extent(sch, kh) * extent(sch, kw) * extent(sch, k)
    packed = sch.get(conv).reads[-1].source
    panel = int(packed.shape[-1])
    _, lanes = tile_of_panel(panel, target)
    rows = rows_of_panel(width, panel, reduction, target)
    panels = channels // panel

    macs = batch * height * width * channels * reduction
    parallel = target.threads > 1 and macs >= MIN_PARALLEL_MACS
    threads = target.threads if parallel else 1
    source = sch.get(conv).reads[0].source
    row_bytes = BYTES * int(source.shape[1]) * int(source.shape[2]) * int(source.shape[3]) // height
    ideal = max(threads * 2 if parallel else 1, batch * height * row_bytes // (target.l2_bytes // 3))
    pairs = [(batch * a, b) for a in divisors(height) for b in (divisors(panels) if parallel else [1])]
    ho, po = split_parallel(pairs, threads, ideal)
    ho //= batch

    if detached:
        finish_detached(sch, last, target, parallel)
        last = sch.cache_write(conv, 0, "local")
    elif len(sch.get(last).iter_vars) == 5:  # conv3d: depth and height are the rows of the convolution
        rows_of_depth = int(sch.get(last).iter_vars[2].dom.extent)
        sch.transform_block_layout(last, lambda n, d, h, w, c: (n, d * rows_of_depth + h, w, c))
    h0, h1 = perfect(sch, h, [ho, height // ho])
    w0, w1 = perfect(sch, w, [width // rows, rows])
    o0, o1, oi = perfect(sch, o, [po, panels // po, panel], innermost=panel)
    sch.reorder(n, h0, o0, o1, h1, w0, kh, kw, k, w1, oi)
    outer = sch.fuse(n, h0, o0)
    sch.reverse_compute_at(last, w0, preserve_unit_loops=True)
    sch.split(oi, [None, lanes])
    if not detached:
        sch.set_scope(conv, 0, "local")
    if stage.before is not None:
        if po == 1:
            sch.compute_at(stage.before, outer, preserve_unit_loops=True)
            copy_rows(sch, stage.before, 1, target)
        else:
            copy_rows(sch, stage.before, 0, target)
            if parallel:
                sch.parallel(sch.fuse(*sch.get_loops(stage.before)[:2]))
    if parallel:
        sch.parallel(outer)
    _finish(sch, conv, kh, last, 4, lanes)


@schedule_rule(
    "cpu.conv2d_symbolic", match=lambda w: w.op in (SYMBOLIC, SYMBOLIC + DETACHED), when=lambda t: t.kind == "cpu"
)
def conv2d_symbolic(sch: Any, target: Target) -> None:
    """Direct convolution of unknown batch, height or width, output row by output row.

    All panels of a row while the weights stay in L2, else all rows of a panel.
    """
    stage = stages(sch, SYMBOLIC)
    conv, last = stage.anchor, stage.last
    detached = is_detached(sch, conv)
    rows = int(sch.get(conv).annotations[ROWS_ANNOTATION])
    panel = int(sch.get(conv).reads[-1].source.shape[-1])
    _, lanes = tile_of_panel(panel, target)
    n, h, w, o, kh, kw, k = sch.get_loops(conv)
    weight_bytes = BYTES * math.prod(extent(sch, l) for l in (o, kh, kw, k))
    if detached:
        finish_detached(sch, last, target, target.threads > 1)
        last = sch.cache_write(conv, 0, "local")
    w0, w1 = sch.split(w, [None, rows])
    o1, oi = sch.split(o, [None, panel])
    order = [o1, n, h] if weight_bytes > target.l2_bytes // 2 else [n, h, o1]
    sch.reorder(*order, w0, kh, kw, k, w1, oi)
    outer = sch.fuse(n, h)
    sch.reverse_compute_at(last, w0, preserve_unit_loops=True)
    sch.split(oi, [None, lanes])
    if not detached:
        sch.set_scope(conv, 0, "local")
    if stage.before is not None:
        copy_rows(sch, stage.before, 0, target)
        pad = sch.fuse(*sch.get_loops(stage.before)[:2])
        if target.threads > 1:
            sch.parallel(pad)
    if target.threads > 1:
        sch.parallel(outer)
    _finish(sch, conv, kh, last, 3, lanes)


def is_detached(sch: Any, conv: Any) -> bool:
    return str(sch.get(conv).annotations[OP_ANNOTATION]).endswith(DETACHED)


def finish_detached(sch: Any, last: Any, target: Target, parallel: bool) -> None:
    """A last block of its own: rows in parallel, vectors over channels, or over columns when channels are few."""
    n, h, w, c = sch.get_loops(last)
    lanes = target.lanes("float32")
    inner = c if extent(sch, c) >= lanes // 2 else sch.fuse(w, c)
    size = as_int(sch.get(inner).extent)  # None: LLVM vectorises a loop of symbolic length
    step = math.gcd(size, lanes) if size is not None else 1
    if step > 1:
        _, inner = sch.split(inner, [None, step])
        sch.vectorize(inner)
    outer = sch.fuse(n, h)
    if parallel:
        sch.parallel(outer)


def flatten_rows(sch: Any, block: Any) -> None:
    """(n, h, w, c) → (n·H·W, c), so that a tile of rows is a rectangle of the block too."""
    height, width = (int(v.dom.extent) for v in sch.get(block).iter_vars[1:3])
    sch.transform_block_layout(block, lambda n, h, w, c: ((n * height + h) * width + w, c))


def _finish(sch: Any, conv: Any, reduction: Any, last: Any, depth: int, lanes: int) -> None:
    """Vectorise and unroll the register tile, its initialisation and the epilogue."""
    tile = sch.get_loops(conv)[-3:]
    sch.vectorize(tile[-1])
    sch.unroll(tile[0])
    sch.unroll(tile[1])
    init = sch.decompose_reduction(conv, reduction)
    loops = sch.get_loops(init)
    sch.vectorize(loops[-1])
    for loop in loops[-3:-1]:
        sch.unroll(loop)
    finish_last(sch, last, depth, lanes)
