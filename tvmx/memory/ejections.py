"""Ejection searches of one component: blocks take turns to push others out until all are below a height."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from tvmx.memory.components import Component
from tvmx.memory.engine import SOLVED, eject
from tvmx.memory.restarts import Budget

MAX_WEIGHT = 1_000_000


class Ejections:
    """Starts where it stopped last: a plan below one height is nearly one below the next."""

    def __init__(self, part: Component, offsets: NDArray[np.int32], seed: int) -> None:
        self.part = part
        self.offsets = offsets.astype(np.int32)
        self.seed = seed
        area = part.size.astype(np.float64) * (part.end - part.start)
        self.base = np.clip(100 * area / max(float(area.mean()), 1.0), 1, MAX_WEIGHT).astype(np.int64)
        self.penalty = np.ones_like(self.base)
        self.height = -1

    def below(self, units: int, steps: int, budget: Budget) -> NDArray[np.int32] | None:
        """Offsets of a plan of at most `units`, None when out of steps or when a block is higher than that."""
        part = self.part
        steps = min(steps, budget.steps)
        if steps <= 0 or budget.spent:
            return None
        if units != self.height:
            self.penalty.fill(1)
            self.height = units
        self.seed += 1
        status, used = eject(
            part.start, part.end, part.size, part.align, units, self.base, self.penalty,
            self.seed, budget.deadline - time.thread_time(), steps, self.offsets,
        )  # fmt: skip
        budget.steps -= used + 1
        return self.offsets.copy() if status == SOLVED else None
