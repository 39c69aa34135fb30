"""The search planner: from the best heuristic down to the lower bound, within a number of steps.

The problem is cut into components in time. Each is also joined into boxes (`boxes`), gets lowest-first plans of
several ranks and plans by chains (`skyline`), and then, below lower and lower heights, depth-first searches with
restarts (`restarts`) and ejection searches (`ejections`), of the boxes and of the blocks. Equal components are planned
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from tvmx.memory.blocks import Blocks, Ints
from tvmx.memory.boxes import boxes
from tvmx.memory.components import Component, component, components
from tvmx.memory.ejections import Ejections
from tvmx.memory.engine import engine_name, say_engine, stack
from tvmx.memory.levels import Level, levels_of, lower_by_levels, sketch
from tvmx.memory.restarts import RESTART_STEPS, STEPS_PER_SECOND, Budget, Restarts
from tvmx.memory.skyline import chained

Int32s = NDArray[np.int32]
# Above this, boxes opened level by level come before the depth-first search.
MEDIUM = 500
# Above this the dives of a depth-first search (n² steps) take what other searches do more with.
MAX_EXACT = 1000
# Lowest-first plans tried per component, and what one costs in steps per block.
STACKS = 12
STACK_STEPS = 30
# What of the steps pays for plans by chains, and so many a block at most.
CHAINS, CHAIN_STEPS = 0.03, 500
# Four of them where that is the time of a short ejection search, which does more.
LARGE = 5000
# Steps a block that a search takes at least, whatever the budget: fewer move nothing in a large problem.
LEAST_STEPS = 2000
LEAST_STEPS_LARGE = 6000
# What of the budget of a large problem is left to the search by heuristics, boxes and the sketch.
SHARE_OF_LARGE = 0.7
# With several components: the share of the steps for the first visits, and how often one is visited at most.
FIRST_SHARE, VISITS = 0.4, 12
# Steps a block that the chains of a sketch get; at least one plan is made of each level.
SKETCH_STEPS = 1000
# An ejection search of fewer steps a block has not looked at every block often enough.
EJECTION_STEPS = 150


@dataclass(frozen=True)
class Searched:
    offsets: Ints
    truncated: bool
    engine: str
    steps: int


def _least_steps(count: int) -> int:
    return count * (LEAST_STEPS if count < LARGE else LEAST_STEPS_LARGE)


@dataclass(frozen=True)
class Sketch:
    """A first plan of a large problem by chains, and the boxes of its components, by each one's first block."""

    offsets: Ints
    levels: dict[int, list[Level]]


def sketched(blocks: Blocks, target: int, seed: int) -> Sketch | None:
    """Takes a few seconds at most where heuristics take longer. None when even chains would."""
    say_engine()
    offsets = np.zeros(len(blocks), dtype=np.int64)
    known: dict[int, list[Level]] = {}
    for index in components(blocks):
        part = component(blocks, index, 4 * target)
        levels = known[int(index[0])] = levels_of(part)
        steps = SKETCH_STEPS * len(index)
        _, found = sketch(levels, part.units_below(target), seed, steps, Budget.of(steps / STEPS_PER_SECOND))
        if found is None:
            return None
        offsets[index] = found.astype(np.int64) * part.unit
    return Sketch(offsets, known)


@dataclass
class _Group:
    """Components that are equal, planned as one."""

    indices: list[Ints]
    part: Component
    levels: list[Level] | None
    height: int
    visits: int = 0
    optimal: bool = False

    @property
    def blocks(self) -> int:
        return len(self.part.index)


