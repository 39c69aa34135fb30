"""Predicted cycles of one convolution or product in float32 and in 8-bit integers, on one core of a target.

The kernels' own models give the products (`conv_model`: register tiles, Winograd); added are what integers pay beside
them (codes in the unit's form, sums to codes) and what they save (bytes of weights and activations).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvmx.passes.legalize.conv_model import NARROW_FMA, register_tile, tile_cycles, winograd_plan
from tvmx.passes.legalize.dot_unit import has_vnni
from tvmx.target import Target

VECTOR_OPS_PER_CYCLE = 2.5
SUMS_TO_CODES = 9.0  # operations on a vector of int32 sums: bias, float, scale, two bounds, rounding, narrowing
SUMS_TO_CODES_BY_PAIRS = 22.0  # where vectors are narrowed by packing two of them (before AVX-512)
WIDEN = 3.0  # operations on a vector of codes that become floats
L2_BYTES_PER_CYCLE = 7.0
FAR_BYTES_PER_CYCLE = 6.0
NARROW_DOT = 1.0  # a dot-product step of half a vector takes as long as one of a full vector
# Fitted to layers of the zoo on one machine, compiled for AVX-512 VNNI, AVX-512, AVX2 and SSE: ratios are right within
# a tenth, or a fifth where Winograd competes with `vpmaddubsw`. A nanosecond is 8.5 of these cycles there.
DEPTHWISE_TAP = 1.6
WINOGRAD = 1.7  # of the model that chooses it, whose figures are the least that it can take


@dataclass(frozen=True)
class Work:
    """One layer. A product of matrices is a convolution of 1 × 1 over rows: `height` = groups, `width` = rows.

    `height` and `width` are of the result, `inputs` are elements of activations. `small`: every weight within ±64.
    """

    batch: int
    height: int
    width: int
    depth: int  # channels summed over, of one group
    channels: int  # of the result
    kernel: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    groups: int = 1
    inputs: int = 0
    weights: int = 0  # constants
    small: bool = False

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.depth == 1 and self.groups == self.channels

    @property
    def outputs(self) -> int:
        return self.batch * self.height * self.width * self.channels

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1]


def float_cycles(work: Work, target: Target) -> float:
    """In float32: direct, or by Winograd where the lowering would."""
    lanes = target.lanes("float32")
    memory = _memory(work, 4, target)
    if work.depthwise:
        return work.outputs / lanes * (work.taps * DEPTHWISE_TAP + 5) + memory
    return _dense(work, 1.0, target, work.taps * work.depth) + work.outputs / lanes * 0.5 + memory


def integer_cycles(work: Work, target: Target) -> float:
    """In 8-bit integers with int32 sums, codes in and codes out."""
    lanes = target.lanes("float32")
    pairs = target.arch == "x86_64" and target.vector_bytes < 64
    finish = work.outputs / lanes * (SUMS_TO_CODES_BY_PAIRS if pairs else SUMS_TO_CODES) / VECTOR_OPS_PER_CYCLE
    memory = _memory(work, 1, target)
    if work.depthwise:
        widened = work.inputs / lanes * WIDEN / VECTOR_OPS_PER_CYCLE
        return work.outputs / lanes * (work.taps * DEPTHWISE_TAP + 5) + widened + finish + memory
    operations, depth = unit_cost(work, target)
    steps = work.taps * math.ceil(work.depth / depth)
    packed = 0.0
    if work.taps > 1 or work.depth % depth or depth == 2:
        packed = work.inputs / (2 * lanes) / VECTOR_OPS_PER_CYCLE * 3
    return _dense(work, operations, target, steps, winograd=False) + packed + finish + memory


def unit_cost(work: Work, target: Target) -> tuple[float, int]:
    """(vector operations of one step of the target's dot unit, products a lane that the step adds)."""
    if target.arch == "aarch64":
        return (1.0, 4) if target.has("asimddp") else (2.0, 1)
    if has_vnni(target):
        return 1.0, 4
    if work.small and target.has("ssse3"):
        return 3.0, 4
    return (1.0, 2) if target.has("avx512_vnni") else (2.0, 2)


def rounding_cycles(elements: int, target: Target) -> float:
    """Quantising float32 elements that no integer kernel makes, in a pass or an epilogue of its own."""
    lanes = target.lanes("float32")
    return elements / lanes * 6 / VECTOR_OPS_PER_CYCLE + elements * 5 / L2_BYTES_PER_CYCLE


def widening_cycles(elements: int, target: Target) -> float:
    """Writing codes as float32 for a float kernel."""
    return elements / target.lanes("float32") * WIDEN / VECTOR_OPS_PER_CYCLE + elements * 5 / L2_BYTES_PER_CYCLE


def _dense(work: Work, operations: float, target: Target, steps: int, winograd: bool = True) -> float:
    """Register tiles over all positions; `operations`: vector operations where float32 has one FMA."""
    channels = work.channels // work.groups
    fused = work.taps == 1 and work.strides == (1, 1) and work.groups == 1
    positions = work.batch * work.height * work.width if fused else work.width
    repeats = work.groups if fused else work.batch * work.height * work.groups
    narrow = NARROW_FMA if winograd else NARROW_DOT
    tile = register_tile(positions, channels, steps, target, narrow=narrow)
    direct = tile_cycles(tile, positions, channels, steps, target, narrow) * repeats
    if operations > 1:  # beside the loads there is room for one operation a load
        extra = (operations - 1) * tile.rows * tile.vectors * steps
        extra *= math.ceil(positions / tile.rows) * math.ceil(channels / tile.panel) * repeats
        direct += extra * 0.8
    if not winograd or work.kernel != (3, 3) or work.strides != (1, 1) or work.groups > 1:
        return direct
    if work.depth % 4 or work.channels % 4:
        return direct
    rows, columns = math.ceil(work.height / 4), math.ceil(work.width / 4)
    plan = winograd_plan(work.batch, rows, columns, work.depth, channels, target, 1)
    return min(direct, plan.cycles * WINOGRAD)


def _memory(work: Work, size: int, target: Target) -> float:
    """Activations in and out and the weights once, at the speed of the nearest cache that holds them."""
    moved = (work.inputs + work.outputs + work.weights) * size
    return moved / (L2_BYTES_PER_CYCLE if moved <= target.l2_bytes else FAR_BYTES_PER_CYCLE)
