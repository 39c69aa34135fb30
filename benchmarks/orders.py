"""Programs whose order of steps matters: cells as architecture searches find them, branches, skips, random graphs.

python -m benchmarks.orders [--seeds 5]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tvmx.memory.order import Program, least_peak_order


@dataclass
class _Maker:
    """Collects steps in the order in which an exporter writes them: as they are called, branch level by level."""

    size: list[int] = field(default_factory=list)
    touches: list[tuple[int, ...]] = field(default_factory=list)
    after: list[tuple[int, ...]] = field(default_factory=list)
    over: list[tuple[tuple[int, int], ...]] = field(default_factory=list)

    def step(self, size: int, *reads: int, elementwise: bool = False) -> int:
        """A step that makes one value of `size` bytes from earlier ones; its number."""
        index = len(self.size)
        self.size.append(-(-size // 64) * 64)
        self.touches.append((index, *reads))
        self.after.append(tuple(dict.fromkeys(reads)))
        self.over.append(tuple((index, r) for r in reads) if elementwise else ())
        return index

    def program(self) -> Program:
        return Program(tuple(self.size), tuple(self.touches), tuple(self.after), tuple(self.over))


def nas_cells(seed: int, cells: int = 12, blocks: int = 5) -> Program:
    """Cells of pairwise sums over the outputs of the two cells before, each operand through one or two convolutions."""
    rng, make = random.Random(seed), _Maker()
    side, channels = 56, 32
    previous, before = make.step(side * side * channels * 4), make.step(side * side * channels * 4)
    for cell in range(cells):
        if cell and cell % (cells // 3) == 0:
            side, channels = side // 2, channels * 2
        size = side * side * channels * 4
        states = [make.step(size, previous), make.step(size, before)]
        chosen = [(rng.choice(states + [None] * b), rng.choice(states)) for b in range(blocks)]
        made: list[int] = []
        pairs = []
        for left, right in chosen:
            # None: a value made earlier in this cell
            a = left if left is not None else (rng.choice(made) if made else states[0])
            # A separable convolution expands before it projects.
            wide = make.step(size * rng.choice([1, 1, 2, 4]), a)
            pairs.append((make.step(size, wide), make.step(size * rng.choice([1, 2]), right)))
            if len(pairs) >= 2:
                x, y = pairs.pop(0)
                made.append(make.step(size, x, y))
        made.extend(make.step(size, x, y) for x, y in pairs)
        before, previous = previous, make.step(size * len(made), *made)
    return make.program()


def inception(seed: int, modules: int = 9) -> Program:
    """Four branches a module, written level by level: reductions first, then the convolutions over them."""
    rng, make = random.Random(seed), _Maker()
    x, side, channels = make.step(28 * 28 * 192 * 4), 28, 256
    for module in range(modules):
        if module in (2, 7):
            side //= 2
            x = make.step(side * side * channels * 4, x)
        unit = side * side * 4
        reduced = [make.step(unit * rng.choice([16, 24, 32, 96, 128]), x) for _ in range(3)]
        pooled = make.step(unit * channels, x)
        outs = [make.step(unit * rng.choice([64, 128, 192]), r) for r in reduced]
        outs.append(make.step(unit * rng.choice([32, 64]), pooled))
        channels = sum(make.size[o] for o in outs) // unit
        x = make.step(unit * channels, *outs)
    return make.program()


def unet(seed: int, depth: int = 4) -> Program:
    """Encoder and decoder with skips that are reduced before they are joined; each reduction may come late or early."""
    rng, make = random.Random(seed), _Maker()
    side, channels = 128, 16
    x = make.step(side * side * channels * 4)
    skips = []
    for _ in range(depth):
        x = make.step(side * side * channels * 4, x)
        skips.append((x, side, channels))
        side, channels = side // 2, channels * 2
        x = make.step(side * side * channels * 4, x)
    # Written at the end of the encoder, though each could run as soon as its skip is there.
    attention = [make.step(s * s * max(8, c // rng.choice([2, 4])) * 4, skip) for skip, s, c in skips]
    for (_, side, channels), gate in zip(reversed(skips), reversed(attention)):
        up = make.step(side * side * channels * 4, x)
        joined = make.step(make.size[up] + make.size[gate], up, gate)
        x = make.step(side * side * channels * 4, joined)
    return make.program()


def densenet(seed: int, blocks: int = 3, layers: int = 8) -> Program:
    """Every layer reads all before it through a bottleneck."""
    rng, make = random.Random(seed), _Maker()
    side, growth = 56, 32
    x = make.step(side * side * 64 * 4)
    for _ in range(blocks):
        unit, parts = side * side * 4, [x]
        for _ in range(layers):
            joined = make.step(sum(make.size[p] for p in parts), *parts)
            neck = make.step(unit * rng.choice([64, 128]), joined)
            parts.append(make.step(unit * growth, neck))
        side //= 2
        x = make.step(sum(make.size[p] for p in parts) // 8, *parts)
    return make.program()


def wired(seed: int, n: int = 200, reach: int = 12) -> Program:
    """A randomly wired network: a step reads up to three of the `reach` before it."""
    rng, make = random.Random(seed), _Maker()
    for i in range(n):
        near = range(max(0, i - reach), i)
        reads = rng.sample(near, min(len(near), rng.choice([1, 1, 2, 2, 3])))
        make.step(rng.choice([1, 2, 4, 8, 16]) << 12, *reads, elementwise=rng.random() < 0.3)
    return make.program()


PROGRAMS: dict[str, Callable[[int], Program]] = {
    "nas_cells": nas_cells,
    "inception": inception,
    "unet": unet,
    "densenet": densenet,
    "wired_200": wired,
    "wired_1000": lambda seed: wired(seed, 1000, 20),
}


def main() -> None:
    """Print a line a family: median peak against the original order, how many proved least, seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    for name, make in PROGRAMS.items():
        shares, proved, seconds, steps = [], 0, [], 0
        for seed in range(arguments.seeds):
            program = make(seed)
            began = time.perf_counter()
            found = least_peak_order(program)
            seconds.append(time.perf_counter() - began)
            shares.append(found.peak / found.original_peak)
            proved += found.optimal
            steps = len(program)
        print(json.dumps({"program": name, "steps": steps, "peak_over_original": round(statistics.median(shares), 3),
                          "proved": f"{proved}/{arguments.seeds}", "seconds": round(max(seconds), 2)}))  # fmt: skip


if __name__ == "__main__":
    main()
