"""Plans by chains on the skyline: the lowest stretch of the floor is covered by blocks that follow one another.

What a chain leaves uncovered is lost, so it is cheap to plan without: where many blocks start at every instant, or few
boxes are left, one of a few hundred such plans is within some per cent of the bound. `core_skyline.c` describes one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tvmx.memory.components import Component
from tvmx.memory.engine import SOLVED, skyline
from tvmx.memory.restarts import Budget

Int32s = NDArray[np.int32]
# (power of lifetime, power of size, noise, cost of waste, gain of a flush top) of the first plans: the usual winners.
FIRST = ((1.5, 0.5, 0, 1, 1), (2, 1, 0, 1e9, 1), (2, 1.5, 0, 1e9, 0), (1, 0.5, 0, 1e9, 1), (1.5, 0.5, 0, 0.3, 0))
# Steps after which one plan is given up, per block: most need some hundred.
MOST_STEPS = 3000
# They are quick: so many count as one of a budget. What a plan costs besides, per block, for sorting.
STEPS_AS_ONE = 4
SORT_STEPS = 4


def _parameters(rng: np.random.Generator) -> Iterator[tuple[float, float, float, float, float]]:
    yield from FIRST
    while True:
        life, size = rng.uniform(1, 2.5), rng.uniform(0.3, 2)
        noise, flush = float(rng.choice((0, 0.1, 0.3, 1))), float(rng.choice((0, 1, 3)))
        yield life, size, noise, 10 ** rng.uniform(-1, 2), flush


def chained(part: Component, goal: int, seed: int, steps: int, budget: Budget) -> Int32s | None:
    """The lowest of the plans that `steps` pay for, at least one; stops at `goal` units.

    None when one plan takes too long: very many blocks that fit beside each other at very many instants.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    life, size = (part.end - part.start).astype(np.float64), part.size.astype(np.float64)
    log_life, log_size = np.log(life / life.mean()), np.log(size / size.mean())
    wide, align = part.size.astype(np.int64), part.align.astype(np.int64)
    best: Int32s | None = None
    height = 0
    for by_life, by_size, noise, waste, flush in _parameters(rng):
        score = np.exp(by_life * log_life + by_size * log_size) * (1 + noise * rng.random(len(size)))
        order = np.lexsort((-score, part.end, part.start))
        columns = (part.start[order], part.end[order], wide[order], align[order], score[order])
        status, used, placed = skyline(*columns, waste / float(size.mean()), flush, MOST_STEPS * len(size))
        used = used // STEPS_AS_ONE + SORT_STEPS * len(size)
        budget.steps -= used
        steps -= used
        if status != SOLVED:
            break
        offsets = np.empty(len(size), dtype=np.int64)
        offsets[order] = placed
        top = int((offsets + wide).max())
        if best is None or top < height:
            best, height = offsets.astype(np.int32), top
        if height <= goal or steps <= 0 or budget.spent:
            break
    return best
