"""What planners see: buffers that share storage merged into blocks, as flat arrays.

A block is a rectangle in time × address. Zero-size buffers need no place and never conflict.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from tvmx.errors import PlanError
from tvmx.memory.problem import MAX_BYTES, Problem

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Blocks:
    """n blocks: `start`, `end`, `size`, `align`, `pinned` (-1: free), each int64 of shape (n,).

    `members[id]` is (block, byte inside the block); block -1 is a buffer that needs no bytes.
    """

    start: Ints
    end: Ints
    size: Ints
    align: Ints
    pinned: Ints
    members: dict[str, tuple[int, int]]

    def __len__(self) -> int:
        return len(self.start)

    def height(self, offsets: Ints) -> int:
        return int((offsets + self.size).max()) if len(self) else 0

    def expand(self, offsets: Ints) -> dict[str, int]:
        """Offsets per block → offsets per buffer id."""
        at = offsets.tolist()
        return {id: at[k] + inner if k >= 0 else inner for id, (k, inner) in self.members.items()}


def merge(problem: Problem) -> Blocks:
    """Group aliases into blocks. Raises PlanError when pins inside a block contradict."""
    root_of: dict[str, tuple[str, int]] = {}

    def locate(id: str) -> tuple[str, int]:
        chain = []
        while id not in root_of:
            b = problem[id]
            if b.alias_of is None:
                root_of[id] = (id, 0)
                break
            chain.append(b)
            id = b.alias_of
        root, at = root_of[id]
        for b in reversed(chain):
            at += b.alias_offset
            root_of[b.id] = (root, at)
        return root, at

    index: dict[str, int] = {}
    start: list[int] = []
    end: list[int] = []
    size: list[int] = []
    align: list[int] = []
    pinned: list[int] = []
    pinned_by: dict[int, str] = {}
    members: dict[str, tuple[int, int]] = {}
    for b in problem.buffers:
        root, at = (b.id, 0) if b.alias_of is None else locate(b.id)
        k = index.get(root)
        if k is None:
            k = index[root] = len(start)
            start.append(b.lifespan[0])
            end.append(b.lifespan[1])
            size.append(at + b.size if b.size else 0)
            align.append(b.alignment)
            pinned.append(-1)
        else:
            start[k] = min(start[k], b.lifespan[0])
            end[k] = max(end[k], b.lifespan[1])
            size[k] = max(size[k], at + b.size if b.size else 0)
            align[k] = lcm(align[k], b.alignment)
        members[b.id] = (k, at)
        if b.offset is not None:
            base = b.offset - at
            if base < 0 or pinned[k] not in (-1, base):
                raise PlanError(
                    f"buffer {b.id!r} pinned to {b.offset} contradicts "
                    f"{pinned_by.get(k, root)!r}, which shares its storage"
                )
            pinned[k] = base
            pinned_by[k] = b.id
    if sum(size) + sum(align) > MAX_BYTES or any(p > MAX_BYTES for p in pinned):
        raise PlanError("the sizes and alignments of the problem add up to more than 2**60 bytes")
    for k, p in enumerate(pinned):
        if p > 0 and p % align[k]:
            raise PlanError(f"the block of {pinned_by[k]!r}, pinned to {p}, needs an alignment of {align[k]}")
    return _compact(start, end, size, align, pinned, members)


def _compact(
    start: list[int],
    end: list[int],
    size: list[int],
    align: list[int],
    pinned: list[int],
    members: dict[str, tuple[int, int]],
) -> Blocks:
    """Drop blocks without bytes; their buffers get the pinned offset, or 0."""
    if 0 in size:
        keep = [k for k, s in enumerate(size) if s]
        new = {k: i for i, k in enumerate(keep)}
        members = {id: (new[k], at) if k in new else (-1, at + max(pinned[k], 0)) for id, (k, at) in members.items()}
        start, end, size, align, pinned = ([v[k] for k in keep] for v in (start, end, size, align, pinned))
    columns = [np.array(v, dtype=np.int64) for v in (start, end, size, align, pinned)]
    return Blocks(columns[0], columns[1], columns[2], columns[3], columns[4], members)


def lower_bound(blocks: Blocks) -> int:
    """Bytes that no plan can go under: the largest sum of sizes alive at once, or a pin's top.

    Every offset is a multiple of the gcd g of the alignments, so each block but the topmost of an
    instant takes its size rounded up to g: the sum of rounded sizes less the largest rounding.
    """
    if not len(blocks):
        return 0
    g = 0
    for a in set(blocks.align.tolist()):
        g = gcd(g, a)
    rounded = -(-blocks.size // g) * g
    times = np.concatenate([blocks.start, blocks.end])
    deltas = np.concatenate([rounded, -rounded])
    # Ends sort before starts at the same instant: lifespans are half-open.
    order = np.lexsort((deltas > 0, times))
    live = np.cumsum(deltas[order])
    # Taking off the largest slack of the whole problem instead of the instant's is still a bound.
    slack = int((rounded - blocks.size).max())
    bound = int(live.max()) - slack
    if slack:
        bound = max(bound, _exact_peak(blocks, rounded, order, live, slack))
    pins = np.flatnonzero(blocks.pinned >= 0)
    if len(pins):
        bound = max(bound, int((blocks.pinned + blocks.size)[pins].max()))
    return bound


def _exact_peak(blocks: Blocks, rounded: Ints, order: Ints, live: Ints, slack: int) -> int:
    """The bound at each instant that could be the peak, with that instant's own largest slack."""
    best = 0
    times = np.concatenate([blocks.start, blocks.end])[order]
    candidates = np.flatnonzero(live >= int(live.max()) - slack)
    # A bound stays a bound when instants are left out; 64 peaks keep this linear in practice.
    candidates = candidates[np.argsort(-live[candidates], kind="stable")][:64]
    for i in candidates.tolist():
        t = times[i]
        alive = (blocks.start <= t) & (t < blocks.end)
        if alive.any():
            r = rounded[alive]
            best = max(best, int(r.sum() - (r - blocks.size[alive]).max()))
    return best
