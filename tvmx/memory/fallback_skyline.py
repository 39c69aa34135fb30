"""Chains on the skyline (core_skyline.c, the comments are there) in Python, for machines without a C compiler."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from tvmx.memory.blocks import Ints

SOLVED, OUT_OF_STEPS = 0, 2
# A step here costs as much time as this many in C, as budgets count them.
STEP_COST = 10


def skyline(
    start: NDArray[np.int32],
    end: NDArray[np.int32],
    size: Ints,
    align: Ints,
    score: NDArray[np.float64],
    waste: float,
    flush: float,
    max_steps: int,
) -> tuple[int, int, Ints]:
    """See `engine.skyline`."""
    sizes, aligns, scores = size.tolist(), align.tolist(), score.tolist()
    sections = int(end.max(initial=0))
    # Per section its classes, the earliest end first: [end, blocks not placed yet, the next one last].
    classes: list[list[tuple[int, list[int]]]] = [[] for _ in range(sections)]
    for (a, b), group in groupby(enumerate(zip(start.tolist(), end.tolist())), lambda each: each[1]):
        classes[a].append((b, [i for i, _ in group][::-1]))
    alive = np.zeros(sections, dtype=np.int64)
    for a, b in zip(start.tolist(), end.tolist()):
        alive[a:b] += 1
    offsets = np.zeros(len(sizes), dtype=np.int64)
    until, begin, height = {0: sections}, {sections: 0}, {0: 0}
    heap = [(0, 0)] if sections else []
    left_over, steps = len(sizes), 0
    endless = 1 << 62

    def add(a: int, b: int, h: int) -> None:
        until[a], begin[b], height[a] = b, a, h
        heappush(heap, (h, a))

    while left_over:
        h, a = heappop(heap)
        if a not in until or height[a] != h:
            continue
        if steps * STEP_COST > max_steps:
            return OUT_OF_STEPS, steps * STEP_COST, offsets
        b = until[a]
        left = height[begin[a]] if a else endless
        right = height[b] if b < sections else endless
        to = min(left, right)
        lost = waste * (1.0 if to == endless else float(to - h))
        gain, pick = [0.0] * (b - a + 1), [-1] * (b - a)
        needed = (alive[a:b] > 0).tolist()
        for x in range(b - 1, a - 1, -1):
            most, chosen = gain[x + 1 - a] - (lost if needed[x - a] else 0.0), -1
            for c, (e, rest) in enumerate(classes[x]):
                if e > b:
                    break
                i = rest[-1]
                pad = -h % aligns[i]
                upper = h + pad + sizes[i]
                v = scores[i]
                if x == a and upper == left:
                    v += flush * scores[i]
                if e == b and upper == right:
                    v += flush * scores[i]
                if pad and to != endless:
                    v -= waste * float(pad) * (e - x)
                v += gain[e - a]
                if v > most:
                    most, chosen = v, c
                steps += 1
            gain[x - a], pick[x - a] = most, chosen
        steps += b - a
        del until[a]
        x = a
        while x < b and pick[x - a] < 0:
            x += 1
        if x == b:  # it rises to the lower neighbour
            low, high = (begin[a] if left == to else a), b
            if right == to:
                high = until.pop(b)
            add(low, high, to)
            continue
        at = beside = begin[a] if a else -1
        x = a
        while x < b:
            y, upper = x, h
            if pick[x - a] < 0:
                while y < b and pick[y - a] < 0:
                    y += 1
            else:
                y, rest = classes[x][pick[x - a]]
                i = rest.pop()
                offsets[i] = h + -h % aligns[i]
                upper = int(offsets[i]) + sizes[i]
                alive[x:y] -= 1
                left_over -= 1
                if not rest:
                    del classes[x][pick[x - a]]
            if at >= 0 and height[at] == upper:
                until[at], begin[y] = y, at
                if at == beside:
                    heappush(heap, (upper, at))
            else:
                add(x, y, upper)
                at = x
            x = y
        if b < sections and height[b] == height[at]:
            until[at] = until.pop(b)
            begin[until[at]] = at
    return SOLVED, steps * STEP_COST, offsets
