"""Planning problems of any size, seeded: what the large-instance bars are measured on."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

from tvmx.memory import Buffer, Problem


def cut(count: int, seed: int = 0, capacity: int = 1 << 20) -> Problem:
    """A rectangle of time × `capacity` bytes cut into `count` buffers without a gap: the bound is reachable.

    The largest piece is cut first, across time or across bytes at a random place.
    """
    rng = random.Random(seed)
    unit = max(1, capacity // (1 << 20)) * 16
    heap = [(-(4 * count) * capacity, 0, 4 * count, 0, capacity // unit)]  # (-area, start, end, low, high)
    done: list[tuple[int, int, int]] = []
    while heap and len(heap) + len(done) < count:
        _, start, end, low, high = heapq.heappop(heap)
        across_time = rng.random() < 0.5 if end - start > 1 and high - low > 1 else end - start > 1
        if across_time:
            at = start + max(1, min(end - start - 1, round((end - start) * rng.uniform(0.15, 0.85))))
            pieces = [(start, at, low, high), (at, end, low, high)]
        elif high - low > 1:
            at = low + max(1, min(high - low - 1, round((high - low) * rng.uniform(0.15, 0.85))))
            pieces = [(start, end, low, at), (start, end, at, high)]
        else:
            done.append((start, end, high - low))
            continue
        for s, e, lo, hi in pieces:
            heapq.heappush(heap, (-(e - s) * (hi - lo), s, e, lo, hi))
    done += [(s, e, hi - lo) for _, s, e, lo, hi in heap]
    rng.shuffle(done)
    return Problem(Buffer(str(i), (s, e), size * unit, 1) for i, (s, e, size) in enumerate(done))


def loose(count: int, seed: int = 0, kept: float = 0.9) -> Problem:
    """`cut` with a tenth of the buffers left out: room to move, and a bound that is nearly reachable."""
    rng = random.Random(seed)
    return Problem(b for b in cut(round(count / kept), seed) if rng.random() < kept)


def scattered(count: int, seed: int = 0) -> Problem:
    """Independent buffers: log-uniform sizes and lifetimes, 64-byte alignment."""
    rng = random.Random(seed)
    buffers = []
    for i in range(count):
        start = rng.randrange(2 * count)
        length = 1 + int(2 ** rng.uniform(0, 11))
        buffers.append(Buffer(str(i), (start, start + length), int(2 ** rng.uniform(6, 20))))
    return Problem(buffers)


def network(count: int, seed: int = 0) -> Problem:
    """A deep network run forward: each tensor dies a few calls later, some are kept for a skip connection."""
    rng = random.Random(seed)
    buffers, width = [], 1 << 18
    for i in range(count):
        if rng.random() < 0.02:
            width = max(1 << 12, min(1 << 22, width * rng.choice([2, 2, 1]) // rng.choice([2, 2, 1])))
        life = 2 if rng.random() < 0.7 else rng.choice([3, 4, 6, 10, 40])
        buffers.append(Buffer(str(i), (i, i + life), width * rng.choice([1, 1, 1, 2, 4]) // rng.choice([1, 1, 4])))
    return Problem(buffers)


def training(count: int, seed: int = 0) -> Problem:
    """Forward and backward: an activation lives until its gradient is computed, the first ones longest."""
    rng = random.Random(seed)
    layers = count // 3
    buffers = []
    for i in range(layers):
        size = 64 * rng.randrange(1, 4096)
        back = 2 * layers - i
        buffers.append(Buffer(f"a{i}", (i, back + 1), size))
        buffers.append(Buffer(f"g{i}", (back - 1, back + 1), size))
        buffers.append(Buffer(f"w{i}", (i, i + 1), 64 * rng.randrange(1, 8192)))
    return Problem(buffers)


GENERATORS: dict[str, Callable[[int, int], Problem]] = {
    "cut": cut,
    "loose": loose,
    "scattered": scattered,
    "network": network,
    "training": training,
}
