"""Blocks joined into boxes that cost no bytes: what lives together exactly, and what follows at one size.

Two blocks with one lifespan can lie on top of one another, and two of one size where the second starts when
the first ends can lie at one address; joined they load every instant as before, so the lower bound stays. Joining
again and again leaves a small problem that keeps much of the structure: boxing, as in Buchsbaum et al. (2003),
without their loss. A plan of the boxes is a plan of the blocks; the reverse need not hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmx.memory.blocks import Ints
from tvmx.memory.components import MAX_UNITS, Component, sections

Int32s = NDArray[np.int32]


@dataclass(frozen=True)
class Boxes:
    """A problem of boxes and where each block lies: `box_of[k]`, `inner[k]` units above its floor."""

    part: Component
    box_of: Ints
    inner: Ints

    def expand(self, offsets: Int32s) -> Int32s:
        """Offsets per box → offsets per block."""
        return (offsets[self.box_of] + self.inner).astype(np.int32)


def boxes(part: Component) -> Boxes | None:
    """The boxes of a component; None when no two blocks can be joined, or when alignments differ."""
    if (part.align != 1).any():
        return None
    open_boxes = _Open(part)
    # Pairs that are the only ones to fit go first: where several fit, the right one often shows later.
    while open_boxes.stack() or open_boxes.chain(unique=True) or open_boxes.chain(unique=False):
        pass
    return open_boxes.closed(part)


class _Open:
    """Boxes while they are joined; box and inner offset of every block so far."""

    def __init__(self, part: Component) -> None:
        self.start, self.end = part.start.astype(np.int64), part.end.astype(np.int64)
        self.size = part.size.astype(np.int64)
        self.box_of = np.arange(len(self.size))
        self.inner = np.zeros(len(self.size), dtype=np.int64)

    def _join(self, group: Ints, inner: Ints, size: Ints) -> bool:
        """Make one box of each group (numbers from 0 on); whether there is one fewer at least."""
        count = len(size)
        if count == len(self.size):
            return False
        start, end = np.full(count, np.iinfo(np.int64).max), np.zeros(count, dtype=np.int64)
        np.minimum.at(start, group, self.start)
        np.maximum.at(end, group, self.end)
        self.inner += inner[self.box_of]
        self.box_of = group[self.box_of]
        self.start, self.end, self.size = start, end, size
        return True

    def stack(self) -> bool:
        """Join boxes of one lifespan, the first at the bottom."""
        order = np.lexsort((self.end, self.start))
        first = np.ones(len(order), dtype=bool)
        first[1:] = (np.diff(self.start[order]) != 0) | (np.diff(self.end[order]) != 0)
        group = np.empty_like(order)
        group[order] = np.cumsum(first) - 1
        below = np.cumsum(self.size[order]) - self.size[order]
        inner = np.empty_like(order)
        inner[order] = below - below[first][group[order]]
        size = np.bincount(group, weights=self.size).astype(np.int64)
        if int(size.max(initial=0)) > MAX_UNITS:  # only an upper bound on the load can say so; leave it
            return False
        return self._join(group, inner, size)

    def chain(self, unique: bool) -> bool:
        """Join boxes of one size where one starts as the other ends: all such, or only those without a choice."""
        n = len(self.size)
        length = self.end - self.start
        ending, at_end = self._ranked(self.end, length)
        starting, at_start = self._ranked(self.start, length)
        width = max(int(self.end.max(initial=0)), n) + 1
        kind = np.unique(self.size, return_inverse=True)[1].reshape(-1)
        # (size, time, number among those) as one integer each; time and number are below width
        keys = [(kind * width + time) * width + rank for time, rank in ((self.end, at_end), (self.start, at_start))]
        alone = (ending == 1, starting == 1) if unique else (ending > 0, starting > 0)
        left, right = np.flatnonzero(alone[0]), np.flatnonzero(alone[1])
        _, a, b = np.intersect1d(keys[0][left], keys[1][right], assume_unique=True, return_indices=True)
        following = np.arange(n)
        following[left[a]] = right[b]
        return self._join_chains(following)

    def _ranked(self, time: Ints, length: Ints) -> tuple[Ints, Ints]:
        """For each box: how many share its (time, size), and its place among them, the shortest first."""
        order = np.lexsort((length, self.size, time))
        first = np.ones(len(order), dtype=bool)
        first[1:] = (np.diff(time[order]) != 0) | (np.diff(self.size[order]) != 0)
        group = np.cumsum(first) - 1
        count, rank = np.empty_like(order), np.empty_like(order)
        count[order] = np.bincount(group)[group] if len(group) else 0
        rank[order] = np.arange(len(order)) - np.flatnonzero(first)[group]
        return count, rank

    def _join_chains(self, following: Ints) -> bool:
        n = len(following)
        if (following == np.arange(n)).all():
            return False
        last = following
        while not np.array_equal(last, last[last]):  # each to the end of its chain, twice as far a turn
            last = last[last]
        ends, group = np.unique(last, return_inverse=True)
        return self._join(group.reshape(-1), np.zeros(n, dtype=np.int64), self.size[ends])

    def closed(self, part: Component) -> Boxes | None:
        n = len(self.size)
        if n == len(part.size):
            return None
        order = np.lexsort((self.end, self.start))
        number = np.empty_like(order)
        number[order] = np.arange(n)
        start, end = sections(self.start[order], self.end[order])
        size = self.size[order].astype(np.int32)
        joined = Component(np.arange(n), start, end, size, np.ones(n, dtype=np.int32), part.unit)
        return Boxes(joined, number[self.box_of], self.inner)
