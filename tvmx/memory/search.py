"""The search planner: from the best heuristic down to the lower bound, within a number of steps.

The problem is cut into components in time. Each first gets lowest-first plans of several ranks, then
depth-first searches below lower and lower heights (`restarts`). Equal components are planned once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from tvmx.memory.blocks import Blocks, Ints
from tvmx.memory.components import Component, component, components
from tvmx.memory.engine import engine_name, say_engine, stack
from tvmx.memory.restarts import RESTART_STEPS, Budget, Restarts

# Above this the open lists of a depth-first search (4 n² bytes) and its dives (n² steps) are too much.
MAX_EXACT = 12_000
# Lowest-first plans tried per component, and what one costs in steps per block.
STACKS = 12
STACK_STEPS = 60


@dataclass(frozen=True)
class Searched:
    offsets: Ints
    truncated: bool
    engine: str
    steps: int


def search(blocks: Blocks, offsets: Ints, target: int, budget_s: float, seed: int) -> Searched:
    """Better offsets than `offsets`, down to `target` bytes. Blocks without pins only."""
    budget = Budget.of(budget_s)
    total = budget.steps
    offsets = offsets.copy()
    truncated = False
    tall = [index for index in components(blocks) if int((offsets[index] + blocks.size[index]).max()) > target]
    if tall:
        say_engine()
    known: dict[tuple[bytes, ...], Ints] = {}
    # The smallest first: what they leave of their share goes to the others.
    for left, index in zip(range(len(tall), 0, -1), sorted(tall, key=len)):
        size = blocks.size[index]
        height = int((offsets[index] + size).max())
        part = component(blocks, index, height)
        same = (part.start.tobytes(), part.end.tobytes(), size.tobytes(), part.align.tobytes())
        new = known.get(same)
        if new is None:
            share = Budget(budget.steps // left, budget.deadline)
            before = share.steps
            restarts = Restarts(part, blocks.end[index] - blocks.start[index], seed)
            new = _stack(restarts, size, blocks.align[index], target, share)
            height = min(height, int((new + size).max()))
            found, proved = _descend(restarts, height, target, share)
            budget.steps -= before - share.steps
            truncated |= not proved
            if found is not None:
                new = found.astype(np.int64) * part.unit
            known[same] = new
        if int((new + size).max()) < int((offsets[index] + size).max()):
            offsets[index] = new
    return Searched(offsets, truncated, engine_name(), total - budget.steps)


def _stack(restarts: Restarts, size: Ints, align: Ints, target: int, budget: Budget) -> Ints:
    """The lowest of a dozen lowest-first plans: quick, and often better than any first fit."""
    part = restarts.part
    best: Ints | None = None
    for rank in islice(restarts.ranks(), STACKS):
        offsets = stack(part.start, part.end, size, align, rank)
        budget.steps -= STACK_STEPS * len(size)
        if best is None or int((offsets + size).max()) < int((best + size).max()):
            best = offsets
        if int((best + size).max()) <= target or budget.spent:
            break
    assert best is not None
    return best


def _descend(restarts: Restarts, height: int, target: int, budget: Budget) -> tuple[NDArray[np.int32] | None, bool]:
    """(offsets of the best plan below `height` or None, whether it meets the target or is optimal).

    In passes: the target first, then heights between, halving the distance to the best plan after a
    success and to the target after a failure. Each pass spends twice as much as the one before.
    """
    part: Component = restarts.part
    goal = part.units_below(target)
    best, found = part.units_below(height), None
    if len(part.index) > MAX_EXACT:
        return None, best <= goal
    proved = goal - 1  # the largest height known to be out of reach
    effort = max(budget.steps // 64, RESTART_STEPS)
    while best > proved + 1:
        hopeless, trial, steps = proved, proved + 1, 4 * effort
        while best - hopeless > 1:
            outcome = restarts.below(trial, steps, budget)
            if outcome is True:
                proved = hopeless = trial
            elif outcome is False:
                if budget.spent:
                    return found, False
                hopeless = trial
            else:
                assert not isinstance(outcome, bool)
                found = outcome
                best = int((found + part.size).max())
            trial, steps = (hopeless + best) // 2, effort
        effort *= 2
    return found, True
