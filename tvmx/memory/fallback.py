"""The compiled core's two functions in Python, for machines without a C compiler.

Same algorithms as core_place.c and core_search.c (the comments are there), a few hundred times slower.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

import numpy as np
from numpy.typing import NDArray

from tvmx.memory.blocks import Blocks, Ints

SOLVED, INFEASIBLE, OUT_OF_STEPS = 0, 1, 2
# A step here costs as much time as this many in C; budgets count C's steps.
STEP_COST = 300
# Of a lowest-first plan; fewer than in core_stack.c.
LOOKS, LOOKS_PER_BLOCK = 300_000, 8


def place_in_order(blocks: Blocks, order: Ints, smallest_gap: bool = False) -> Ints:
    """See `engine.place_in_order`."""
    n = len(blocks)
    start, end = blocks.start.tolist(), blocks.end.tolist()
    size, align, pinned = blocks.size.tolist(), blocks.align.tolist(), blocks.pinned.tolist()
    offsets = np.zeros(n, dtype=np.int64)
    # The placed blocks, sorted by offset, in arrays that grow in place: a block looks at those
    # alive with it by one vector comparison, which beats a Python loop from 60 blocks on.
    at = np.zeros(n, dtype=np.int64)
    top, s, e = np.zeros_like(at), np.zeros_like(at), np.zeros_like(at)
    count = 0
    sequence = [k for k in order.tolist() if pinned[k] >= 0]
    sequence += [k for k in order.tolist() if pinned[k] < 0]
    for k in sequence:
        if pinned[k] >= 0:
            place = pinned[k]
        else:
            near = np.flatnonzero((s[:count] < end[k]) & (e[:count] > start[k]))
            place = _gap(at[near].tolist(), top[near].tolist(), size[k], align[k], smallest_gap)
        offsets[k] = place
        i = int(at[:count].searchsorted(place))
        for a, v in ((at, place), (top, place + size[k]), (s, start[k]), (e, end[k])):
            a[i + 1 : count + 1] = a[i:count]
            a[i] = v
        count += 1
    return offsets


def _gap(at: list[int], top: list[int], size: int, align: int, smallest: bool) -> int:
    """Where `size` bytes fit between neighbours sorted by offset, or after the last of them."""
    cursor = 0
    best = -1
    best_room = 0
    for low, high in zip(at, top):
        place = -(-cursor // align) * align
        room = low - cursor
        if low - place >= size and (best < 0 or room < best_room):
            best, best_room = place, room
            if not smallest:
                return best
        cursor = max(cursor, high)
    return best if best >= 0 else -(-cursor // align) * align


def stack(
    start: NDArray[np.int32],
    end: NDArray[np.int32],
    size: Ints,
    align: Ints,
    rank: NDArray[np.int32],
) -> Ints:
    """See `engine.stack`."""
    floor = np.zeros(int(end.max(initial=0)), dtype=np.int64)
    offsets = np.zeros(len(start), dtype=np.int64)
    heap = [(0, r, i) for i, r in enumerate(rank.tolist())]
    heapify(heap)
    looks = LOOKS + LOOKS_PER_BLOCK * len(heap)
    while heap:
        looks -= 1
        support, r, i = heap[0]
        at = -(-int(floor[start[i] : end[i]].max()) // int(align[i])) * int(align[i])
        if at > support and looks >= 0:
            heapreplace(heap, (at, r, i))
            continue
        heappop(heap)
        offsets[i] = at
        floor[start[i] : end[i]] = at + size[i]
    return offsets


class _Stopped(Exception):
    pass


@dataclass
class _Search:
    start: list[int]
    end: list[int]
    size: list[int]
    align: list[int]
    rank: list[int]
    height: int
    max_steps: int
    deadline: float
    weights: NDArray[np.float64]
    steps: int = 0
    near: list[list[int]] = field(default_factory=list)
    support: list[int] = field(default_factory=list)
    offset: dict[int, int] = field(default_factory=dict)

    def heads(self, blocks: list[int], last: tuple[int, int]) -> dict[int, int] | None:
        """Earliest offsets of unplaced blocks, None when they cannot all fit."""
        self.steps += len(blocks)
        if self.steps > self.max_steps or time.thread_time() > self.deadline:
            raise _Stopped
        support, size, height = self.support, self.size, self.height
        head = {i: support[i] for i in blocks}
        passed = [i for i in blocks if (support[i], self.rank[i]) < last]
        for i in passed:
            head[i] = last[0] + 1
        lifted: dict[int, int] = {}
        for j in passed:
            limit = support[j] + size[j]
            tops = [head[k] + size[k] for k in self.near[j] if k in head and head[k] < limit]
            if not tops:
                self.weights[j] += 1
                return None
            lifted[j] = -(-min(tops) // self.align[j]) * self.align[j]
        head.update(lifted)
        load = [0] * (max(self.end[i] for i in blocks) + 1)
        for i in sorted(blocks, key=head.__getitem__, reverse=True):
            s, e = self.start[i], self.end[i]
            for q in range(s, e):
                load[q] += size[i]
            if head[i] + max(load[s:e]) > height:
                self.weights[i] += 1
                return None
        return head

    def parts(self, blocks: list[int]) -> list[list[int]]:
        found: list[list[int]] = []
        until = -1
        for i in blocks:
            if self.start[i] >= until:
                found.append([])
            found[-1].append(i)
            until = max(until, self.end[i])
        return sorted(found, key=len)

    def solve(self, blocks: list[int], last: tuple[int, int]) -> bool:
        head = self.heads(blocks, last)
        if head is None:
            return False
        ceiling = min(self.support[i] + self.size[i] for i in blocks)
        candidates = [i for i in blocks if head[i] == self.support[i] < ceiling and (head[i], self.rank[i]) >= last]
        candidates.sort(key=lambda i: (self.support[i], self.rank[i]))
        for i in candidates:
            at = self.support[i]
            before = [(k, self.support[k]) for k in self.near[i]]
            top = at + self.size[i]
            for k in self.near[i]:
                if k not in self.offset and self.support[k] < top:
                    self.support[k] = -(-top // self.align[k]) * self.align[k]
            self.offset[i] = at
            rest = self.parts([k for k in blocks if k != i])
            if all(self.solve(part, (at, self.rank[i])) for part in rest):
                return True
            for k in blocks:
                self.offset.pop(k, None)
            for k, value in before:
                self.support[k] = value
        return False


def depth_first(
    start: NDArray[np.int32],
    end: NDArray[np.int32],
    size: NDArray[np.int32],
    align: NDArray[np.int32],
    rank: NDArray[np.int32],
    height: int,
    seconds: float,
    max_steps: int,
    weights: NDArray[np.float64],
) -> tuple[int, int, NDArray[np.int32]]:
    """See `engine.depth_first`."""
    n = len(start)
    search = _Search(
        start.tolist(), end.tolist(), size.tolist(), align.tolist(), rank.tolist(), height,
        max(max_steps // STEP_COST, 1), time.thread_time() + seconds, weights,
    )  # fmt: skip
    search.near = [
        [k for k in np.flatnonzero((start < end[i]) & (end > start[i])).tolist() if k != i] for i in range(n)
    ]
    search.support = [0] * n
    offsets = np.zeros(n, dtype=np.int32)
    try:
        found = all(search.solve(part, (0, -1)) for part in search.parts(list(range(n))))
    except _Stopped:
        return OUT_OF_STEPS, search.steps * STEP_COST, offsets
    except RecursionError:  # deeper than Python goes: as good as out of steps
        return OUT_OF_STEPS, search.steps * STEP_COST, offsets
    for i, at in search.offset.items():
        offsets[i] = at
    return (SOLVED if found else INFEASIBLE), search.steps * STEP_COST, offsets
