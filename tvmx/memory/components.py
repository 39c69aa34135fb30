"""A planning problem cut into what the exact search takes: parts connected in time, in small units."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from tvmx.memory.blocks import Blocks, Ints

# Keeps offset + size inside int32 with room to spare.
MAX_UNITS = 1 << 29


def components(blocks: Blocks) -> list[Ints]:
    """Indices of blocks that are connected by living together, each list sorted by start."""
    order = np.lexsort((blocks.end, blocks.start))
    if not len(order):
        return []
    until = np.maximum.accumulate(blocks.end[order])
    breaks = np.flatnonzero(blocks.start[order][1:] >= until[:-1]) + 1
    return np.split(order, breaks)


@dataclass(frozen=True)
class Component:
    """Blocks in int32 units of `unit` bytes; start and end count the sections of time that matter.

    `index[k]` is the block of the problem; sizes are rounded up to the unit.
    """

    index: Ints
    start: NDArray[np.int32]
    end: NDArray[np.int32]
    size: NDArray[np.int32]
    align: NDArray[np.int32]
    unit: int

    def units_below(self, height: int) -> int:
        """`height` bytes in units, rounded up: the last block may need less than its last unit."""
        return -(-height // self.unit)


def component(blocks: Blocks, index: Ints, height: int) -> Component:
    """The blocks of `index`, sorted by start, for searches below `height` bytes."""
    size, align = blocks.size[index], blocks.align[index]
    unit = _gcd(align)
    if (align == unit).all():
        # All offsets are sums of rounded sizes: their common divisor is the real unit.
        unit = _gcd(-(-size // unit) * unit)
        align = np.full_like(size, unit)
    while height // unit > MAX_UNITS:
        unit *= 2  # coarser: a little is lost to rounding up, nothing becomes wrong
        align = np.lcm(align, unit)
    start, end = sections(blocks.start[index], blocks.end[index])
    return Component(
        index,
        start,
        end,
        (-(-size // unit)).astype(np.int32),
        (align // unit).astype(np.int32),
        unit,
    )


def _gcd(values: Ints) -> int:
    result = 0
    for v in set(values.tolist()):
        result = gcd(result, v)
    return result


def sections(start: Ints, end: Ints) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Lifespans in sections: the instants whose set of living blocks is no subset of another's.

    Those are the starts that some end follows before the next start.
    """
    starts = np.unique(start)
    ends = np.unique(end)
    following = np.append(starts[1:], np.iinfo(np.int64).max)
    first_end = ends[np.searchsorted(ends, starts, side="right")]
    kept = starts[first_end <= following]
    low = np.searchsorted(kept, start, side="left")
    high = np.searchsorted(kept, end, side="left")
    return low.astype(np.int32), high.astype(np.int32)
