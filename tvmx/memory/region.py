"""Region planning: time is cut into phases, the blocks of a phase are contiguous, bytes are pooled."""

from __future__ import annotations

from typing import Literal

import numpy as np

from tvmx.memory.blocks import Blocks, Ints
from tvmx.memory.engine import place_in_order

# Above so many blocks, each of which takes a pass per number of phases, only two numbers are tried.
MAX_TRIED = 20_000


def plan_region(blocks: Blocks) -> Ints:
    """Cut time where few bytes live; place what crosses a cut first, then each phase as a region.

    The region of a phase begins above the crossing blocks that live during it; phases that follow
    one another reuse the same bytes. Several numbers of phases are tried; the lowest plan wins.
    """
    n = len(blocks)
    best: Ints | None = None
    if n == 0:
        return np.zeros(0, dtype=np.int64)
    tried = {1, 2, 4, max(2, int(n**0.5) // 2), max(2, int(n**0.5))}
    if n > MAX_TRIED:
        tried = {2, max(2, int(n**0.5))}
    for phases in sorted(tried):
        offsets = _with_phases(blocks, _cuts(blocks, phases))
        if best is None or blocks.height(offsets) < blocks.height(best):
            best = offsets
    assert best is not None
    return best


def _cuts(blocks: Blocks, phases: int) -> Ints:
    """`phases - 1` instants, in each equal share of the starts the one that the fewest bytes cross."""
    times = np.unique(blocks.start)
    if len(times) <= phases:
        return times[:0]

    def bytes_until(instants: Ints, side: Literal["left", "right"]) -> Ints:
        order = np.argsort(instants, kind="stable")
        sums = np.concatenate([[0], np.cumsum(blocks.size[order])])
        return sums[np.searchsorted(instants[order], times, side=side)]

    crossing = bytes_until(blocks.start, "left") - bytes_until(blocks.end, "right")
    shares = np.array_split(np.arange(1, len(times)), phases)[1:]
    return times[[share[int(crossing[share].argmin())] for share in shares if len(share)]]


def _with_phases(blocks: Blocks, cuts: Ints) -> Ints:
    first = np.searchsorted(cuts, blocks.start, side="right")
    last = np.searchsorted(cuts, blocks.end - 1, side="right")
    crosses = (first != last) | (blocks.pinned >= 0)
    offsets = np.zeros(len(blocks), dtype=np.int64)
    offsets[crosses] = _greedy(blocks, np.flatnonzero(crosses))
    tops = offsets + blocks.size
    for phase in range(len(cuts) + 1):
        inside = np.flatnonzero(~crosses & (first == phase))
        if not len(inside):
            continue
        begin, until = blocks.start[inside].min(), blocks.end[inside].max()
        beside = crosses & (blocks.start < until) & (blocks.end > begin)
        base = int(tops[beside].max(initial=0))
        align = int(np.lcm.reduce(blocks.align[inside]))
        offsets[inside] = -(-base // align) * align + _greedy(blocks, inside)
    return offsets


def _greedy(blocks: Blocks, chosen: Ints) -> Ints:
    part = Blocks(
        blocks.start[chosen], blocks.end[chosen], blocks.size[chosen],
        blocks.align[chosen], blocks.pinned[chosen], {},
    )  # fmt: skip
    return place_in_order(part, np.lexsort((part.start, -part.size)), smallest_gap=True)
