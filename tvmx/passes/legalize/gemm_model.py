"""Which tiles a Tensor Core GEMM should use on a GPU: an analytical model, no measuring.

A block computes a tm × tn tile of C over steps of tk; its wm × wn warps hold it in registers, and `stages` copies of
the A and B tiles lie in shared memory. Time is the longest of matrix arithmetic, shared memory, L2 and the latency
that too few stages leave open, times the waves of blocks over the multiprocessors.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

from tvmx.target import Gpu

WARP = 32
FRAGMENT = 16  # rows and columns of C that one tensorised block computes
PAD_BYTES = 16  # of each row in shared memory where rows are not permuted: eight rows fall into different banks
LATENCY = 600  # cycles from a load's issue to its data, device memory
BLOCK_COST = 1500  # cycles to start a block and store its tile
STEP_COST = 60  # cycles at the barriers of one step of the pipeline
LAUNCH_US = 2.5


@dataclass(frozen=True)
class Problem:
    """`groups` products C[m, n] = A[m, k] · B[k, n]; `dtype` of A and B: "float16", "bfloat16" or "int8"."""

    groups: int
    m: int
    n: int
    k: int
    dtype: str
    out_bytes: int = 2

    @property
    def bytes(self) -> int:
        return 1 if self.dtype == "int8" else 2


@dataclass(frozen=True)
class Tile:
    """`tk` in elements. `splits` > 1: that many blocks share one tile of C, each a part of k."""

    tm: int
    tn: int
    tk: int
    wm: int
    wn: int
    stages: int
    splits: int = 1

    @property
    def warps(self) -> int:
        return self.wm * self.wn

    def shared_bytes(self, element: int, padded: bool = True) -> int:
        """Dynamic shared memory of a block: the pipeline's copies, or the tile of C that leaves through it."""
        rows = self.stages * (self.tm + self.tn) * (self.tk * element + (PAD_BYTES if padded else 0))
        staged = self.wm * FRAGMENT * (self.tn + 8) * 4
        return max(rows, staged)

    def registers(self, element: int) -> int:
        """Estimate per thread: accumulators, one step's fragments, addresses."""
        rows, columns = self.tm // self.wm, self.tn // self.wn
        accumulators = rows * columns // WARP
        step = 16 if element == 2 else 32
        fragments = (rows + columns) * step * element // 4 // WARP
        return accumulators + fragments + 40


@dataclass(frozen=True)
class Estimate:
    """Predicted time and what limits it."""

    microseconds: float
    blocks_per_sm: int
    waves: float
    limit: str  # "tensor" | "shared" | "l2" | "latency" | "memory"


def step_of(dtype: str, gpu: Gpu) -> int:
    """k of one matrix instruction."""
    return 32 if dtype == "int8" and gpu.has_mma else 16


def fits(tile: Tile, problem: Problem, gpu: Gpu) -> bool:
    """Can a multiprocessor hold one block of this tile?"""
    regs = tile.registers(problem.bytes)
    return (
        tile.shared_bytes(problem.bytes, not gpu.has_mma) <= gpu.shared_bytes_per_block
        and regs <= 232
        and regs * tile.warps * WARP <= gpu.registers
        and tile.tm % (tile.wm * FRAGMENT) == 0
        and tile.tn % (tile.wn * FRAGMENT) == 0
        and tile.tk % step_of(problem.dtype, gpu) == 0
    )


def blocks_per_sm(tile: Tile, element: int, gpu: Gpu) -> int:
    """Occupancy in blocks."""
    threads = tile.warps * WARP
    return max(
        0,
        min(
            gpu.shared_bytes // (tile.shared_bytes(element, not gpu.has_mma) + 1024),
            gpu.registers // (tile.registers(element) * threads),
            gpu.max_threads // threads,
            gpu.max_blocks,
        ),
    )


