"""Placing blocks one after the other: no sharing at all, and greedy by size with offsets."""

from __future__ import annotations

import numpy as np

from tvmx.memory.blocks import Blocks, Ints


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


def place_in_order(blocks: Blocks, order: Ints, smallest_gap: bool = False) -> Ints:
    """Offsets after placing blocks in `order`, each as low as it fits, or into the smallest gap.

    Pinned blocks are placed first whatever the order says.
    """
    n = len(blocks)
    start, end = blocks.start.tolist(), blocks.end.tolist()
    size, align, pinned = blocks.size.tolist(), blocks.align.tolist(), blocks.pinned.tolist()
    offsets = np.zeros(n, dtype=np.int64)
    # The placed blocks, sorted by offset, in arrays that grow in place: a block looks at those
    # alive with it by one vector comparison, which beats a Python loop from 60 blocks on.
    at = np.zeros(n, dtype=np.int64)
    top, s, e = np.zeros_like(at), np.zeros_like(at), np.zeros_like(at)
    count = 0
    sequence = [k for k in order.tolist() if pinned[k] >= 0]
    sequence += [k for k in order.tolist() if pinned[k] < 0]
    for k in sequence:
        if pinned[k] >= 0:
            place = pinned[k]
        else:
            near = np.flatnonzero((s[:count] < end[k]) & (e[:count] > start[k]))
            place = _gap(at[near].tolist(), top[near].tolist(), size[k], align[k], smallest_gap)
        offsets[k] = place
        i = int(at[:count].searchsorted(place))
        for a, v in ((at, place), (top, place + size[k]), (s, start[k]), (e, end[k])):
            a[i + 1 : count + 1] = a[i:count]
            a[i] = v
        count += 1
    return offsets


def _gap(at: list[int], top: list[int], size: int, align: int, smallest: bool) -> int:
    """Where `size` bytes fit between neighbours sorted by offset, or after the last of them."""
    cursor = 0
    best = -1
    best_room = 0
    for low, high in zip(at, top):
        place = -(-cursor // align) * align
        room = low - cursor
        if low - place >= size and (best < 0 or room < best_room):
            best, best_room = place, room
            if not smallest:
                return best
        cursor = max(cursor, high)
    return best if best >= 0 else -(-cursor // align) * align
