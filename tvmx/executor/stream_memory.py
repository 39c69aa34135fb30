"""Arena offsets for kernels on several streams: buffers share bytes only where one is done before the other begins.

Lifetimes on a line cannot say that: two buffers of parallel branches may be alive at once though their places in the
order of issue are apart. So the problem is a graph of conflicts, by the partial order of the stream plan.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tvmx.errors import PlanError
from tvmx.executor.stream_check import Region
from tvmx.executor.streams import StreamPlan, clocks
from tvmx.memory import Buffer, Problem, Solution, plan
from tvmx.runtime.arena import ALIGNMENT

_MANY = 800  # buffers from which on one order must do


@dataclass(frozen=True)
class Use:
    """A buffer to place: its bytes, the tasks that write it (each a part) and those that read it."""

    id: str
    size: int
    written_by: tuple[int, ...]
    read_by: tuple[int, ...] = ()

    @property
    def accesses(self) -> tuple[int, ...]:
        return (*self.written_by, *self.read_by)


def plan_arena(uses: Sequence[Use], streams: StreamPlan, budget_s: float = 2.0, planner: str = "best") -> Solution:
    """Offsets for `uses` under the partial order of `streams`; exact lifetimes on one stream.

    The lower bound is what is alive at once in the order of issue. Raises PlanError when a planner is unknown.
    """
    issued = {task: i for i, task in enumerate(streams.order)}
    line = [_on_line(u, issued) for u in uses]
    if streams.streams == 1:
        return plan(Problem(line), budget_s=budget_s, planner=planner)
    began = time.perf_counter()
    bound = plan(Problem(line), budget_s=budget_s / 4, planner="greedy").lower_bound if uses else 0
    conflicts = _conflicts(uses, streams)
    # Widened until it covers every conflict, a lifetime on a line is one more way to the same problem.
    wide = plan(Problem(_widened(line, conflicts)), budget_s=budget_s / 2, planner=planner)
    offsets, height = dict(wide.offsets), wide.height
    name = f"{wide.planner} (widened)"
    searched, searched_height = _search(uses, conflicts, bound, began + budget_s)
    if searched_height < height:
        offsets, height, name = searched, searched_height, "conflicts"
    return Solution(offsets, height, bound, name, time.perf_counter() - began)


def regions_of(uses: Sequence[Use], offsets: Mapping[str, int]) -> list[Region]:
    """The placed buffers, for `check_plan`."""
    return [Region(u.id, offsets[u.id], offsets[u.id] + u.size, u.written_by, u.read_by) for u in uses]


def _on_line(use: Use, issued: Mapping[int, int]) -> Buffer:
    first = min(issued[w] for w in use.written_by)
    if any(issued[r] <= first for r in use.read_by):
        raise PlanError(f"buffer {use.id!r} is read before it is written")
    return Buffer(use.id, (first, max(issued[a] for a in use.accesses) + 1), use.size, ALIGNMENT)


def _conflicts(uses: Sequence[Use], streams: StreamPlan) -> list[list[int]]:
    """For each buffer those whose bytes it may not take."""
    at, known = clocks(streams)
    begins = np.empty((len(uses), streams.streams), np.int64)
    ends = np.zeros_like(begins)
    for i, use in enumerate(uses):
        # Readers come after a writer, so the writers stand for the begin of a buffer.
        begins[i] = np.min([known[w] for w in use.written_by], axis=0)
        for stream, position in (at[a] for a in use.accesses):
            ends[i, stream] = max(ends[i, stream], position)
    found = []
    for i in range(len(uses)):
        apart = (ends[i] <= begins).all(axis=1) | (ends <= begins[i]).all(axis=1)
        apart[i] = True
        found.append([int(j) for j in np.flatnonzero(~apart)])
    return found


def _widened(line: Sequence[Buffer], conflicts: Sequence[Sequence[int]]) -> list[Buffer]:
    """Each lifetime up to the begin of the last buffer that it conflicts with."""
    out = []
    for i, b in enumerate(line):
        end = max([b.end, *(line[j].start + 1 for j in conflicts[i])])
        out.append(Buffer(b.id, (b.start, end), b.size, b.alignment))
    return out


def _search(
    uses: Sequence[Use], conflicts: Sequence[Sequence[int]], bound: int, deadline: float
) -> tuple[dict[str, int], int]:
    """First fit in several orders, then with random swaps while there is time."""
    ids = range(len(uses))
    orders = [sorted(ids, key=lambda i: (-uses[i].size, i))]
    if len(uses) <= _MANY:
        orders += [
            sorted(ids, key=lambda i: (-uses[i].size * len(conflicts[i]), i)),
            list(ids),
        ]
    (best, height), order = min(((_first_fit(uses, conflicts, o), o) for o in orders), key=lambda found: found[0][1])
    chance = random.Random(0)
    tries = 0
    while height > bound and tries < 400 and len(uses) > 2 and time.perf_counter() < deadline:
        i, j = chance.sample(range(len(order)), 2)
        changed = list(order)
        changed.insert(j, changed.pop(i))
        found, found_height = _first_fit(uses, conflicts, changed)
        tries += 1
        if found_height <= height:
            best, height, order = found, found_height, changed
    return best, height


def _first_fit(
    uses: Sequence[Use], conflicts: Sequence[Sequence[int]], order: Sequence[int]
) -> tuple[dict[str, int], int]:
    at: dict[int, int] = {}
    height = 0
    for i in order:
        taken = sorted((at[j], at[j] + uses[j].size) for j in conflicts[i] if j in at and uses[j].size)
        here = 0
        for low, high in taken:
            if here + uses[i].size <= low:
                break
            here = max(here, -(-high // ALIGNMENT) * ALIGNMENT)
        at[i] = here
        height = max(height, here + uses[i].size if uses[i].size else 0)
    return {uses[i].id: offset for i, offset in at.items()}, height
