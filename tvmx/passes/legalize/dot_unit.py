"""Which dot-product instruction an integer kernel is built on, and what it asks of its operands.

Every unit is exact over the whole range of its operand types: accumulators are int32 and no intermediate saturates,
except `maddubs`, which is only chosen for weights that cannot make it saturate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tvmx.target import Target


@dataclass(frozen=True)
class DotUnit:
    """One step adds `depth` products into each lane of dtype `sums`; activations and weights have these dtypes."""

    name: str
    data: str
    weight: str
    depth: int
    macs_per_cycle: float  # of one core, where one float32 FMA of full vectors a cycle is `lanes("float32")`
    sums: str = "int32"

    @property
    def data_bytes(self) -> int:
        return 2 if self.data == "bfloat16" else np.dtype(self.data).itemsize


def unit_of(target: Target, data: str, weight: str, values: np.ndarray | None = None) -> DotUnit:
    """The fastest exact unit of `target` for operands of dtypes `data` × `weight`.

    `values` are constant weights, reduction axis second to last ([..., K, N]), if known: weights small enough for the
    16-bit sums of `vpmaddubsw` get it.
    """
    lanes = target.lanes("int32")
    if weight == "int8" and target.arch == "x86_64" and target.vector_bytes >= 16:
        if has_vnni(target):
            return DotUnit("vnni", "uint8", "int8", 4, 4.0 * lanes)
        if data == "uint8" and values is not None and target.has("ssse3") and fits_pairs(values):
            return DotUnit("maddubs", "uint8", "int8", 4, 4.0 * lanes / 3)
    if weight == "int8" and target.arch == "aarch64" and target.has("asimddp"):
        return DotUnit("sdot", "int8", "int8", 4, 4.0 * lanes)
    if target.arch == "x86_64":
        return DotUnit("pair16", "int16", "int16", 2, 2.0 * lanes / (1 if target.has("avx512_vnni") else 2))
    return DotUnit("plain", "int16", "int16", 1, 1.0 * lanes)


AMX = {"uint8": "amx", "int8": "amx_signed"}  # data dtype -> unit
AMX_MIN_ROWS, AMX_MIN_DEPTH = 4, 64  # what fills less of a tile is left to the vector units


def amx_unit(target: Target, data: str, weight: str, rows: int, depth: int) -> DotUnit | None:
    """TDPBUSD or TDPBSSD for products by constants, where the target has tiles and the operands fill them."""
    if weight != "int8" or data not in AMX or rows < AMX_MIN_ROWS or depth < AMX_MIN_DEPTH:
        return None
    if target.arch != "x86_64" or target.vector_bytes != 64 or not target.has("amx_tile", "amx_int8"):
        return None
    return DotUnit(AMX[data], data, "int8", 4, 64.0 * target.lanes("int32"))


def bf16_unit(target: Target) -> DotUnit | None:
    """VDPBF16PS, if the target has it: pairs of bfloat16 products added to float32 sums."""
    if target.arch == "x86_64" and target.vector_bytes == 64 and target.has("avx512_bf16"):
        return DotUnit("bf16", "bfloat16", "bfloat16", 2, 2.0 * target.lanes("float32"), "float32")
    return None


def has_vnni(target: Target) -> bool:
    """Has the target VPDPBUSD at its full vector width?"""
    if target.vector_bytes == 64:
        return target.has("avx512_vnni")
    return target.vector_bytes == 32 and target.has("avx_vnni")


def fits_pairs(weight: np.ndarray) -> bool:
    """Can no sum of two neighbouring products of a uint8 and these int8 weights leave int16? K is second to last."""
    w = weight.astype(np.int32)
    if w.shape[-2] % 2:
        w = np.concatenate([w, np.zeros_like(w[..., :1, :])], -2)
    first, second = w[..., ::2, :], w[..., 1::2, :]
    high = np.maximum(first, 0) + np.maximum(second, 0)
    low = np.minimum(first, 0) + np.minimum(second, 0)
    return bool((high * 255 <= 32767).all() and (low * 255 >= -32768).all())
