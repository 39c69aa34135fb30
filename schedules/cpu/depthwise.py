"""Depthwise conv2d on CPU: vectors run over channels, a register tile over output columns.

parallel (rows, channel blocks)
  [padding of these rows and channels]   small enough for L1/L2
  [widen]                                these channels' 8-bit weights as floats
  rows, tiles of columns
    kh, kw (unrolled) × columns (unrolled) × vector
    epilogue
"""

from __future__ import annotations

from typing import Any

from tvmx_schedules.cpu.conv_common import copy_rows, extent, finish_last, marked, perfect, stages

from tvmx.passes.legalize.conv_model import MIN_PARALLEL_MACS, depthwise_tile, divisors, split_parallel
from tvmx.schedule import schedule_rule
from tvmx.target import Target

BYTES = 4


@schedule_rule("cpu.depthwise_conv2d", match=lambda w: w.op == "depthwise_conv2d", when=lambda t: t.kind == "cpu")
def depthwise_conv2d(sch: Any, target: Target) -> None:
    stage = stages(sch, "depthwise_conv2d")
    conv, last = stage.anchor, stage.last
    n, h, w, c, kh, kw = sch.get_loops(conv)
    batch, height, width, channels = (extent(sch, l) for l in (n, h, w, c))
    taps = extent(sch, kh) * extent(sch, kw)
    source = sch.get(conv).reads[0].source
    columns, lanes = depthwise_tile(width, channels, target)

    macs = batch * height * width * channels * taps
    # A multiply costs a depthwise kernel about four times what it costs a dense one: loads bound it.
    parallel = target.threads > 1 and macs * 4 >= MIN_PARALLEL_MACS
    threads = target.threads if parallel else 1
    row_bytes = BYTES * int(source.shape[2]) * int(source.shape[1]) * channels // height
    ideal = max(threads * 2 if parallel else 1, batch * height * row_bytes // (target.l2_bytes // 4))
    ho, co = split_parallel(
        [
            (batch * a, b)
            for a in divisors(height)
            if height // a >= min(height, 4)
            for b in divisors(channels // lanes)
        ],
        threads,
        ideal,
    )
    ho //= batch

    h0, h1 = perfect(sch, h, [ho, height // ho])
    w0, w1 = perfect(sch, w, [width // columns, columns])
    c0, c1, cl = perfect(sch, c, [co, channels // lanes // co, lanes], innermost=lanes)
    sch.reorder(n, h0, c0, h1, w0, c1, kh, kw, w1, cl)
    outer = sch.fuse(n, h0, c0)
    sch.reverse_compute_at(last, c1, preserve_unit_loops=True)
    sch.set_scope(conv, 0, "local")
    if stage.before is not None:
        sch.compute_at(stage.before, outer, preserve_unit_loops=True)
        copy_rows(sch, stage.before, 1, target)
    for block in marked(sch).values():
        sch.compute_at(block, outer, preserve_unit_loops=True)
        copy_rows(sch, block, 1, target)
    if parallel:
        sch.parallel(outer)
    for loop in (kh, kw, w1):
        sch.unroll(loop)
    if lanes > 1:
        sch.vectorize(cl)
    init = sch.decompose_reduction(conv, kh)
    loops = sch.get_loops(init)
    if lanes > 1:
        sch.vectorize(loops[-1])
    sch.unroll(loops[-2])
    finish_last(sch, last, 4, lanes)
