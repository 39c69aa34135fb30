"""Orders of placing blocks one after the other: the heuristics that always run."""

from __future__ import annotations

import numpy as np

from tvmx.memory.blocks import Blocks, Ints
from tvmx.memory.engine import place_in_order


def plan_none(blocks: Blocks) -> Ints:
    """Each block gets bytes of its own above the pinned ones: the baseline of every comparison."""
    offsets = np.where(blocks.pinned >= 0, blocks.pinned, 0)
    top = int(np.where(blocks.pinned >= 0, blocks.pinned + blocks.size, 0).max(initial=0))
    for k, (size, align, pin) in enumerate(zip(blocks.size.tolist(), blocks.align.tolist(), blocks.pinned.tolist())):
        if pin < 0:
            offsets[k] = -(-top // align) * align
            top = int(offsets[k]) + size
    return offsets


def plan_greedy(blocks: Blocks) -> Ints:
    """Greedy by size with offsets (Pisarchyk & Lee 2020): the largest block first, each into the
    smallest gap between the blocks alive with it that holds it, else on top of them."""
    order = np.lexsort((blocks.start, blocks.start - blocks.end, -blocks.size))
    return place_in_order(blocks, order, smallest_gap=True)


def plan_best_fit(blocks: Blocks) -> Ints:
    """Best fit by lifetime: the longest-lived block first, each into the smallest gap that holds it.

    Long-lived blocks end up side by side at the bottom and leave the rest one stretch of bytes.
    """
    order = np.lexsort((-blocks.size, blocks.start - blocks.end))
    return place_in_order(blocks, order, smallest_gap=True)
