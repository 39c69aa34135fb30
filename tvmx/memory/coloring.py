"""Graph colouring: blocks that never live together share one colour, and a colour shares one block."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from tvmx.memory.blocks import Blocks, Ints
from tvmx.memory.components import sections

# Colours looked at for a block, the nearest in size, and for all: more take minutes on tens of thousands of blocks.
LOOKED_AT = 1000
LOOKED_AT_IN_ALL = 8_000_000


@dataclass
class Color:
    """Blocks with disjoint lifespans, kept sorted; `size` is that of the largest of them."""

    size: int
    align: int
    lifespans: list[tuple[int, int, int]] = field(default_factory=list)  # (start, end, block)

    def is_free(self, start: int, end: int) -> bool:
        i = bisect_left(self.lifespans, (start,))
        if i < len(self.lifespans) and self.lifespans[i][0] < end:
            return False
        return i == 0 or self.lifespans[i - 1][1] <= start


def plan_coloring(blocks: Blocks) -> Ints:
    """Colour the conflict graph greedily, largest block first, and stack the colours.

    A block takes the free colour whose size is nearest to its own; the height is the sum of the
    colours' sizes. What pools without offsets do (one storage per class), kept for comparison.
    """
    colors: list[Color] = []
    start, end = blocks.start.tolist(), blocks.end.tolist()
    size, align = blocks.size.tolist(), blocks.align.tolist()
    low, high = sections(blocks.start, blocks.end)
    looked_at = min(LOOKED_AT, LOOKED_AT_IN_ALL // max(len(blocks), 1) + 1)
    alive = np.zeros(int(high.max(initial=0)), dtype=np.int64)
    for k in np.lexsort((blocks.start, -blocks.size)).tolist():
        if blocks.pinned[k] >= 0:
            continue
        here = alive[low[k] : high[k]]
        color = None
        if here.max() < len(colors):  # else every colour is taken at some instant of this life
            # Colours were opened by falling size, so the last free one is the nearest in size.
            color = next((c for c in islice(reversed(colors), looked_at) if c.is_free(start[k], end[k])), None)
        here += 1
        if color is None:
            color = Color(size[k], align[k])
            colors.append(color)
        color.align = int(np.lcm(color.align, align[k]))
        insort(color.lifespans, (start[k], end[k], k))
    return _stack(blocks, colors)


def _stack(blocks: Blocks, colors: list[Color]) -> Ints:
    """One colour above the other, jumping over pinned blocks that live with some block of it."""
    offsets: Ints = blocks.pinned.copy()
    pins = sorted((int(blocks.pinned[p]), p) for p in np.flatnonzero(blocks.pinned >= 0).tolist())
    cursor = 0
    for color in colors:
        at = -(-cursor // color.align) * color.align
        for low, p in pins:
            meets = not color.is_free(int(blocks.start[p]), int(blocks.end[p]))
            if meets and low < at + color.size and at < low + int(blocks.size[p]):
                at = -(-(low + int(blocks.size[p])) // color.align) * color.align
        for _, _, k in color.lifespans:
            offsets[k] = at
        cursor = at + color.size
    return offsets
