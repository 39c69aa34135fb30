"""The compiled core when it is built, the same algorithms in Python when it is not.

Imports wait until they are needed: the runtime imports this package at every start.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmx.memory.blocks import Blocks, Ints

_core: Any
try:
    from tvmx.memory import _core  # type: ignore[attr-defined, no-redef]

    if not hasattr(_core, "skyline"):  # built from older sources
        _core = None
except ImportError:
    _core = None

Int32s = NDArray[np.int32]
SOLVED, INFEASIBLE, OUT_OF_STEPS = 0, 1, 2


def engine_name() -> str:
    """ "c" or "python": what runs the placing and the search in this process."""
    return "python" if _core is None else "c"


def place_in_order(blocks: Blocks, order: Ints, smallest_gap: bool = False) -> Ints:
    """Offsets after placing blocks in `order`, each as low as it fits, or into the smallest gap.

    Pinned blocks are placed first whatever the order says.
    """
    if _core is None:
        from tvmx.memory import fallback

        return fallback.place_in_order(blocks, order, smallest_gap)
    offsets = np.zeros(len(blocks), dtype=np.int64)
    columns = (blocks.start, blocks.end, blocks.size, blocks.align, blocks.pinned)
    _core.place(len(blocks), *columns, np.ascontiguousarray(order, dtype=np.int64), smallest_gap, offsets)
    return offsets


def stack(start: Int32s, end: Int32s, size: Ints, align: Ints, rank: Int32s) -> Ints:
    """Offsets when always the block with the lowest support is placed next, ties by rank."""
    if _core is None:
        from tvmx.memory import fallback

        return fallback.stack(start, end, size, align, rank)
    offsets = np.zeros(len(start), dtype=np.int64)
    _core.stack(len(start), int(end.max(initial=0)), start, end, size, align, rank, offsets)
    return offsets


def skyline(
    start: Int32s,
    end: Int32s,
    size: Ints,
    align: Ints,
    score: NDArray[np.float64],
    waste: float,
    flush: float,
    max_steps: int,
) -> tuple[int, int, Ints]:
    """(status, steps, offsets) of one plan by chains; blocks sorted by (start, end), see `core.h`."""
    if _core is None:
        from tvmx.memory import fallback_skyline

        return fallback_skyline.skyline(start, end, size, align, score, waste, flush, max_steps)
    offsets = np.zeros(len(start), dtype=np.int64)
    columns = (start, end, size, align, score)
    status, steps = _core.skyline(
        len(start), int(end.max(initial=0)), *columns, waste, flush, max_steps, offsets
    )  # fmt: skip
    return status, steps, offsets


def depth_first(
    start: Int32s,
    end: Int32s,
    size: Int32s,
    align: Int32s,
    rank: Int32s,
    height: int,
    seconds: float,
    max_steps: int,
    weights: NDArray[np.float64],
) -> tuple[int, int, Int32s]:
    """(status, steps, offsets) of one search below `height`; `core.h` describes the arguments."""
    if _core is None:
        from tvmx.memory import fallback

        return fallback.depth_first(start, end, size, align, rank, height, seconds, max_steps, weights)
    offsets = np.zeros(len(start), dtype=np.int32)
    sections = int(end.max(initial=0))
    status, steps = _core.dfs(
        len(start), sections, start, end, size, align, rank, height, seconds, max_steps,
        weights, offsets,
    )  # fmt: skip
    return status, steps, offsets


def eject(
    start: Int32s,
    end: Int32s,
    size: Int32s,
    align: Int32s,
    height: int,
    base: Ints,
    penalty: Ints,
    seed: int,
    seconds: float,
    max_steps: int,
    offsets: Int32s,
) -> tuple[int, int]:
    """(status, steps) of one ejection search below `height`; changes `penalty` and `offsets`, see `core.h`."""
    if _core is None:
        from tvmx.memory import fallback_eject

        return fallback_eject.eject(start, end, size, align, height, base, penalty, seed, seconds, max_steps, offsets)
    status, steps = _core.eject(
        len(start), start, end, size, align, height, base, penalty, seed, seconds, max_steps, offsets
    )
    return status, steps


_said = False


def say_engine() -> None:
    """Log once, at the first search, that the compiled core is missing."""
    global _said
    if _core is None and not _said:
        _said = True
        import logging

        logging.getLogger("tvmx.memory").warning(
            "the compiled planner core is not built or out of date (pip install needs a C compiler); "
            "searching in Python, about 300 times slower"
        )
