"""Searches of one component with restarts: each ranks the blocks differently and runs for a while.

A rank is the order in which blocks of equal support are tried: size and lifetime to random powers,
noise, and how often a block was part of a dead end. Restart lengths follow Luby's sequence.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmx.memory.components import Component
from tvmx.memory.engine import INFEASIBLE, SOLVED, depth_first

# What a second of budget buys, on a slow core; a step is one block looked at in one node.
STEPS_PER_SECOND = 15_000_000
RESTART_STEPS = 100_000
# A budget may be exceeded twice, but from so many seconds on not at all.
LONG_S = 45
# Powers of (size, lifetime) of the first ranks: area, lifetime, size, and lifetime before size.
CLASSICAL = ((1, 1), (0, 1), (1, 0), (1, 2))


@dataclass
class Budget:
    """Steps left, and the processor time at which even those end (a safety stop, not reached as a rule).

    Not wall time: on a busy machine that would end the same search at another place each time.
    """

    steps: int
    deadline: float

    @classmethod
    def of(cls, seconds: float, at_least: int = 0) -> Budget:
        """What `seconds` buy; `at_least` so many steps when they buy any."""
        steps = max(int(seconds * STEPS_PER_SECOND), at_least if seconds > 0 else 0)
        expected = max(seconds, steps / STEPS_PER_SECOND)
        return cls(steps, time.thread_time() + min(2 * expected + 1, max(expected, LONG_S)))

    @property
    def spent(self) -> bool:
        return self.steps <= 0 or time.thread_time() > self.deadline


def luby(i: int) -> int:
    """1 1 2 1 1 2 4 1 …, i from 1: restart lengths within a log factor of the best (Luby 1993)."""
    while True:
        k = i.bit_length()
        if i == (1 << k) - 1:
            return 1 << (k - 1)
        i -= (1 << (k - 1)) - 1


class Restarts:
    """Searches of one component below a height; remembers what was in the way across restarts."""

    def __init__(self, part: Component, seed: int) -> None:
        self.part = part
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.weights = np.zeros(len(part.index), dtype=np.float64)
        self.log_size = np.log(part.size.astype(np.float64))
        self.log_life = np.log((part.end - part.start).astype(np.float64))
        self.tried: set[int] = set()

    def ranks(self, classical: bool = True) -> Iterator[NDArray[np.int32]]:
        """Ranks of the blocks without end, four classical orders first."""
        for by_size, by_life in CLASSICAL if classical else ():
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
        unit = max(RESTART_STEPS, len(part.index) ** 2 // 2)
        ranks = self.ranks(classical=units not in self.tried)
        self.tried.add(units)
        for turn, rank in enumerate(ranks, start=1):
            if steps <= 0 or budget.spent:
                return False
            limit = min(unit * luby((turn + 3) // 4), steps, budget.steps)
            status, used, offsets = depth_first(
                part.start, part.end, part.size, part.align, rank, units,
                budget.deadline - time.thread_time(), limit, self.weights,
            )  # fmt: skip
            steps -= used + 1
            budget.steps -= used + 1
            if status == SOLVED:
                return offsets
            if status == INFEASIBLE:
                return True
        raise AssertionError("the ranks never end")
