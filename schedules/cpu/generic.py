"""The catch-all: any chain of spatial and reduction blocks, parallel over outer loops and vectorised over inner ones.

1. Cheap intermediates are inlined (`inline.py`).
2. A reduction over the contiguous axis is split into vector lanes (`rfactor`).
3. Everything that shares outer iterations with its reader moves below the reader's loops (`rows.py`): a softmax or
   a layer norm becomes one pass over rows that stay in L1.
4. Each block's inner loops are vectorised; the outer loops run in parallel when the work pays for it.

A block that the loop transformations do not understand (sort, scatter, ...) stays as it was written.
"""

from __future__ import annotations

from typing import Any

from tvmx_schedules.cpu.inline import inline_cheap
from tvmx_schedules.cpu.reduce import split_rows
from tvmx_schedules.cpu.rows import schedule_nests

from tvmx.schedule import Workload, schedule_rule
from tvmx.target import Target


def _any(workload: Workload) -> bool:
    return True


@schedule_rule("cpu.written", match=lambda w: not w.blocks, when=lambda t: t.kind == "cpu", priority=-50)
def written(sch: Any, target: Target) -> None:
    """A kernel of plain loops (sort, top-k, scan, scatter) says itself what is parallel."""


@schedule_rule("cpu.generic", match=_any, when=lambda t: t.kind == "cpu", priority=-100)
def generic(sch: Any, target: Target) -> None:
    """Schedule whatever no other rule claims."""
    inline_cheap(sch)
    split_rows(sch, target)
    schedule_nests(sch, target)
