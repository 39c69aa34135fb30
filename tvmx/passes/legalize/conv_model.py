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


def register_tile(
    positions: int, channels: int, reduction: int, target: Target, rounding: bool = True, narrow: float = NARROW_FMA
) -> Tile:
    """The tile with the fewest predicted cycles for `positions` × `channels` outputs of `reduction` MACs each.

    `positions` is what the row loop covers (N·H·W when they are fused, else the width of an output row). With
    `rounding` the last tile of a row may compute positions past the end. `narrow` is what an operation on half a vector
    costs beside one on a full one.
    """
    best: tuple[float, Tile] | None = None
    for tile in _tiles(positions, channels, target, rounding):
        cost = tile_cycles(tile, positions, channels, reduction, target, narrow)
        if best is None or cost < best[0] * 0.999:
            best = (cost, tile)
    assert best is not None
    return best[1]


def _tiles(positions: int, channels: int, target: Target, rounding: bool) -> Iterator[Tile]:
    full = target.lanes("float32")
    for lanes in (full, full // 2, full // 4):
        if lanes < 4:
            continue
        for vectors in range(1, MAX_VECTORS + 1):
            if vectors > 1 and (vectors - 1) * lanes >= channels:
                break
            most = most_rows(vectors, target)
            for rows in range(min(most, positions), 0, -1):
                if positions % rows == 0 or (rounding and rows > 1):
                    yield Tile(rows, vectors, lanes)


def most_rows(vectors: int, target: Target) -> int:
    """Rows that fit in registers beside a row of weights, a broadcast value and a product."""
    return (target.vector_registers - 2 - vectors) // vectors


def tile_cycles(
    tile: Tile, positions: int, channels: int, reduction: int, target: Target, narrow: float = NARROW_FMA
) -> float:
    """Predicted cycles of the whole layer, at one full-vector FMA and one load a cycle."""
    full = target.lanes("float32")
    fma = 1.0 if tile.lanes == full else narrow
    load = 1.0 if tile.lanes == full else 0.6
    tiles = math.ceil(positions / tile.rows) * math.ceil(channels / tile.panel)
    arithmetic = tile.rows * tile.vectors * fma
    # Before AVX a broadcast is a load and a shuffle.
    broadcast = 1.5 if target.arch == "x86_64" and not target.has("avx2") else 0.75
    loads = tile.vectors * load + tile.rows * broadcast
    latency = 4.0
    step = max(arithmetic, loads, latency) + 0.1 * loads + 0.4
    outside = 12 + tile.rows * tile.vectors * 2.5
    cycles = tiles * (reduction * step + outside)
    # Positions past the end cost a test a row at the end of every tile and, fused, a pointer a row.
    return cycles if positions % tile.rows == 0 else cycles * 1.08


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
    most = max(1, most_rows(vectors, target))
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
LAUNCH_CYCLES = 15_000.0  # waking the other threads once
TRANSFORM_CYCLES = 170.0  # of one 6×6 patch of one vector, in or out, loads and stores included


@dataclass(frozen=True)
class WinogradPlan:
    """How tiles go through the stages: `group` rows of tiles at a time, or all at once, each stage spread over threads
    (`group` = 0), so that every thread reads only its share of the weights."""

    group: int
    cycles: float


def winograd_plan(
    batch: int, rows: int, columns: int, depth: int, channels: int, target: Target, threads: int
) -> WinogradPlan:
    """The cheapest plan for a Winograd layer of rows × columns tiles a picture."""
    groups = [0, *divisors(rows)] if threads > 1 else divisors(rows)
    plans = [
        WinogradPlan(g, _winograd_cycles(batch, rows, columns, depth, channels, g, target, threads)) for g in groups
    ]
    return min(plans, key=lambda plan: plan.cycles)


def _winograd_cycles(
    batch: int, rows: int, columns: int, depth: int, channels: int, group: int, target: Target, threads: int
) -> float:
    positions = group * columns if group else batch * rows * columns
    tile = register_tile(positions, channels, depth, target, rounding=False)
    full = target.lanes("float32")
    cycles = 36 * tile_cycles(tile, positions, channels, depth, target)
    cycles += TRANSFORM_CYCLES * positions * (math.ceil(depth / full) + math.ceil(channels / full))
    weights = 36 * depth * channels * 4
    stages = 36 * positions * (depth + channels) * 4
    if not group:
        share = weights + stages * 2 if weights + stages > target.l2_bytes else 0
        return (cycles + share / L3_BYTES_PER_CYCLE) / threads + 2 * LAUNCH_CYCLES
    if weights + stages > target.l2_bytes:
        cycles += weights / L3_BYTES_PER_CYCLE
    if stages > target.l2_bytes * 0.75:
        cycles += 2 * stages / L3_BYTES_PER_CYCLE
    return cycles * math.ceil(batch * rows // group / threads)
