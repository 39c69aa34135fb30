"""The search planner: from the best heuristic down to the lower bound, within a number of steps.

The problem is cut into components in time. Each is searched below a height by depth-first search
with restarts: every restart ranks the blocks differently (size and lifetime to random powers,
noise, and how often a block was part of a dead end) and runs for a Luby share of the steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmx.memory.blocks import Blocks, Ints
from tvmx.memory.components import Component, component, components
from tvmx.memory.engine import INFEASIBLE, SOLVED, depth_first, engine_name, say_engine

# What a second of budget buys, on a slow core; a step is one block looked at in one node.
STEPS_PER_SECOND = 25_000_000
RESTART_STEPS = 100_000
# The open lists of the depth-first search take 8 n² bytes.
MAX_EXACT = 2500


@dataclass
class Budget:
    """Steps left, and the wall time at which even those end (a safety stop, not reached as a rule)."""

    steps: int
    deadline: float

    @classmethod
    def of(cls, seconds: float) -> Budget:
        return cls(int(seconds * STEPS_PER_SECOND), time.perf_counter() + 4 * seconds + 1)

    @property
    def spent(self) -> bool:
        return self.steps <= 0 or time.perf_counter() > self.deadline


def luby(i: int) -> int:
    """1 1 2 1 1 2 4 1 …, i from 1: restart lengths within a log factor of the best (Luby 1993)."""
    while True:
        k = i.bit_length()
        if i == (1 << k) - 1:
            return 1 << (k - 1)
        i -= (1 << (k - 1)) - 1


class Restarts:
    """Searches of one component below a height; remembers what was in the way across restarts."""

    def __init__(self, part: Component, lifetime: Ints, seed: int) -> None:
        self.part = part
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.weights = np.zeros(len(part.index), dtype=np.float64)
        self.log_size = np.log(part.size.astype(np.float64))
        self.log_life = np.log(lifetime.astype(np.float64))
        self.turn = 0

    def _ranks(self) -> Iterator[NDArray[np.int32]]:
        """Ranks of the blocks, the four classical orders first."""
        for by_size, by_life in ((1, 1), (0, 1), (1, 0), (1, 2)):
            yield self._rank(by_size * self.log_size + by_life * self.log_life)
        while True:
            by_size, by_life = self.rng.random(2) * (1.5, 2.0)
            noise = 0.3 * self.rng.integers(3) * self.rng.random(len(self.weights))
            blame = float(self.rng.choice((0, 0, 1, 4)))
            blame_of = blame * self.weights / max(self.weights.max(), 1e-9)
            key = by_size * self.log_size + by_life * self.log_life
            yield self._rank(key + np.log1p(noise) + np.log1p(blame_of))

    @staticmethod
    def _rank(key: NDArray[np.float64]) -> NDArray[np.int32]:
        rank = np.empty(len(key), dtype=np.int32)
        rank[np.argsort(-key, kind="stable")] = np.arange(len(key), dtype=np.int32)
        return rank

    def below(self, units: int, steps: int, budget: Budget) -> NDArray[np.int32] | bool:
        """Offsets of a plan of at most `units`, True when there is none, False when out of steps."""
        part = self.part
        for turn, rank in enumerate(self._ranks(), start=1):
            if steps <= 0 or budget.spent:
                return False
            limit = min(RESTART_STEPS * luby((turn + 3) // 4), steps, budget.steps)
            status, used, offsets = depth_first(
                part.start, part.end, part.size, part.align, rank, units,
                budget.deadline - time.perf_counter(), limit, self.weights,
            )  # fmt: skip
            steps -= used + 1
            budget.steps -= used + 1
            if status == SOLVED:
                return offsets
            if status == INFEASIBLE:
                return True
        raise AssertionError("the ranks never end")


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
    # The smallest first: what they leave of their share goes to the others.
    for left, index in zip(range(len(tall), 0, -1), sorted(tall, key=len)):
        height = int((offsets[index] + blocks.size[index]).max())
        part = component(blocks, index, height)
        lifetime = blocks.end[index] - blocks.start[index]
        share = Budget(budget.steps // left, budget.deadline)
        before = share.steps
        found, proved = _descend(Restarts(part, lifetime, seed), height, target, share)
        budget.steps -= before - share.steps
        truncated |= not proved
        if found is not None:
            new = found.astype(np.int64) * part.unit
            if int((new + blocks.size[index]).max()) < height:
                offsets[index] = new
    return Searched(offsets, truncated, engine_name(), total - budget.steps)


def _descend(restarts: Restarts, height: int, target: int, budget: Budget) -> tuple[NDArray[np.int32] | None, bool]:
    """(best offsets below `height` or None, whether the target is met or proved out of reach).

    Tries the target first. Then heights between, each with a fraction of what is left, halving the
    distance to the best plan after a success and to the target after a failure.
    """
    part = restarts.part
    if len(part.index) > MAX_EXACT:
        return None, False
    proved, goal = part.units_below(target) - 1, part.units_below(target)
    best, found = part.units_below(height), None
    hopeless, trial, steps = goal - 1, goal, budget.steps // 2
    while best > max(goal, proved + 1):
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
        if best - hopeless <= 1:
            hopeless = max(proved, goal - 1)  # nothing left between: start over with what is left
        trial = max(goal, proved + 1, (hopeless + best) // 2)
        trial = min(trial, best - 1)
        steps = max(budget.steps // 6, RESTART_STEPS)
    return found, True
