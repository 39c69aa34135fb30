"""Large components, from few boxes to all blocks: each level repairs what the one before it could not.

A cycle plans boxes by chains or lowest-first, lowers the lowest plan by ejections, opens the boxes to several times
as many, and goes on from the same plan, down to single blocks. What lies inside a box has no gap, so that most of a
plan is right before the many small blocks are looked at. Few boxes are searched depth-first before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from tvmx.memory.blocks import Ints
from tvmx.memory.boxes import Boxes, boxes
from tvmx.memory.components import Component
from tvmx.memory.ejections import Ejections
from tvmx.memory.engine import engine_name, stack
from tvmx.memory.restarts import Budget, Restarts
from tvmx.memory.skyline import chained

Int32s = NDArray[np.int32]
# Shares of the steps that the cycles get; the last goes on from the best plan with single blocks.
CYCLES = (0.1, 0.2, 0.3, 0.4)
# What of a cycle's steps pays for chains.
CHAINS = 0.3
# So few boxes are searched depth-first, for this share of all steps.
FEW, DEPTH_FIRST = 300, 0.5
# Lowest-first plans that a cycle starts from besides, where there are not too many boxes.
STACKS = 4
LARGE = 5000
# What a lowest-first plan costs in steps per block.
STACK_STEPS = 30
# Attempts that a level's share pays for, and failures after which it gives up.
ATTEMPTS = 8
FAILURES = 6


@dataclass(frozen=True)
class Level:
    """Boxes of a component, or its blocks themselves."""

    part: Component
    boxes: Boxes | None

    def expand(self, offsets: Int32s) -> Int32s:
        return offsets if self.boxes is None else self.boxes.expand(offsets)

    def project(self, offsets: Int32s) -> Int32s:
        """Where the boxes lie when the blocks lie at `offsets`, as a plan of fewer boxes left them."""
        if self.boxes is None:
            return np.array(offsets, dtype=np.int32)
        lowest = np.zeros(len(self.part.size), dtype=np.int32)
        lowest[self.boxes.box_of] = offsets - self.boxes.inner
        return lowest


def levels_of(part: Component) -> list[Level]:
    """The levels of a component, the fewest boxes first, its blocks last."""
    return [*(Level(b.part, b) for b in boxes(part)), Level(part, None)]


def lower_by_levels(levels: list[Level], offsets: Int32s | None, goal: int, seed: int, budget: Budget) -> Int32s:
    """The lowest plan found within the budget; stops at `goal` units. `offsets` are a plan to start from, if any."""
    part, count = levels[-1].part, len(levels[0].part.size)
    ranks = Restarts(levels[0].part, seed).ranks()
    total = budget.steps
    few = _few_boxes(levels, offsets, goal, seed, int(DEPTH_FIRST * total), budget) if count <= FEW else None
    best = min(
        (plan for plan in (few, offsets) if plan is not None), key=lambda plan: _height(part, plan), default=None
    )
    total = budget.steps
    for turn, share in enumerate(CYCLES):
        if best is not None and (_height(part, best) <= goal or budget.spent):
            break
        if best is None or turn < len(CYCLES) - 1:
            chosen, found = sketch(levels, goal, seed + turn, int(CHAINS * share * total), budget)
            # Lowest-first plans keep mixed alignments better apart; of very many, without the core, one takes minutes.
            if found is None or count < LARGE or (engine_name() == "c" and (levels[0].part.align != 1).any()):
                stacked = levels[0].expand(_stacked(levels[0].part, islice(ranks, STACKS), goal, budget))
                if found is None or _height(part, stacked) <= _height(part, found):
                    chosen, found = levels, stacked
            if few is not None and _height(part, few) < _height(part, found):
                chosen, found = levels, few
        else:
            chosen, found = levels[-1:], best
        if len(chosen) == 1 and best is not None and _height(part, best) < _height(part, found):
            found = best
        for level in chosen:
            left = int((1 - CHAINS) * share * total) // len(chosen)
            found = _lowered(part, level, found, goal, seed + turn, left, budget)
        if best is None or _height(part, found) < _height(part, best):
            best = found
    assert best is not None
    return best


def _few_boxes(
    levels: list[Level], offsets: Int32s | None, goal: int, seed: int, steps: int, budget: Budget
) -> Int32s | None:
    """Offsets by depth-first searches of the boxes, each a part of the way from the plan given down to the goal."""
    few, left = levels[0], budget.steps - steps
    boxed = chained(few.part, goal, seed, steps // ATTEMPTS, budget)
    if boxed is None:
        return None
    restarts, height, failures = Restarts(few.part, seed), _height(few.part, boxed), 0
    if offsets is not None:
        height = min(height, _height(levels[-1].part, offsets))
    stride, attempt = (height - goal) // 4, steps // ATTEMPTS
    while height > goal and failures < FAILURES and budget.steps > left and not budget.spent:
        found = restarts.below(max(height - max(stride, 1), goal), min(attempt, budget.steps - left), budget)
        if isinstance(found, np.ndarray):
            boxed, height = found, _height(few.part, found)
        else:
            failures += 1
            stride //= 2
    return few.expand(boxed)


def sketch(levels: list[Level], goal: int, seed: int, steps: int, budget: Budget) -> tuple[list[Level], Int32s | None]:
    """The lowest plan by chains of the boxes of each level: (its level and those after it, where blocks lie)."""
    part = levels[-1].part
    chosen, best = levels, None
    for number, level in enumerate(levels):
        chains = chained(level.part, goal, seed, steps // len(levels), budget)
        if chains is None:
            continue
        found = level.expand(chains)
        if best is None or _height(part, found) < _height(part, best):
            chosen, best = levels[number:], found
        if _height(part, best) <= goal:
            break
    if best is None and engine_name() == "python":  # chains gave up, and heuristics would take minutes
        chosen, best = levels[-1:], _stacked(part, islice(Restarts(part, seed).ranks(), 1), goal, budget)
    return chosen, best


def _height(part: Component, offsets: Int32s) -> int:
    return int((offsets + part.size).max())


def _stacked(part: Component, ranks: Iterator[Int32s], goal: int, budget: Budget) -> Int32s:
    """The lowest of a few lowest-first plans."""
    size, align = part.size.astype(np.int64), part.align.astype(np.int64)
    plans: list[Ints] = []
    for rank in ranks:
        plans.append(stack(part.start, part.end, size, align, rank))
        budget.steps -= STACK_STEPS * len(size)
        if int((plans[-1] + size).max()) <= goal or budget.spent:
            break
    return min(plans, key=lambda offsets: int((offsets + size).max())).astype(np.int32)


def _lowered(
    part: Component, level: Level, offsets: Int32s, goal: int, seed: int, steps: int, budget: Budget
) -> Int32s:
    """Lower a plan by ejections at one level, in strides that are halved at each failure."""
    at = level.project(offsets)
    height = _height(part, offsets)
    stride = max((height - goal) // 2, 1)
    failures, attempt = 0, steps // ATTEMPTS
    while height > goal and failures < FAILURES and steps > 0 and not budget.spent:
        before = budget.steps
        found = Ejections(level.part, at, seed + failures).below(max(height - stride, goal), attempt, budget)
        steps -= before - budget.steps
        if found is None:
            failures += 1
            stride = max(stride // 2, 1)
        else:
            at, height = found, _height(level.part, found)
    return level.expand(at)
