"""The judge of stream plans and of memory shared under them: happens-before by vector clocks, from the steps alone.

Shares no code with the planners; the build always runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tvmx.errors import PlanError
from tvmx.executor.streams import StreamPlan, Task


@dataclass(frozen=True)
class Region:
    """A buffer's bytes [start, end) in the arena, the tasks that write it (each a part) and those that read it."""

    name: str
    start: int
    end: int
    written_by: tuple[int, ...]
    read_by: tuple[int, ...] = ()

    @property
    def accesses(self) -> tuple[int, ...]:
        return (*self.written_by, *self.read_by)


class Order:
    """Which launches of a plan are ordered. Raises PlanError for steps that make no sense."""

    def __init__(self, plan: StreamPlan) -> None:
        now = [[0] * plan.streams for _ in range(plan.streams)]
        now[0][0] = 1  # the begin of the run is on the caller's stream
        events: dict[int, list[int]] = {}
        self.clocks: dict[int, list[int]] = {}
        self._at: dict[int, tuple[int, int]] = {}
        for step in plan.steps:
            if not 0 <= step.stream < plan.streams:
                raise PlanError(f"a step names stream {step.stream} of {plan.streams}")
            clock = now[step.stream]
            if step.what == "wait":
                if step.index not in events:
                    raise PlanError(f"stream {step.stream} waits for event {step.index} before it is recorded")
                now[step.stream] = [max(a, b) for a, b in zip(clock, events[step.index])]
            elif step.what == "record":
                if step.index in events:
                    raise PlanError(f"event {step.index} is recorded twice")
                events[step.index] = list(clock)
            else:
                if step.index in self._at:
                    raise PlanError(f"task {step.index} is launched twice")
                clock[step.stream] += 1
                self._at[step.index] = (step.stream, clock[step.stream])
                self.clocks[step.index] = list(clock)
        self.end = now[0]

    def launched(self, task: int) -> bool:
        return task in self._at

    def before(self, first: int, then: int) -> bool:
        """Whether task `first` has ended when `then` begins, whatever the device does."""
        stream, position = self._at[first]
        return first != then and self.clocks[then][stream] >= position

    def span(self, tasks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Per stream: how much of it has surely ended before any of `tasks` begins, and how much when all have ended.

        One set of tasks precedes another where, on every stream, its end is within the other's begin.
        """
        begin = [min(column) for column in zip(*(self._before(t) for t in tasks))]
        end = [0] * len(begin)
        for stream, position in (self._at[t] for t in tasks):
            end[stream] = max(end[stream], position)
        return begin, end

    def _before(self, task: int) -> list[int]:
        clock = list(self.clocks[task])
        clock[self._at[task][0]] -= 1  # a task does not precede itself
        return clock

    def ended(self, task: int) -> bool:
        """Whether the caller's stream, at its end, has waited for the task."""
        stream, position = self._at[task]
        return self.end[stream] >= position


def check_plan(tasks: Sequence[Task], plan: StreamPlan, regions: Sequence[Region] = ()) -> None:
    """Raise PlanError, naming the tasks or buffers, unless

    every task runs once, after the begin of the run, after what it depends on, and before the run's end; and buffers
    that share bytes are used one after the other, whatever the device does.
    """
    order = Order(plan)
    for index, task in enumerate(tasks):
        if not order.launched(index):
            raise PlanError(f"task {task.name} is never launched")
        if order.clocks[index][0] < 1:
            raise PlanError(f"task {task.name} may begin before the run does: its stream waits for nothing of stream 0")
        if not order.ended(index):
            raise PlanError(f"the run may end before task {task.name} does")
        for need in task.after:
            if not order.before(need, index):
                raise PlanError(f"task {task.name} may begin before {tasks[need].name}, which it depends on, has ended")
    for region in regions:
        for reader in region.read_by:
            if not any(order.before(w, reader) for w in region.written_by):
                writer = tasks[region.written_by[0]].name
                raise PlanError(f"{tasks[reader].name} may read {region.name!r} before {writer} has written it")
    _check_sharing(tasks, order, regions)


def _check_sharing(tasks: Sequence[Task], order: Order, regions: Sequence[Region]) -> None:
    placed = [r for r in regions if r.start < r.end]
    if not placed:
        return
    low, high = (np.array([getattr(r, end) for r in placed]) for end in ("start", "end"))
    spans = [order.span(r.accesses) for r in placed]
    begins, ends = (np.array([s[i] for s in spans]) for i in (0, 1))
    for i, region in enumerate(placed):
        meets = (low < region.end) & (high > region.start)
        meets[: i + 1] = False
        after = (ends[i] <= begins).all(axis=1)
        before = (ends <= begins[i]).all(axis=1)
        for j in np.flatnonzero(meets & ~after & ~before)[:1]:
            other = placed[int(j)]
            first, then = _clash(order, region, other)
            raise PlanError(
                f"buffers {region.name!r} and {other.name!r} share bytes [{max(region.start, other.start)}, "
                f"{min(region.end, other.end)}), but {tasks[first].name} and {tasks[then].name} may run at once"
            )


def _clash(order: Order, first: Region, then: Region) -> tuple[int, int]:
    """Two accesses that no order of the two regions allows."""
    pairs = [(a, b) for a in first.accesses for b in then.accesses]
    return next((p for p in pairs if not order.before(*p) and not order.before(*reversed(p))), pairs[0])
