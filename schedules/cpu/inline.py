"""Which intermediate results are recomputed where they are read, and which are stored.

`pad → relu → slice` chains vanish into their reader; an `exp` that is read twice, or an argument of a reduction
that reads it once per output, is computed once.
"""

from __future__ import annotations

from typing import Any

from tvmx_schedules.cpu.blocks import SPATIAL, Info, inspect, leaves, uses

MAX_RECOMPUTE = 4.0  # extra vector operations per element that a store and a load are worth


def inline_cheap(sch: Any, keep: Any = ()) -> list[Info]:
    """Inline every spatial block whose recomputation costs less than storing it; return the blocks left.

    `keep` names blocks that stay (anchors of a schedule).
    """
    from tvm.s_tir import ScheduleError

    for info in leaves(sch):
        if info.name in keep or info.op or not info.is_plain or any(k != SPATIAL for k in info.iter_kinds):
            continue
        info = inspect(sch, info.rv)  # its own producers may have been inlined by now
        if not _worth_inlining(sch, info):
            continue
        try:
            sch.compute_inline(info.rv)
        except ScheduleError:
            continue  # an output, or not invertible: it stays a block of its own
    return leaves(sch)


def _worth_inlining(sch: Any, info: Info) -> bool:
    consumers = [inspect(sch, c) for c in sch.get_consumers(info.rv)]
    if not consumers:
        return False
    reads = sum(_reads(consumer, info) for consumer in consumers)
    reuse = reads / max(1, info.iterations)
    return reuse <= 1 or info.cost * (reuse - 1) <= MAX_RECOMPUTE


def _reads(consumer: Info, producer: Info) -> float:
    """How often `consumer` evaluates `producer`'s expression, loop-invariant code being hoisted."""
    total = 0.0
    for load in consumer.loads:
        if not load.buffer.same_as(producer.output):
            continue
        count = 1.0
        hoisted = True  # still in the innermost loops, which do not index the load
        pairs = list(zip(consumer.block.iter_vars, consumer.extents))
        for var, extent in reversed(pairs):
            used = any(uses(index, var.var) for index in load.indices)
            hoisted = hoisted and not used
            if not hoisted:
                count *= 256 if extent is None else extent
        total += count
    return total