def estimate(tile: Tile, problem: Problem, gpu: Gpu, resident: int | None = None) -> Estimate:
    """Predicted time of the whole product, including the sum of the parts when k is split.

    `resident`: blocks a multiprocessor holds, where the compiler has told.
    """
    element = problem.bytes
    macs = gpu.int8_macs if problem.dtype == "int8" else gpu.f16_macs
    blocks = problem.groups * math.ceil(problem.m / tile.tm) * math.ceil(problem.n / tile.tn) * tile.splits
    resident = blocks_per_sm(tile, element, gpu) if resident is None else resident
    if resident == 0:
        return Estimate(math.inf, 0, math.inf, "shared")
    per_wave = resident * gpu.multiprocessors
    busy = min(resident, math.ceil(blocks / gpu.multiprocessors))
    steps = math.ceil(math.ceil(problem.k / tile.splits) / tile.tk)
    # Fewer than four warps do not keep the four Tensor Cores of a multiprocessor busy.
    use = min(1.0, busy * tile.warps / 4) * (0.9 if busy * tile.warps >= 8 else 0.75)
    rows, columns = tile.tm // tile.wm, tile.tn // tile.wn
    cycles = {
        "tensor": busy * tile.tm * tile.tn * tile.tk / (macs * use),
        "shared": busy * tile.warps * (rows + columns) * tile.tk * element / 128,
        "l2": busy * (tile.tm + tile.tn) * tile.tk * element / 48,
        "latency": LATENCY / max(1, tile.stages - 1) / (1 if tile.stages > 1 else 0.5),
    }
    limit = max(cycles, key=lambda name: cycles[name])
    waves = max(1.0, blocks / per_wave) if blocks > 4 * per_wave else math.ceil(blocks / per_wave)
    total = waves * (steps * (cycles[limit] + STEP_COST) + LATENCY + BLOCK_COST * busy)
    micro = total / (gpu.clock_ghz * 1e3)
    touched = problem.groups * (
        (problem.m + problem.n) * problem.k * element + problem.m * problem.n * problem.out_bytes
    )
    memory = touched / (gpu.bandwidth_gbs * 0.85 * 1e3)
    if memory > micro:
        micro, limit = memory, "memory"
    if tile.splits > 1:
        partial = problem.groups * problem.m * problem.n * 4 * tile.splits
        micro += LAUNCH_US + 2 * partial / (gpu.bandwidth_gbs * 1.5 * 1e3)
    return Estimate(micro, resident, waves, limit)


@functools.cache
def choose(problem: Problem, gpu: Gpu, may_split: bool = True) -> Tile:
    """The tile with the least predicted time; ties go to the one with less padding, then to three stages."""
    best, least = None, (math.inf, 0, 0)  # a third stage hides the barrier between two
    for tile in candidates(problem, gpu, may_split):
        padded = math.ceil(problem.m / tile.tm) * tile.tm * math.ceil(problem.n / tile.tn) * tile.tn
        key = (round(estimate(tile, problem, gpu).microseconds, 3), padded, abs(tile.stages - 3))
        if key < least:
            best, least = tile, key
    assert best is not None, f"no tile fits {problem} on {gpu.model}"
    return best


def candidates(problem: Problem, gpu: Gpu, may_split: bool = True) -> list[Tile]:
    """Tiles worth considering: they fit, and are not twice as large as the problem."""
    step = step_of(problem.dtype, gpu)
    sides_m = [t for t in (16, 32, 64, 128, 256) if t < 2 * max(problem.m, 16)]
    sides_n = [t for t in (16, 32, 64, 128, 256) if t < 2 * max(problem.n, 16)]
    depths = [t for t in (step, 2 * step, 4 * step) if t < 2 * max(problem.k, step)]
    stages = (2, 3, 4, 5) if gpu.has_mma else (1, 2)
    splits = (1, 2, 4, 8, 16) if may_split else (1,)
    found = []
    for tm, tn, tk, wm, wn, s, parts in itertools.product(
        sides_m, sides_n, depths, (1, 2, 4), (1, 2, 4), stages, splits
    ):
        if wm * wn > 8 or tm // wm > 64 or tn // wn > 128 or (tm // wm) * (tn // wn) > 64 * 64:
            continue
        if parts > 1 and (problem.k // parts < 4 * tk or not _underused(tm, tn, problem, gpu)):
            continue
        if s > 1 and math.ceil(problem.k / parts / tk) < s:
            continue
        # every thread of a block takes part in fetching each tile with 4 bytes or more
        if min(tm, tn) * tk * problem.bytes < wm * wn * WARP * 4:
            continue
        tile = Tile(tm, tn, tk, wm, wn, s, parts)
        if fits(tile, problem, gpu):
            found.append(tile)
    if not found:  # k shorter than any pipeline
        found = [Tile(16, 16, step, 1, 1, 1)]
    return found


def _underused(tm: int, tn: int, problem: Problem, gpu: Gpu) -> bool:
    return problem.groups * math.ceil(problem.m / tm) * math.ceil(problem.n / tn) < gpu.multiprocessors
