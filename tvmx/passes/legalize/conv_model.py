"""Analytical model of CPU convolutions: how many rows × channels live in registers, how loops are blocked for caches.

Everything is counted in cycles of one core from the Target's facts; nothing is measured. The legalization asks it for
the channel panel (weights are packed for it), the schedules for everything else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tvmx.target import Target

MIN_PARALLEL_MACS = 1 << 19  # below this, waking a second thread costs more than it saves
NARROW_FMA = 0.62  # cost of an FMA of half a vector or less, in FMAs of a full one (0.5 where units are half as wide)
MAX_VECTORS = 6


@dataclass(frozen=True)
class Tile:
    """The register tile of a GEMM-like kernel: `rows` output positions × `vectors` vectors of `lanes` channels."""

    rows: int
    vectors: int
    lanes: int

    @property
    def panel(self) -> int:
        """Channels computed together: the width of a packed weight panel."""
        return self.vectors * self.lanes


def divisors(n: int) -> list[int]:
    """Divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def register_tile(positions: int, channels: int, reduction: int, target: Target, rounding: bool = True) -> Tile:
    """The tile with the fewest predicted cycles for `positions` × `channels` outputs of `reduction` MACs each.

    `positions` is what the row loop covers (N·H·W when they are fused, else the width of an output row). With
    `rounding` the last tile of a row may compute positions past the end.
    """
    best: tuple[float, Tile] | None = None
    for tile in _tiles(positions, channels, target, rounding):
        cost = tile_cycles(tile, positions, channels, reduction, target)
        if best is None or cost < best[0] * 0.999:
            best = (cost, tile)
    assert best is not None
    return best[1]


def _tiles(positions: int, channels: int, target: Target, rounding: bool) -> Iterator[Tile]:
    full = target.lanes("float32")
    registers = target.vector_registers
    for lanes in (full, full // 2, full // 4):
        if lanes < 4:
            continue
        for vectors in range(1, MAX_VECTORS + 1):
            if vectors > 1 and (vectors - 1) * lanes >= channels:
                break
            most = (registers - 1 - vectors) // vectors
            for rows in range(min(most, positions), 0, -1):
                if positions % rows == 0 or (rounding and rows > 1):
                    yield Tile(rows, vectors, lanes)


def tile_cycles(tile: Tile, positions: int, channels: int, reduction: int, target: Target) -> float:
    """Predicted cycles of the whole layer, at one full-vector FMA and one load a cycle."""
    full = target.lanes("float32")
    fma = 1.0 if tile.lanes == full else NARROW_FMA
    load = 1.0 if tile.lanes == full else 0.6
    tiles = math.ceil(positions / tile.rows) * math.ceil(channels / tile.panel)
    arithmetic = tile.rows * tile.vectors * fma
    loads = tile.vectors * load + tile.rows * 0.75
    latency = 4.0
    step = max(arithmetic, loads, latency) + 0.4
    outside = 12 + tile.rows * tile.vectors * 2.5 + (0 if positions % tile.rows == 0 else tile.rows)
    return tiles * (reduction * step + outside)


def split_parallel(candidates: list[tuple[int, int]], threads: int, ideal: int) -> tuple[int, int]:
    """Of (outer positions, outer panels) counts, one whose product is balanced over `threads` and nearest `ideal`."""

    def cost(pair: tuple[int, int]) -> float:
        count = pair[0] * pair[1]
        waste = math.ceil(count / threads) * threads / count - 1
        return waste * 4 + abs(math.log2(max(1, count) / max(1, ideal))) * 0.1 + 0.02 * (pair[1] > 1)

    return min(candidates, key=cost)


def tile_of_panel(panel: int, target: Target) -> tuple[int, int]:
    """(vectors, lanes) that a packed panel of `panel` channels is computed with."""
    lanes = target.lanes("float32")
    while panel % lanes:
        lanes //= 2
    return panel // lanes, lanes


def rows_of_panel(positions: int, panel: int, reduction: int, target: Target) -> int:
    """The best divisor of `positions` as rows beside a panel that is already fixed."""
    vectors, lanes = tile_of_panel(panel, target)
    most = max(1, (target.vector_registers - 1 - vectors) // vectors)
    choices = [Tile(r, vectors, lanes) for r in divisors(positions) if r <= most]
    return min(choices, key=lambda t: tile_cycles(t, positions, panel, reduction, target)).rows


def depthwise_tile(width: int, channels: int, target: Target) -> tuple[int, int]:
    """(output columns, lanes) in registers for a depthwise kernel over rows of `width` and `channels` channels."""
    lanes = target.lanes("float32")
    while channels % lanes:
        lanes //= 2
    most = max(1, (target.vector_registers - 4) // 3)
    return max(d for d in divisors(width) if d <= most), lanes


L3_BYTES_PER_CYCLE = 10.0
TRANSFORM_CYCLES = 170.0  # of one 6×6 patch of one vector, in or out, loads and stores included


def winograd_rows(batch: int, rows: int, columns: int, depth: int, channels: int, target: Target, threads: int) -> int:
    """How many rows of tiles go through the stages together: the divisor of `rows` with the least predicted cost."""
    return min(
        divisors(rows),
        key=lambda group: _winograd_group_cycles(batch, rows, columns, depth, channels, group, target, threads),
    )


def winograd_cycles(batch: int, rows: int, columns: int, depth: int, channels: int, target: Target) -> float:
    """Predicted cycles of a Winograd layer of rows × columns tiles on one core."""
    group = winograd_rows(batch, rows, columns, depth, channels, target, 1)
    return _winograd_group_cycles(batch, rows, columns, depth, channels, group, target, 1)


def _winograd_group_cycles(
    batch: int, rows: int, columns: int, depth: int, channels: int, group: int, target: Target, threads: int
) -> float:
    positions = group * columns
    tile = register_tile(positions, channels, depth, target, rounding=False)
    full = target.lanes("float32")
    cycles = 36 * tile_cycles(tile, positions, channels, depth, target)
    cycles += TRANSFORM_CYCLES * positions * (math.ceil(depth / full) + math.ceil(channels / full))
    weights = 36 * depth * channels * 4
    stages = 36 * positions * (depth + channels) * 4
    if weights + stages > target.l2_bytes:
        cycles += weights / L3_BYTES_PER_CYCLE
    if stages > target.l2_bytes * 0.75:
        cycles += 2 * stages / L3_BYTES_PER_CYCLE
    groups = batch * rows // group
    return cycles * math.ceil(groups / threads)