def search(
    blocks: Blocks, offsets: Ints, target: int, budget_s: float, seed: int, levels: dict[int, list[Level]] | None = None
) -> Searched:
    """Better offsets than `offsets`, down to `target` bytes. Blocks without pins only.

    No component needs to be lower than the highest. So each gets a part of the steps in turn, the smallest first, and
    the highest the rest, again and again.
    """
    offsets = offsets.copy()
    groups = _groups(blocks, offsets, target, levels)
    count = sum(group.blocks for group in groups)
    usable = budget_s if count < LARGE else SHARE_OF_LARGE * budget_s
    budget = Budget.of(usable, at_least=_least_steps(count))
    total = budget.steps
    if groups:
        say_engine()

    def lower(group: _Group, steps: int, goal: int) -> None:
        if group.levels is None and group.blocks > MEDIUM:
            group.levels = levels_of(group.part)
        first, share = group.indices[0], Budget(steps, budget.deadline)
        size = blocks.size[first]
        new, proved = _lowered(group.part, size, offsets[first], group.levels, goal, seed + group.visits, share)
        budget.steps -= steps - share.steps
        group.visits += 1
        height = int((new + size).max())
        group.optimal = proved and height > goal
        if height < group.height:
            group.height = height
            for index in group.indices:
                offsets[index] = new

    highest, later = target, 0 if len(groups) == 1 else int((1 - FIRST_SHARE) * total)
    for group in groups:
        lower(group, max(budget.steps - later, 0) * group.blocks // count, highest)
        highest = max(highest, group.height)
        count -= group.blocks
    while len(groups) > 1 and not budget.spent and budget.steps > total // 50:
        groups.sort(key=lambda group: group.height)
        top, next_height = groups[-1], max(groups[-2].height, target)
        if top.height <= target or top.optimal or top.visits >= VISITS:
            break
        lower(top, max(budget.steps // len(groups), total // 50), target + (next_height - target) * 3 // 4)
    proved = all(group.height <= target for group in groups) or max(groups, key=lambda g: g.height).optimal
    return Searched(offsets, not proved, engine_name(), total - budget.steps)


def _groups(blocks: Blocks, offsets: Ints, target: int, levels: dict[int, list[Level]] | None) -> list[_Group]:
    """What is higher than the target, the smallest components first."""
    groups: dict[tuple[bytes, ...], _Group] = {}
    for index in sorted(components(blocks), key=len):
        size = blocks.size[index]
        height = int((offsets[index] + size).max())
        if height <= target:
            continue
        opened = (levels or {}).get(int(index[0]))
        part = opened[-1].part if opened else component(blocks, index, height)
        same = (part.start.tobytes(), part.end.tobytes(), size.tobytes(), part.align.tobytes())
        if same in groups:
            groups[same].indices.append(index)
            groups[same].height = max(groups[same].height, height)
        else:
            groups[same] = _Group([index], part, opened, height)
    return list(groups.values())


def _lowered(
    part: Component, size: Ints, offsets: Ints, levels: list[Level] | None, target: int, seed: int, budget: Budget
) -> tuple[Ints, bool]:
    """(offsets in bytes of the lowest plan found, whether it meets the target or is optimal)."""
    goal = part.units_below(target)
    if levels and len(part.index) > MAX_EXACT:
        # Where the unit was made coarser than the alignment, offsets need not be whole units.
        start = None if (offsets % part.unit).any() else (offsets // part.unit).astype(np.int32)
        found = lower_by_levels(levels, start, goal, seed, budget)
        found_bytes = found.astype(np.int64) * part.unit
        return found_bytes, int((found_bytes + size).max()) <= target
    portfolio = Portfolio(part, goal, seed, budget)
    if levels and portfolio.height > goal:
        share = Budget(9 * budget.steps // 10, budget.deadline)
        before = share.steps
        portfolio.take(lower_by_levels(levels, portfolio.offsets, goal, seed, share))
        budget.steps -= before - share.steps
    found, proved = _descend(portfolio, goal, budget)
    return found.astype(np.int64) * part.unit, proved


class Portfolio:
    """The searches of one component. `offsets` is the lowest plan so far, by lowest-first plans at the beginning."""

    def __init__(self, part: Component, goal: int, seed: int, budget: Budget) -> None:
        self.part = part
        self.boxes = next(iter(boxes(part)), None)
        self.restarts = Restarts(part, seed)
        self.offsets = _first(self.restarts, goal, seed, budget)
        self.ejections = Ejections(part, self.offsets, seed)
        if self.boxes is None:
            return
        self.box_restarts = Restarts(self.boxes.part, seed)
        boxed = _first(self.box_restarts, goal, seed, budget)
        self.box_ejections = Ejections(self.boxes.part, boxed, seed)
        self.take(self.boxes.expand(boxed))

    @property
    def height(self) -> int:
        return self._height(self.offsets)

    def _height(self, offsets: Int32s) -> int:
        return int((offsets + self.part.size).max())

    def take(self, offsets: Int32s) -> None:
        if self._height(offsets) < self.height:
            self.offsets = offsets

    def below(self, units: int, steps: int, budget: Budget) -> bool | None:
        """True when a plan of at most `units` was found and taken, None when there is none, False if out of steps."""
        if self.boxes is not None:
            count = len(self.boxes.part.index)
            tried = _depth_first(self.box_restarts, units, steps // 4, budget)
            # a block may be higher in a box than on its own, so no plan of the boxes proves nothing
            boxed = tried if isinstance(tried, np.ndarray) else None
            if boxed is None:
                boxed = self.box_ejections.below(units, max(steps // 4, EJECTION_STEPS * count), budget)
            if boxed is not None:
                self.take(self.boxes.expand(boxed))
                return True
        searched = _depth_first(self.restarts, units, steps // 2, budget)
        if searched is True:
            return None
        found = searched if isinstance(searched, np.ndarray) else None
        if found is None:
            found = self.ejections.below(units, max(steps // 4, EJECTION_STEPS * len(self.part.index)), budget)
        if found is not None:
            self.take(found)
        return found is not None


def _depth_first(restarts: Restarts, units: int, steps: int, budget: Budget) -> Int32s | bool:
    count = len(restarts.part.index)
    if count > MAX_EXACT or steps < count * count // 4:
        return False
    return restarts.below(units, steps, budget)


def _first(restarts: Restarts, goal: int, seed: int, budget: Budget) -> Int32s:
    """The lowest of a dozen lowest-first plans and of plans by chains: quick, and often better than any first fit."""
    part = restarts.part
    size, align = part.size.astype(np.int64), part.align.astype(np.int64)
    best: Ints | None = None
    for rank in islice(restarts.ranks(), STACKS if len(size) < LARGE else 4):
        offsets = stack(part.start, part.end, size, align, rank)
        budget.steps -= STACK_STEPS * len(size)
        if best is None or int((offsets + size).max()) < int((best + size).max()):
            best = offsets
        if int((best + size).max()) <= goal or budget.spent:
            break
    assert best is not None
    height = int((best + size).max())
    if height > goal:
        chains = chained(part, goal, seed, min(int(CHAINS * budget.steps), CHAIN_STEPS * len(size)), budget)
        if chains is not None and int((chains + size).max()) < height:
            return chains
    return best.astype(np.int32)


def _descend(portfolio: Portfolio, goal: int, budget: Budget) -> tuple[Int32s, bool]:
    """(offsets of the best plan, whether it meets the goal or is optimal).

    In passes: the goal first, then heights between, halving the distance to the best plan after a success and to
    the goal after a failure. Each pass spends twice as much as the one before.
    """
    proved = goal - 1  # the largest height known to be out of reach
    effort = max(budget.steps // 64, RESTART_STEPS)
    while portfolio.height > proved + 1:
        hopeless, trial, steps = proved, proved + 1, 4 * effort
        while portfolio.height - hopeless > 1:
            outcome = portfolio.below(trial, steps, budget)
            if outcome is None:
                proved = hopeless = trial
            elif not outcome:
                if budget.spent:
                    return portfolio.offsets, False
                hopeless = trial
            trial, steps = (hopeless + portfolio.height) // 2, effort
        effort *= 2
    return portfolio.offsets, True
