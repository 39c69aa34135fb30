"""Does an operator gain from 16 bits on a target? A roofline: arithmetic and memory traffic, partly overlapped.

Counted in cycles of one core, from the Target's facts. Kernels that keep weights in 16 bits convert each vector of
them once per register tile, on ports that the products leave free: measured on AVX-512, products of 1 to 256 rows took
0.91 to 1.00 of their float32 time with the weights in cache, 0.13 to 0.57 of it beyond.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvmx.precision.operator import Operator
from tvmx.target import Target

HIDDEN = 0.75  # share of the smaller of arithmetic and memory time that the larger one hides
WINOGRAD = 0.6  # of the direct kernel's time; it exists for float32 weights only
DRAM_BYTES_PER_CYCLE = 6.0
L3_BYTES_PER_CYCLE = 10.0
L2_BYTES_PER_CYCLE = 32.0
PAIR_GAIN = 1.8  # two products an instruction, of the same number of loads and broadcasts an instruction
MARGIN = 0.995  # nothing is rounded for less

TENSOR_CORE = frozenset({"fp16", "bf16"})  # what the GPU kernels multiply; bfloat16 from sm_80 on
CONVERTERS = {
    "fp16": (frozenset({"f16c"}), frozenset({"avx512f"}), frozenset({"asimd"})),
    "bf16": (frozenset({"avx2"}), frozenset({"avx512f"}), frozenset({"asimd"})),  # a shift
}


@dataclass(frozen=True)
class Verdict:
    """Whether 16 bits pay for an operator, and why."""

    short: bool
    reason: str


def has_arithmetic(target: Target, precision: str, op: Operator) -> bool:
    """Does the target multiply `op` in this type and accumulate in float32, by an instruction that our kernels use?"""
    if target.kind != "cpu":
        return precision in TENSOR_CORE and (precision == "fp16" or (target.gpu is not None and target.gpu.has_mma))
    return precision == "bf16" and op.dots and target.has("avx512_bf16") and target.vector_bytes == 64


def judge(op: Operator, precision: str, target: Target, total_weights: int) -> Verdict:
    """Whether `op` is faster in 16 bits. `total_weights`: elements of all constants, which share the caches."""
    if target.kind != "cpu":
        able = has_arithmetic(target, precision, op)
        return Verdict(able, f"{target.name} has {'' if able else 'no '}{precision} kernels")
    if not any(target.has(*needed) for needed in CONVERTERS[precision]):
        return Verdict(False, f"the CPU has no {precision} arithmetic and no conversion of vectors")
    if has_arithmetic(target, precision, op):
        ratio = _cycles(op, 2, target, total_weights, PAIR_GAIN) / _cycles(op, 4, target, total_weights)
        return Verdict(ratio < MARGIN, f"pairs of {precision} products: modelled at {ratio:.2f}x the time")
    if not op.weights:
        return Verdict(False, f"no {precision} arithmetic on this CPU, and activations stay in cache")
    wide, short = (_cycles(op, size, target, total_weights) for size in (4, 2))
    ratio = short / wide
    if ratio >= MARGIN:
        return Verdict(
            False, f"no {precision} arithmetic on this CPU; 16-bit storage modelled at {ratio:.2f}x the time"
        )
    return Verdict(True, f"16-bit storage, float32 arithmetic: modelled at {ratio:.2f}x the time")


def _cycles(op: Operator, size: int, target: Target, total_weights: int, gain: float = 1.0) -> float:
    arithmetic = op.macs / target.lanes("float32") / gain
    if size == 4 and op.winograd:
        arithmetic *= WINOGRAD
    touched = op.weights if op.macs else min(op.weights, op.elements)  # a look-up reads only its rows
    memory = touched * size / _bytes_per_cycle(total_weights * size, target)
    return max(arithmetic, memory, 1.0) + (1 - HIDDEN) * min(arithmetic, memory)


def _bytes_per_cycle(working_set: int, target: Target) -> float:
    if working_set > target.l3_bytes:
        return DRAM_BYTES_PER_CYCLE
    return L3_BYTES_PER_CYCLE if working_set > target.l2_bytes else L2_BYTES_PER_CYCLE
