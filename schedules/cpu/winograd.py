"""Winograd conv2d on CPU: groups of tile rows go through all stages while their patches and products stay in L2.

parallel (rows of tiles)
  [padding]
  tile × channel vector: 6×6 patch → transformed       both 1-D passes in registers
  36 × panel × rows of tiles: packed GEMM              accumulators in registers
  tile × channel vector: 6×6 products → 4×4 outputs, epilogue
"""

from __future__ import annotations

import math
from typing import Any

from tvmx_schedules.cpu.conv_common import copy_rows, extent, marked, perfect, stages

from tvmx.passes.legalize.conv_model import MIN_PARALLEL_MACS, rows_of_panel, tile_of_panel, winograd_plan
from tvmx.passes.legalize.winograd_te import TILE
from tvmx.schedule import schedule_rule
from tvmx.target import Target


@schedule_rule("cpu.conv2d_winograd", match=lambda w: w.op == "conv2d_winograd", when=lambda t: t.kind == "cpu")
def conv2d_winograd(sch: Any, target: Target) -> None:
    stage = stages(sch, "conv2d_winograd")
    gemm, last = stage.anchor, stage.last
    part = marked(sch)
    shape = [extent(sch, l) for l in sch.get_loops(gemm)]
    channels, depth = shape[3:]
    batch, rows, columns = (math.ceil(extent(sch, l) / t) for l, t in zip(sch.get_loops(last), (1, TILE, TILE)))
    panel = int(sch.get(gemm).reads[-1].source.shape[-1])
    _, lanes = tile_of_panel(panel, target)
    macs = math.prod(shape)
    parallel = target.threads > 1 and macs >= MIN_PARALLEL_MACS
    plan = winograd_plan(batch, rows, columns, depth, channels, target, target.threads if parallel else 1)
    fused, group = plan.group > 0, max(1, plan.group)

    # The last block leads: its loops over groups of tile rows hold everything else.
    n, h, w, c = sch.get_loops(last)
    out_channels = extent(sch, c)
    step = math.gcd(out_channels, lanes)
    tile_row, in_row = sch.split(h, [None, TILE])
    tile_column, in_column = sch.split(w, [None, TILE])
    g0, g1 = perfect(sch, tile_row, [rows // group, group])
    c0, c1 = sch.split(c, [None, step])
    sch.reorder(n, g0, g1, tile_column, c0, in_row, in_column, c1)
    outer = sch.fuse(n, g0)
    for name in ("output_rows", "output_columns"):
        sch.compute_at(part[name], c0, preserve_unit_loops=True)
        sch.set_scope(part[name], 0, "local")
        _unroll_patch(sch, part[name], 4, step)
    _unroll_tail(sch, last, 4)

    if fused:
        sch.compute_at(gemm, outer, preserve_unit_loops=True)
    else:
        sch.parallel(sch.fuse(*sch.get_loops(gemm)[:2]))
    if parallel:
        sch.parallel(outer)  # before decompose_reduction: afterwards TVM takes the initialisation for a race
    _gemm(sch, gemm, panel, lanes, depth, target)

    vector = math.gcd(depth, target.lanes("float32"))
    into = part["input_rows"]
    if fused:
        sch.compute_at(into, outer, preserve_unit_loops=True)
    e, f, p, k = sch.get_loops(into)[-4:]
    k0, k1 = sch.split(k, [None, vector])
    sch.reorder(p, k0, e, f, k1)
    sch.compute_at(part["input_columns"], k0, preserve_unit_loops=True)
    sch.set_scope(part["input_columns"], 0, "local")
    depth_of_patch = 3 if fused else 2
    _unroll_patch(sch, part["input_columns"], depth_of_patch, vector)
    _unroll_tail(sch, into, depth_of_patch)
    if not fused:
        sch.parallel(p)
    if stage.before is not None:
        if fused:
            sch.compute_at(stage.before, outer, preserve_unit_loops=True)
        copy_rows(sch, stage.before, 1 if fused else 0, target)
        if not fused:
            sch.parallel(sch.fuse(*sch.get_loops(stage.before)[:2]))


def _gemm(sch: Any, gemm: Any, panel: int, lanes: int, depth: int, target: Target) -> None:
    """The 36 GEMMs of one group: rows of tiles × panel in registers."""
    m, o, k = sch.get_loops(gemm)[-3:]
    outer = len(sch.get_loops(gemm)) - 3
    positions = extent(sch, m)
    rows = rows_of_panel(positions, panel, depth, target)
    m0, m1 = perfect(sch, m, [positions // rows, rows])
    o0, oi = sch.split(o, [None, panel])
    ov, ol = sch.split(oi, [None, lanes])
    sch.reorder(o0, m0, k, m1, ov, ol)
    write = sch.cache_write(gemm, 0, "local")
    sch.reverse_compute_at(write, m0, preserve_unit_loops=True)
    sch.vectorize(ol)
    sch.unroll(m1)
    sch.unroll(ov)
    init = sch.decompose_reduction(gemm, k)
    loops = sch.get_loops(init)
    sch.vectorize(loops[-1])
    for loop in loops[-3:-1]:
        sch.unroll(loop)
    loops = sch.get_loops(write)[outer + 2 :]
    vectors, inner = sch.split(loops[-1], [None, lanes])
    sch.vectorize(inner)
    for loop in (*loops[:-1], vectors):
        sch.unroll(loop)


def _unroll_patch(sch: Any, block: Any, depth: int, vector: int) -> None:
    """A transform of one patch: everything unrolled but the channel vector."""
    loops = sch.get_loops(block)[depth:]
    assert extent(sch, loops[-1]) == vector, (extent(sch, loops[-1]), vector)
    _vector(sch, loops[-1], vector)
    for loop in loops[:-1]:
        sch.unroll(loop)


def _unroll_tail(sch: Any, block: Any, depth: int) -> None:
    loops = sch.get_loops(block)[depth:]
    _vector(sch, loops[-1], extent(sch, loops[-1]))
    for loop in loops[:-1]:
        sch.unroll(loop)


def _vector(sch: Any, loop: Any, count: int) -> None:
    if count > 1:
        sch.vectorize(loop)
    else:
        sch.unroll(loop)
