"""Tasks: the distinct kernels of a lowered module, and how much each matters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tvmx.errors import TuneError
from tvmx.tune.apply import is_scheduled
from tvmx.tune.measure import signature
from tvmx.tune.workload import canonical, workload_hash


@dataclass(frozen=True)
class Task:
    """One workload to tune. Its weight in the model is `occurrences` × the default's seconds."""

    name: str  # of the first kernel that computes it
    workload: str  # workload_hash
    func: Any  # canonical, unscheduled PrimFunc
    occurrences: int  # calls in one run of the model
    work: int  # iterations of all blocks: an estimate of its time before anything is measured


def extract_tasks(lowered: Any) -> list[Task]:
    """The kernels that a fused, unscheduled Relax module calls, equal ones merged, most work first.

    Kernels of symbolic shape are left out: they keep their default.
    """
    import tvm
    from tvm import relax

    from tvmx.schedule import Workload

    calls: dict[str, int] = {}

    def count(expr: Any) -> None:
        if isinstance(expr, relax.Call):
            for arg in expr.args[:1]:
                if isinstance(arg, tvm.ir.GlobalVar):
                    calls[arg.name_hint] = calls.get(arg.name_hint, 0) + 1

    kernels = {}
    for var, func in lowered.functions.items():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, count)
        elif isinstance(func, tvm.tirx.PrimFunc) and not is_scheduled(func):
            kernels[var.name_hint] = func

    tasks: dict[str, Task] = {}
    for name, func in sorted(kernels.items()):
        if not calls.get(name):
            continue
        try:
            signature(func)
        except TuneError:
            continue
        key = workload_hash(func)
        found = tasks.get(key)
        times = calls[name] + (found.occurrences if found else 0)
        workload = Workload.of(func)
        if workload.is_static:
            work = sum(math.prod((*b.spatial, *b.reduction)) for b in workload.blocks)
            tasks[key] = Task(found.name if found else name, key, canonical(func), times, work)
    return sorted(tasks.values(), key=lambda t: -t.work * t.occurrences)


def merge_tasks(tasks: Iterable[Task]) -> list[Task]:
    """Tasks of several programs as those of one: equal workloads once, their calls added, most work first."""
    merged: dict[str, Task] = {}
    for task in tasks:
        found = merged.get(task.workload)
        times = task.occurrences + (found.occurrences if found else 0)
        merged[task.workload] = dataclasses.replace(found or task, occurrences=times)
    return sorted(merged.values(), key=lambda t: -t.work * t.occurrences)
