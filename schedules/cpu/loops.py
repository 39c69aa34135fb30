"""Loop transformations that every CPU schedule shares: vectorise, reduce in lanes, run in parallel."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvmx_schedules.cpu.blocks import REDUCTION, Info, Load, as_int, stride, uses

from tvmx.schedule.tir import substitute
from tvmx.target import Target

log = logging.getLogger(__name__)

PARTITION_HINT = "pragma_loop_partition_hint"
"""Makes TVM's LoopPartition split a loop into a main part without the bounds check and a tail."""

MIN_PARALLEL_COST = 60_000
"""Work (iterations times cost) that is worth waking a thread: about 20 µs of vector code on one core."""


@dataclass(frozen=True)
class Loop:
    """A loop over a block, and what it does to the block's iterators."""

    rv: Any
    var: Any
    extent: int | None
    reduction: bool


def loops_of(sch: Any, info: Info, skip: int = 0) -> list[Loop]:
    """The loops around a block, outermost first, without the first `skip`."""
    rvs = sch.get_loops(info.rv)
    if not rvs:
        return []
    bindings = bindings_of(sch, info)
    out = []
    for rv in rvs[skip:]:
        loop = sch.get(rv)
        reduces = any(
            kind == REDUCTION and uses(value, loop.loop_var) for kind, value in zip(info.iter_kinds, bindings)
        )
        out.append(Loop(rv, loop.loop_var, as_int(loop.extent), reduces))
    return out


def bindings_of(sch: Any, info: Info) -> list[Any]:
    """What each block iterator is bound to, in loop variables."""
    from tvm.s_tir import SBlockRealize

    from tvmx.schedule.tir import walk

    found: list[Any] = []
    node = sch.get(info.rv)

    def visit(realize: Any) -> None:
        if realize.block.same_as(node):
            found.append(list(realize.iter_values))

    rvs = sch.get_loops(info.rv)
    walk(sch.get(rvs[-1]), SBlockRealize, visit)
    assert found, f"block {info.name} is not below its own loop"
    return found[0]


def loop_stride(sch: Any, info: Info, load: Load, var: Any) -> int | None:
    """Elements between two accesses of `load` as loop variable `var` grows by one."""
    mapping = [(iv.var, value) for iv, value in zip(info.block.iter_vars, bindings_of(sch, info))]
    indices = tuple(substitute(index, mapping) for index in load.indices)
    return stride(Load(load.buffer, indices), var)


def lanes_of(info: Info, target: Target) -> int:
    """Vector lanes for a block: its widest element decides, so that no value needs two registers."""
    widths = [target.lanes(str(load.buffer.dtype)) for load in info.loads]
    if info.store is not None:
        widths.append(target.lanes(str(info.store.buffer.dtype)))
    return max(1, min((w for w in widths if w > 0), default=1))


def pick_lanes(extent: int | None, lanes: int) -> tuple[int, bool]:
    """(vector length, whether a tail remains) for a loop of `extent`: short vectors rather than a long tail."""
    if extent is None:
        return lanes, True
    if extent % lanes == 0:
        return lanes, False
    if extent < lanes and extent <= 4:
        return extent, False
    if extent < 4 * lanes:
        length = lanes
        while length > 4 and extent % length:
            length //= 2
        if extent % length == 0:
            return length, False
    if extent < lanes:
        length = 1
        while length * 2 <= extent:
            length *= 2
        return length, True
    return lanes, True


def vectorize_loop(sch: Any, loop: Any, lanes: int, unroll: int = 1) -> list[Any]:
    """Split `loop` for vectors of `lanes` (with a separate tail where they do not divide it); return the loops."""
    extent = as_int(sch.get(loop).extent)
    length, tail = pick_lanes(extent, lanes)
    if extent is not None and length == extent:
        sch.vectorize(loop)
        return [loop]
    if length == 1:
        return [loop]
    if not tail and unroll > 1 and extent is not None:
        while (extent // length) % unroll:
            unroll -= 1
        if unroll > 1:
            outer, middle, inner = sch.split(loop, [None, unroll, length])
            sch.vectorize(inner)
            sch.unroll(middle)
            return [outer, middle, inner]
    outer, inner = sch.split(loop, [None, length])
    sch.vectorize(inner)
    if tail:
        sch.annotate(outer, PARTITION_HINT, 1)
    return [outer, inner]


def parallelize(sch: Any, loops: Sequence[Any], work: float, target: Target) -> Any:
    """Run the outer `loops` (adjacent, spatial) in parallel if `work` pays for it; return the outermost loop left.

    Only as many loops are fused as it takes to occupy the threads evenly: fused indices cost divisions.
    """
    if not loops:
        return None
    if target.threads == 1 or work < MIN_PARALLEL_COST:
        return loops[0]
    wanted = 8 * target.threads
    count, extent = 0, 1
    for loop in loops:
        size = as_int(sch.get(loop).extent)
        count += 1
        extent *= 256 if size is None else size
        if extent >= wanted or (extent >= target.threads and extent % target.threads == 0):
            break
    if extent == 1:
        return loops[0]
    fused = sch.fuse(*loops[:count]) if count > 1 else loops[0]
    sch.parallel(fused)
    return fused


def unit_strides(sch: Any, info: Info, var: Any) -> bool:
    """Does every access move by 0 or 1 elements with `var`, and the store by 1? Then vector code is plain loads."""
    assert info.store is not None
    if loop_stride(sch, info, info.store, var) != 1:
        return False
    return all(loop_stride(sch, info, load, var) in (0, 1) for load in info.loads)


def has_varying_condition(info: Info, var_uses: Any) -> bool:
    """Does a branch of the body depend on a value for which `var_uses(expr)` holds? Vector lanes then diverge."""
    from tvm.ir.expr import Call

    from tvmx.schedule.tir import walk

    found = False

    def visit(call: Any) -> None:
        nonlocal found
        if str(getattr(call.op, "name", "")).endswith("if_then_else"):
            found = found or var_uses(call.args[0])

    walk(info.block.body, Call, visit)
    return found


def computes_with_position(info: Info) -> bool:
    """Does the body compute with its own position beyond indices (a pool's divisor)? Fused loops then divide for it."""
    from tvm.ir import Var

    from tvmx.schedule.tir import walk

    def count(node: Any) -> int:
        found: list[Any] = []
        walk(node, Var, lambda v: found.append(v) if any(v.same_as(iv.var) for iv in info.block.iter_vars) else None)
        return len(found)

    accesses = [*info.loads, *([info.store] if info.store is not None else [])]
    return count(info.block.body) > sum(count(index) for access in accesses for index in access.indices)


def is_indirect(info: Info) -> bool:
    """Does an index come out of memory? TVM's LoopPartition mixes int32 and int64 there and fails, so no tails."""
    from tvm.ir.expr import TensorLoad

    from tvmx.schedule.tir import walk

    found: list[Any] = []
    for load in info.loads:
        for index in load.indices:
            walk(index, TensorLoad, found.append)
    return bool(found)


def needs_tail(loop: Loop, lanes: int) -> bool:
    """Would `vectorize_loop` leave a partial vector?"""
    return pick_lanes(loop.extent, lanes)[1]
