"""The catch-all: every block parallel over its outer iterations and vectorised over its innermost spatial loop."""

from __future__ import annotations

import math
from typing import Any

from tvmx.schedule import Workload, schedule_rule
from tvmx.target import Target

MIN_PARALLEL_ITERATIONS = 1 << 14  # below this, waking a thread costs more than it saves


def _any(workload: Workload) -> bool:
    return True


@schedule_rule("cpu.generic", match=_any, when=lambda t: t.kind == "cpu", priority=-100)
def generic(sch: Any, target: Target) -> None:
    """Inline what is elementwise, then parallelise and vectorise what remains."""
    from tvm.s_tir import ScheduleError

    root = sch.get_sblock("root")
    for block in sch.get_child_blocks(root):
        try:
            sch.compute_inline(block)
        except ScheduleError:
            continue
    for block in sch.get_child_blocks(root):
        _schedule_block(sch, block, target)


def _schedule_block(sch: Any, block: Any, target: Target) -> None:
    info = sch.get(block)
    loops = sch.get_loops(block)
    if not loops:
        return
    kinds = [int(v.iter_type) for v in info.iter_vars]
    if len(kinds) != len(loops) or any(k not in (0, 2) for k in kinds):
        return
    spatial = [l for l, k in zip(loops, kinds) if k == 0]
    reduction = [l for l, k in zip(loops, kinds) if k == 2]
    if not spatial:
        return
    lanes = target.lanes(str(info.writes[0].source.dtype)) if info.writes else 1
    if not reduction:
        fused = sch.fuse(*spatial)
        outer, inner = sch.split(fused, [None, lanes])
        sch.vectorize(inner)
        _parallel(sch, outer, lanes, target)
        return
    outer = sch.fuse(*spatial) if len(spatial) > 1 else spatial[0]
    work = math.prod(_extent(sch, l) or 1 for l in reduction)
    _parallel(sch, outer, work, target)


def _parallel(sch: Any, loop: Any, work_inside: int, target: Target) -> None:
    extent = _extent(sch, loop)
    if target.threads > 1 and (extent is None or extent * work_inside >= MIN_PARALLEL_ITERATIONS):
        sch.parallel(loop)


def _extent(sch: Any, loop: Any) -> int | None:
    extent = sch.get(loop).extent
    return int(extent) if hasattr(extent, "value") else None
