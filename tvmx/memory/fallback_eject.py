"""The ejection search of core_eject.c in Python, for machines without a C compiler; the comments are there."""

from __future__ import annotations

import random
import time

import numpy as np
from numpy.typing import NDArray

from tvmx.memory.blocks import Ints

SOLVED, INFEASIBLE, OUT_OF_STEPS = 0, 1, 2
# A step here costs as much time as this many in C; the neighbours are found by numpy.
STEP_COST = 40
MAX_PENALTY = 1_000_000


def eject(
    start: NDArray[np.int32],
    end: NDArray[np.int32],
    size: NDArray[np.int32],
    align: NDArray[np.int32],
    height: int,
    base: Ints,
    penalty: Ints,
    seed: int,
    seconds: float,
    max_steps: int,
    offsets: NDArray[np.int32],
) -> tuple[int, int]:
    """See `engine.eject`."""
    deadline = time.thread_time() + seconds
    rng = random.Random(seed)
    offsets[(offsets >= 0) & (offsets > height - size)] = -1
    waiting = np.flatnonzero(offsets < 0).tolist()
    steps = 0
    while waiting:
        if steps > max_steps or time.thread_time() > deadline:
            return OUT_OF_STEPS, steps
        pick = rng.randrange(len(waiting))
        waiting[pick], waiting[-1] = waiting[-1], waiting[pick]
        i = waiting.pop()
        near = np.flatnonzero((offsets >= 0) & (start < end[i]) & (end > start[i]))
        steps += STEP_COST * (len(near) + 16)
        low, high = offsets[near], offsets[near] + size[near]
        at, cost = _cheapest(low, high, base[near] * penalty[near], int(size[i]), int(align[i]), height, rng)
        if at < 0:
            return INFEASIBLE, steps
        if cost:
            penalty[i] = min(penalty[i] + 1, MAX_PENALTY)
            out = near[(low < at + size[i]) & (high > at)]
            offsets[out] = -1
            waiting += out.tolist()
        offsets[i] = at
    return SOLVED, steps


def _cheapest(
    low: NDArray[np.int32],
    high: NDArray[np.int32],
    weight: Ints,
    size: int,
    align: int,
    height: int,
    rng: random.Random,
) -> tuple[int, int]:
    """(address, weight of what overlaps there); address -1 when the block is higher than the arena."""
    limit = height - size
    at = np.concatenate([np.maximum(low - size + 1, 0), high])
    change = np.concatenate([weight, -weight])
    order = np.argsort(at, kind="stable")
    at, total = at[order], np.cumsum(change[order])
    best, best_cost, best_room = -1, 0, 0
    # the weight is total[x] in [at[x], at[x + 1]), and nothing below the first edge
    froms = [0, *at.tolist()]
    weights = [0, *total.tolist()]
    untils = [*froms[1:], limit + 1]
    for begin, until, cost in zip(froms, untils, weights):
        until = min(until, limit + 1)
        first = -(-begin // align) * align
        if first >= until or (best >= 0 and cost > best_cost):
            continue
        room = until - begin
        if best < 0 or cost < best_cost or (rng.random() < 0.5 if cost else room < best_room):
            best, best_cost, best_room = first, cost, room
            if cost and rng.random() < 0.5:
                best = (until - 1) // align * align
    return best, best_cost
