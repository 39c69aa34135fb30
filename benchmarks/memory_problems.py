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


def coarse(count: int, seed: int = 0) -> Problem:
    """`cut` on a coarse grid: 64 starts an instant and few sizes, so that hardly any match of sizes says much."""
    instants, levels = max(count // 64, 8), 1 << 12
    rng = random.Random(seed)
    return _perfect([(0, instants, 0, levels)], count, rng, wheels=0.0, unit=256)


def pinwheel(count: int, seed: int = 0) -> Problem:
    """No straight cut goes through: rectangles turn into four around a fifth, again and again. Reachable bound."""
    return _perfect([(0, 40 * count, 0, 1 << 20)], count, random.Random(seed), wheels=0.7, unit=1)


def _perfect(
    rects: list[tuple[int, int, int, int]], count: int, rng: random.Random, wheels: float, unit: int
) -> Problem:
    """Cut the largest rectangle (start, end, low, high) in two, or by chance `wheels` in five."""
    heap = [(-(e - s) * (hi - lo), s, e, lo, hi) for s, e, lo, hi in rects]
    done: list[tuple[int, int, int, int]] = []
    while heap and len(heap) + len(done) < count:
        _, s, e, lo, hi = heapq.heappop(heap)
        wide, high = e - s, hi - lo
        pieces: list[tuple[int, int, int, int]]
        if wide > 8 and high > 8 and rng.random() < wheels and len(heap) + len(done) + 5 <= count:
            t, u = sorted(s + 1 + round((wide - 2) * rng.uniform(a, a + 0.3)) for a in (0.1, 0.6))
            x, y = sorted(lo + 1 + round((high - 2) * rng.uniform(a, a + 0.3)) for a in (0.1, 0.6))
            pieces = [(s, t, lo, y), (s, u, y, hi), (t, u, x, y), (t, e, lo, x), (u, e, x, hi)]
        elif wide > 1 and (high == 1 or rng.random() < 0.5):
            t = s + max(1, min(wide - 1, round(wide * rng.uniform(0.15, 0.85))))
            pieces = [(s, t, lo, hi), (t, e, lo, hi)]
        elif high > 1:
            x = lo + max(1, min(high - 1, round(high * rng.uniform(0.15, 0.85))))
            pieces = [(s, e, lo, x), (s, e, x, hi)]
        else:
            done.append((s, e, lo, hi))
            continue
        for s, e, lo, hi in pieces:
            heapq.heappush(heap, (-(e - s) * (hi - lo), s, e, lo, hi))
    done += [each[1:] for each in heap]
    rng.shuffle(done)
    return Problem(Buffer(str(i), (s, e), (hi - lo) * unit, 1) for i, (s, e, lo, hi) in enumerate(done))


def tiled(count: int, seed: int = 0) -> Problem:
    """Copies of a small `cut` in a row and on one another, each with sizes of its own scale. Reachable bound."""
    each = 250
    rows = max(1, round((count / each) ** 0.5))
    columns = max(1, count // (each * rows))
    buffers = []
    for row in range(rows):
        scale = random.Random(seed + row).choice([1, 2, 3, 4, 8])
        for column in range(columns):
            for b in cut(each, seed + 1000 * row + column, 1 << 16):
                at = 4 * each * column
                buffers.append(Buffer(str(len(buffers)), (b.start + at, b.end + at), b.size * scale, 1))
    random.Random(seed).shuffle(buffers)
    return Problem(buffers)


def mixed(count: int, seed: int = 0) -> Problem:
    """`loose` with alignments from 1 to 4,096 bytes and some buffers that live from the beginning to the end."""
    rng = random.Random(seed)
    return Problem(
        Buffer(
            b.id,
            (0, 4 * count) if rng.random() < 0.0002 else b.lifespan,
            b.size,
            rng.choice([1, 16, 64, 64, 256, 4096]),
        )
        for b in loose(count, seed)
    )


def unet(count: int, seed: int = 0) -> Problem:
    """Down and up again, over and over: each level is kept for its way up; sizes halve and double with depth."""
    rng = random.Random(seed)
    buffers: list[Buffer] = []
    at = 0
    while len(buffers) < count:
        depth, width = rng.randrange(3, 7), 64 * rng.randrange(256, 4096)
        for level in range(2 * depth):
            size = width >> (2 * min(level, 2 * depth - 1 - level) // 2)
            for _ in range(3):
                buffers.append(Buffer(str(len(buffers)), (at, at + 2), max(size, 64)))
                at += 1
            if level < depth:
                buffers.append(Buffer(str(len(buffers)), (at - 1, at + 8 * (depth - level)), max(size, 64)))
    return Problem(buffers[:count])


def crowd(count: int, seed: int = 0) -> Problem:
    """Random long lifetimes: a third of the buffers lives at once."""
    rng = random.Random(seed)
    spans = [sorted(rng.sample(range(2 * count), 2)) for _ in range(count)]
    return Problem(Buffer(str(i), (a, b), int(2 ** rng.uniform(6, 20))) for i, (a, b) in enumerate(spans))


def together(count: int, seed: int = 0) -> Problem:
    """Half of the buffers live from the beginning to the end, the others from or to a random instant."""
    rng = random.Random(seed)
    spans = [(0, count), (0, count), (0, 0), (count, count)]
    return Problem(
        Buffer(str(i), _with(rng.randrange(1, count), *spans[i % 4]), int(2 ** rng.uniform(6, 20)))
        for i in range(count)
    )


def _with(instant: int, start: int, end: int) -> tuple[int, int]:
    return (start, end) if start < end else (0, instant) if start == 0 else (instant, end)


def nested(count: int, seed: int = 0) -> Problem:
    """Each buffer lives within the one before it, of heavy-tailed sizes."""
    rng = random.Random(seed)
    return Problem(
        Buffer(str(i), (i, 2 * count - i), 64 * min(int(rng.paretovariate(0.8)), 1 << 16)) for i in range(count)
    )


def instants(count: int, seed: int = 0) -> Problem:
    """Lifetimes of one instant, a hundred at each, under a hundredth of buffers that live long; few sizes."""
    rng = random.Random(seed)
    times = max(count // 100, 1)
    return Problem(
        Buffer(
            str(i),
            (0, times) if i % 100 == 0 else ((t := rng.randrange(times)), t + 1),
            64 << rng.randrange(0, 12, 3),
        )
        for i in range(count)
    )


GENERATORS: dict[str, Callable[[int, int], Problem]] = {
    "cut": cut,
    "pinwheel": pinwheel,
    "coarse": coarse,
    "tiled": tiled,
    "loose": loose,
    "mixed": mixed,
    "scattered": scattered,
    "network": network,
    "unet": unet,
    "training": training,
    "crowd": crowd,
    "together": together,
    "nested": nested,
    "instants": instants,
}
