"""Several CUDA streams: which kernel goes to which, in what order, and where an event makes one wait for another.

Pure data: `plan_streams` turns tasks into a `StreamPlan`, `simulate` says what it would take. Neither knows CUDA, TVM
or memory; `stream_check` judges plans by their steps alone.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

EVENT_S = 1.5e-6
"""What waiting for an event of another stream costs."""

_WORTH = 0.98  # one more stream must bring at least this ratio
_CLOSE = 1.05  # of the bound: near enough to stop looking
_TRIES = 24
_TOO_MANY = 3000  # tasks from which on all stay on one stream
_MANY = 400  # tasks from which on perturbed priorities are not tried


@dataclass(frozen=True)
class Task:
    """One kernel call: `seconds` alone on the device, of which it fills `share` in (0, 1]; runs after tasks `after`."""

    name: str
    seconds: float
    share: float = 1.0
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Step:
    """What the host issues: launch task `index`, or record or wait for event `index`, on `stream`."""

    what: Literal["launch", "record", "wait"]
    stream: int
    index: int


@dataclass(frozen=True)
class StreamPlan:
    """Steps in the order of issue. Stream 0 is the caller's: what it held before runs first, and it ends last."""

    streams: int
    events: int
    steps: tuple[Step, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """Tasks in the order of issue; every task comes after those it depends on."""
        return tuple(s.index for s in self.steps if s.what == "launch")

    @property
    def stream_of(self) -> dict[int, int]:
        return {s.index: s.stream for s in self.steps if s.what == "launch"}


@dataclass(frozen=True)
class Timeline:
    """When each task begins and ends, in seconds, by the simulator."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def makespan(self) -> float:
        return max(self.ends, default=0.0)


def critical_path(tasks: Sequence[Task]) -> float:
    """Seconds of the longest chain."""
    return max((l for l in _bottom_levels(tasks)), default=0.0)


def lower_bound(tasks: Sequence[Task], streams: int) -> float:
    """What no plan for `streams` streams can go under: critical path, device load, or stream load."""
    work = sum(t.seconds * t.share for t in tasks)
    return max(critical_path(tasks), work, sum(t.seconds for t in tasks) / max(1, streams))


def plan_streams(tasks: Sequence[Task], max_streams: int = 4, event_s: float = EVENT_S) -> StreamPlan:
    """The plan with the least simulated time; one stream less wherever that costs next to nothing.

    Longest remaining path first; a ready task goes to the stream of a predecessor if that is free. The time is never
    above that of one stream. Tasks may only depend on earlier ones.
    """
    for index, task in enumerate(tasks):
        if any(not 0 <= a < index for a in task.after):
            raise ValueError(f"task {index} ({task.name}) must come after the tasks that it depends on")
    max_streams = max_streams if len(tasks) <= _TOO_MANY else 1
    best = issue(tasks, range(len(tasks)), [0] * len(tasks), 1)
    best_time = simulate(tasks, best, event_s).makespan
    for streams in range(2, max_streams + 1):
        if best_time <= lower_bound(tasks, max_streams) * 1.001:
            break
        found, found_time = best, best_time
        for plan in _candidates(tasks, streams, event_s):
            time = simulate(tasks, plan, event_s).makespan
            if time < found_time:
                found, found_time = plan, time
            if found_time <= lower_bound(tasks, streams) * _CLOSE:
                break
        if found_time < best_time * _WORTH:
            best, best_time = found, found_time
    return best


def _candidates(tasks: Sequence[Task], streams: int, event_s: float) -> Iterator[StreamPlan]:
    levels = _bottom_levels(tasks)
    for fill in (True, False):
        yield _list_schedule(tasks, streams, levels, fill, event_s)
    if len(tasks) > _MANY:
        return
    chance = random.Random(0)
    for attempt in range(_TRIES):
        noise = 0.05 * (1 + attempt % 6)
        perturbed = [l * (1 + noise * chance.uniform(-1, 1)) for l in levels]
        yield _list_schedule(tasks, streams, perturbed, attempt % 2 == 0, event_s)


def _list_schedule(
    tasks: Sequence[Task], streams: int, priority: Sequence[float], fill: bool, event_s: float
) -> StreamPlan:
    """Start ready tasks by priority as streams become free; with `fill`, only as long as the device has room."""
    waiting = [len(set(t.after)) for t in tasks]
    users = _users(tasks)
    ready = [(-priority[i], i) for i, n in enumerate(waiting) if n == 0]
    heapq.heapify(ready)
    running: list[tuple[float, int]] = []  # (end, task)
    on = [-1] * len(tasks)
    last = [-1] * streams  # task issued last on each stream
    free = set(range(streams))
    order: list[int] = []
    now = 0.0
    while ready or running:
        held = []
        while ready and free:
            item = heapq.heappop(ready)
            task = item[1]
            load = sum(tasks[i].share for _, i in running)
            if fill and running and load + tasks[task].share > 1.001:
                held.append(item)
                continue
            at = _choose(tasks[task], free, last)
            free.discard(at)
            on[task], last[at] = at, task
            order.append(task)
            crossed = any(on[a] != at for a in tasks[task].after)
            heapq.heappush(running, (now + tasks[task].seconds + event_s * crossed, task))
        for item in held:
            heapq.heappush(ready, item)
        now, done = heapq.heappop(running)
        free.add(on[done])
        for user in users[done]:
            waiting[user] -= 1
            if waiting[user] == 0:
                heapq.heappush(ready, (-priority[user], user))
    return issue(tasks, order, on, streams)


def _choose(task: Task, free: set[int], last: Sequence[int]) -> int:
    follows = [s for s in free if last[s] in task.after]
    unused = [s for s in free if last[s] < 0]
    # A stream that ends in a predecessor needs no event for it; a used one no fork.
    return min(follows or [s for s in free if last[s] >= 0] or unused)


def issue(tasks: Sequence[Task], order: Sequence[int], on: Sequence[int], streams: int) -> StreamPlan:
    """Steps for an order of issue and a stream for each task, with the fewest events that keep all dependencies.

    The order of a stream and the events so far already imply some of them; those need no event (the transitive
    reduction). The begin of the run is the first thing on stream 0 and precedes all, its end the last.
    """
    used = sorted({on[t] for t in order} | {0})
    name = {s: i for i, s in enumerate(used)}
    begin, end = len(tasks), len(tasks) + 1
    stream_of = {begin: 0, end: 0, **{t: name[on[t]] for t in order}}
    sequence = [begin, *order, end]
    rank = {t: i for i, t in enumerate(sequence)}
    clocks: dict[int, list[int]] = {}
    position: dict[int, int] = {}
    tail = [[0] * len(used) for _ in used]  # clock of the last task on each stream
    waits: dict[int, list[int]] = {}
    for task in sequence:
        stream = stream_of[task]
        clock = list(tail[stream])
        needs = order if task == end else (begin, *tasks[task].after) if task != begin else ()
        # Latest first: what it implies need not be waited for.
        for need in sorted(needs, key=lambda t: -rank[t]):
            if clock[stream_of[need]] < position[need]:
                waits.setdefault(task, []).append(need)
                clock = [max(a, b) for a, b in zip(clock, clocks[need])]
        clock[stream] += 1
        position[task], clocks[task] = clock[stream], clock
        tail[stream] = clock
    recorded = {need: None for task in sequence for need in waits.get(task, ())}
    events = {need: i for i, need in enumerate(t for t in sequence if t in recorded)}
    steps = []
    for task in sequence:
        steps += [Step("wait", stream_of[task], events[need]) for need in waits.get(task, ())]
        if task not in (begin, end):
            steps.append(Step("launch", stream_of[task], task))
        if task in events:
            steps.append(Step("record", stream_of[task], events[task]))
    return StreamPlan(len(used), len(events), tuple(steps))


def clocks(plan: StreamPlan) -> tuple[dict[int, tuple[int, int]], dict[int, list[int]]]:
    """Task → its stream and place there, counted from 1; task → how much of each stream has ended when it begins."""
    seen = [[0] * plan.streams for _ in range(plan.streams)]
    events: dict[int, list[int]] = {}
    place: dict[int, tuple[int, int]] = {}
    known: dict[int, list[int]] = {}
    for step in plan.steps:
        mine = seen[step.stream]
        if step.what == "wait":
            seen[step.stream] = [max(a, b) for a, b in zip(mine, events[step.index])]
        elif step.what == "record":
            events[step.index] = list(mine)
        else:
            known[step.index] = list(mine)
            mine[step.stream] += 1
            place[step.index] = (step.stream, mine[step.stream])
    return place, known


def simulate(tasks: Sequence[Task], plan: StreamPlan, event_s: float = EVENT_S) -> Timeline:
    """When everything would run: streams in order, waits kept, the device shared evenly where it is overfull.

    Raises ValueError for a plan that waits for an event which is never recorded.
    """
    return _Simulation(tasks, plan, event_s).run()


class _Simulation:
    def __init__(self, tasks: Sequence[Task], plan: StreamPlan, event_s: float) -> None:
        self._tasks, self._event_s = tasks, event_s
        self._queues = [[s for s in plan.steps if s.stream == k] for k in range(plan.streams)]
        self._at = [0] * plan.streams
        self._not_before = [0.0] * plan.streams
        self._recorded: dict[int, float] = {}
        self._left: dict[int, float] = {}  # task → seconds that it still has to run alone
        self._busy: dict[int, int] = {}  # stream → its running task
        self._starts, self._ends = [0.0] * len(tasks), [0.0] * len(tasks)
        self._now = 0.0

    def run(self) -> Timeline:
        while True:
            while self._issue():
                pass
            later = [t for k, t in enumerate(self._not_before) if self._waits(k) and t > self._now]
            if self._busy:
                self._advance(later)
            elif later:
                self._now = min(later)
            else:
                break
        if any(map(self._waits, range(len(self._queues)))):
            raise ValueError("the plan waits for an event that is never recorded")
        return Timeline(tuple(self._starts), tuple(self._ends))

    def _waits(self, stream: int) -> bool:
        return stream not in self._busy and self._at[stream] < len(self._queues[stream])

    def _issue(self) -> bool:
        """Take one step on every stream that runs nothing; False when none could."""
        moved = False
        for stream, queue in enumerate(self._queues):
            if not self._waits(stream):
                continue
            step = queue[self._at[stream]]
            if step.what == "wait":
                if step.index not in self._recorded:
                    continue
                since = self._recorded[step.index]
                self._not_before[stream] = max(self._not_before[stream], since + (self._event_s if since else 0.0))
            elif self._not_before[stream] > self._now:
                continue
            elif step.what == "record":
                self._recorded[step.index] = self._now
            else:
                self._busy[stream] = step.index
                self._starts[step.index] = self._now
                self._left[step.index] = self._tasks[step.index].seconds
                moved = True
                continue
            self._at[stream] += 1
            moved = True
        return moved

    def _advance(self, later: Sequence[float]) -> None:
        """To the next instant at which something ends or may begin."""
        rate = 1 / max(1.0, sum(self._tasks[t].share for t in self._busy.values()))
        step = min(self._left[t] for t in self._busy.values()) / rate
        step = min([step, *(t - self._now for t in later)])
        self._now += step
        for stream, task in list(self._busy.items()):
            self._left[task] -= step * rate
            if self._left[task] <= 1e-15:
                self._ends[task] = self._now
                del self._busy[stream]
                self._at[stream] += 1


def _users(tasks: Sequence[Task]) -> list[list[int]]:
    users: list[list[int]] = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        for need in set(task.after):
            users[need].append(index)
    return users


def _bottom_levels(tasks: Sequence[Task]) -> list[float]:
    """Seconds from the begin of each task to the end of the longest chain that follows."""
    users = _users(tasks)
    levels = [0.0] * len(tasks)
    for index in range(len(tasks) - 1, -1, -1):
        levels[index] = tasks[index].seconds + max((levels[u] for u in users[index]), default=0.0)
    return levels
