"""Reductions: partial results in vector lanes for a contiguous axis, vectors over the kept axis for any other."""

from __future__ import annotations

import math
from typing import Any

from tvmx_schedules.cpu.blocks import Info, leaves
from tvmx_schedules.cpu.loops import (
    PARTITION_HINT,
    Loop,
    has_varying_condition,
    is_indirect,
    lanes_of,
    loop_stride,
    loops_of,
    needs_tail,
    vectorize_loop,
)

from tvmx.target import Target

MAX_KEPT_UNROLL = 4  # accumulator vectors of a reduction that is vectorised over a kept axis
MAX_WINDOW = 25  # taps of a window that is unrolled, but for its outermost loop
FOLD = 4  # partial results that the lanes are folded to, before the last


def split_rows(sch: Any, target: Target) -> None:
    """Give every reduction over a contiguous axis one partial result per vector lane (`rfactor`).

    Only where the lanes divide the axis: TVM drops the bounds check of a split block when it moves the block, so an
    axis of another length keeps its serial loop (our own legalizations pad such rows instead).
    """
    from tvm.s_tir import ScheduleError

    for info in leaves(sch):
        if not info.is_plain or not info.is_reduction or info.op == "matmul" or _is_split(info):
            continue
        loops = loops_of(sch, info)
        axis = row_axis(sch, info, loops)
        if axis is None or axis.extent is None:
            continue
        reduced = [l for l in loops if l.reduction]
        lanes = lanes_of(info, target)
        try:
            position = next(i for i, l in enumerate(reduced) if l.var.same_as(axis.var))
            run = _contiguous_run(sch, info, reduced, position)
            extent = 1
            for l in run:
                extent *= l.extent or 1
            if extent % lanes or extent < 2 * lanes:
                continue
            fused = sch.fuse(*[l.rv for l in run]) if len(run) > 1 else run[0].rv
            _, lane = sch.split(fused, [None, lanes])
            rank = len(info.output.shape)
            sch.rfactor(lane, rank)
            if lanes > 2 * FOLD:  # the lanes' sum in two short chains of adds instead of one long one
                _, quarter = sch.split(sch.get_loops(info.rv)[-1], [None, FOLD])
                sch.rfactor(quarter, rank)
        except ScheduleError:
            continue


def row_axis(sch: Any, info: Info, loops: list[Loop]) -> Loop | None:
    """The reduction loop over which the block's largest operand is contiguous, if there is one."""
    best, best_size = None, -1
    for load in info.loads:
        size = 1
        for extent in load.buffer.shape:
            value = getattr(extent, "value", None)
            size *= int(value) if value is not None else 256
        for loop in loops:
            if loop.reduction and size > best_size and loop_stride(sch, info, load, loop.var) == 1:
                best, best_size = loop, size
    if best is None:
        return None
    for load in info.loads:
        if loop_stride(sch, info, load, best.var) not in (0, 1):
            return None
    return best


def _contiguous_run(sch: Any, info: Info, reduced: list[Loop], last: int) -> list[Loop]:
    """The loops ending at `reduced[last]` that every load walks as one contiguous range (h, w of an NCHW mean)."""
    if last != len(reduced) - 1:
        return [reduced[last]]
    run = [reduced[last]]
    for loop in reversed(reduced[:last]):
        inner = 1
        for l in run:
            if l.extent is None:
                return run
            inner *= l.extent
        strides = {loop_stride(sch, info, load, loop.var) for load in info.loads}
        if strides != {inner} or loop.extent is None:
            return run
        run.insert(0, loop)
    return run


def _is_split(info: Info) -> bool:
    return info.name.endswith("_rf")


def vectorize_reduction(sch: Any, info: Info, skip: int, target: Target) -> Any:
    """Order and vectorise a reduction's loops below the first `skip`.

    Returns the loop at which `decompose_reduction` may give the initial value its own loops (only after the outer
    loops are parallel: TVM refuses the other order), or None when the block stays serial.
    """
    loops = loops_of(sch, info, skip)
    reduced = [l for l in loops if l.reduction]
    kept = [l for l in loops if not l.reduction]
    if not reduced:
        return None
    vector = _vector_axis(sch, info, kept)
    if vector is None:
        return None
    others = [l for l in kept if l is not vector]
    lanes = lanes_of(info, target)
    if is_indirect(info) and needs_tail(vector, lanes):
        return None
    sch.reorder(*[l.rv for l in others], *[l.rv for l in reduced], vector.rv)
    if has_varying_condition(info, lambda _: True):
        sch.annotate(reduced[-1].rv, PARTITION_HINT, 1)
    inner = vectorize_loop(sch, vector.rv, lanes, unroll=MAX_KEPT_UNROLL)
    if len(inner) > 1:  # the accumulators of one step stay in registers over the whole reduction
        first = sch.get_loops(info.rv)
        position = len(first) - len(inner)
        outer = first[position]
        sch.reorder(outer, *[l.rv for l in reduced])
    if math.prod(l.extent or MAX_WINDOW + 1 for l in reduced) <= MAX_WINDOW:
        for loop in reduced[1:]:
            sch.unroll(loop.rv)
    return reduced[0].rv


def _vector_axis(sch: Any, info: Info, kept: list[Loop]) -> Loop | None:
    assert info.store is not None
    for loop in reversed(kept):
        if loop_stride(sch, info, info.store, loop.var) != 1 or loop.extent == 1:
            continue
        if all(loop_stride(sch, info, load, loop.var) in (0, 1) for load in info.loads):
            return loop
    return None
