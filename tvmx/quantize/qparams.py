"""Scales and zero points: from a range for activations, from the values for weights, int32 for biases.

The arithmetic is ONNX's: q = saturate(round_half_even(x / scale) + zero_point), x' = (q - zero_point) * scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmx.quantize.graph import Array

Float32 = NDArray[np.float32]

# A range below this cannot be told from a constant, and a scale made of it would underflow in products of scales.
TINY_RANGE = 1e-30
INT32_LIMIT = float(2**30)  # half of int32: a bias must leave room for the products it is added to


@dataclass(frozen=True)
class QParams:
    """Per-tensor quantisation of an activation: float32 scale, zero point, "uint8" or "int8"."""

    scale: float
    zero_point: int
    dtype: str

    @property
    def low(self) -> float:
        """The least value that is not clipped."""
        return (int(np.iinfo(self.dtype).min) - self.zero_point) * self.scale

    @property
    def high(self) -> float:
        """The greatest value that is not clipped."""
        return (int(np.iinfo(self.dtype).max) - self.zero_point) * self.scale


@dataclass(frozen=True)
class QWeight:
    """A quantised weight: int8 values, one scale (axis None) or one per index of `axis`; zero points are 0."""

    values: NDArray[np.int8]
    scale: Float32
    axis: int | None

    def dequantized(self) -> Float32:
        """The float weight that the integers stand for, in the weight's own shape."""
        return self.values.astype(np.float32) * spread(self.scale, self.values.ndim, self.axis)


def spread(scale: Float32, rank: int, axis: int | None) -> Float32:
    """A scale vector reshaped so that it broadcasts along `axis`."""
    if axis is None:
        return np.asarray(scale.reshape(()))
    return scale.reshape([-1 if k == axis else 1 for k in range(rank)])


def activation_qparams(low: float, high: float, dtype: str, symmetric: bool) -> QParams:
    """Parameters for values in [low, high]; the range is widened to hold 0, which stays exact.

    uint8 asymmetric: scale = (high - low) / 255. int8 symmetric: scale = max(|low|, |high|) / 127, zero point 0;
    uint8 symmetric: zero point 128. An empty or zero range gives scale 1: every value of such a tensor is 0, and
    0 is exact at any scale.
    """
    info = np.iinfo(dtype)
    low, high = min(float(low), 0.0), max(float(high), 0.0)
    if not np.isfinite(low + high) or high - low < TINY_RANGE:
        return QParams(1.0, 0 if info.min < 0 or not symmetric else 128, dtype)
    if symmetric:
        scale = np.float32(max(-low, high) / 127)
        return QParams(float(scale), 0 if info.min < 0 else 128, dtype)
    scale = np.float32((high - low) / (int(info.max) - int(info.min)))
    zero = int(np.clip(np.rint(info.min - low / float(scale)), info.min, info.max))
    return QParams(float(scale), zero, dtype)


def quantize_array(x: Array, params: QParams) -> Array:
    """ONNX QuantizeLinear of an array."""
    info = np.iinfo(params.dtype)
    q = np.rint(np.asarray(x, np.float32) / np.float32(params.scale)) + params.zero_point
    return np.asarray(np.clip(q, info.min, info.max).astype(params.dtype))


def fake_quantize(x: Array, params: QParams) -> Float32:
    """DequantizeLinear(QuantizeLinear(x)) in float32, without the integers in between."""
    info = np.iinfo(params.dtype)
    q = np.rint(np.asarray(x, np.float32) / np.float32(params.scale))
    q = np.clip(q, info.min - params.zero_point, info.max - params.zero_point)
    return np.asarray(q * np.float32(params.scale), np.float32)


def quantize_weight(weight: Array, axis: int | None, limit: int = 127, floor: Float32 | None = None) -> QWeight:
    """Symmetric int8 in [-limit, limit], per index of `axis` or, with None, per tensor.

    `limit` 64 keeps u8 × s8 pair sums of `vpmaddubsw` inside 16 bits: 2 · 255 · 64 < 32768. `floor` [channels] is
    the least scale of each channel: a channel near zero would otherwise get a scale so small that its bias
    overflows int32. A channel of zeros gets its floor, or 1.
    """
    values = np.asarray(weight, np.float32)
    if axis is None:
        peak = np.asarray(np.abs(values).max(initial=0.0), np.float32).reshape(1)
    else:
        others = tuple(k for k in range(values.ndim) if k != axis)
        peak = np.abs(values).max(axis=others, initial=0.0).astype(np.float32)
    scale = (peak / np.float32(limit)).astype(np.float32)
    if floor is not None:
        scale = np.maximum(scale, floor)
    scale = np.where(scale > TINY_RANGE, scale, np.float32(1)).astype(np.float32)
    q = np.clip(np.rint(values / spread(scale, values.ndim, axis)), -limit, limit).astype(np.int8)
    return QWeight(q, scale if axis is not None else scale.reshape(()), axis)


def bias_floor(bias: Array, input_scale: float) -> Float32:
    """The least weight scale [channels] at which each bias fits into int32 with a bit to spare."""
    return np.asarray(np.abs(np.asarray(bias, np.float64)) / (INT32_LIMIT * float(input_scale)), np.float32)


def quantize_bias(bias: Array, input_scale: float, weight_scale: Float32) -> tuple[NDArray[np.int32], Float32]:
    """int32 bias [channels] and its scales: input scale × weight scale, the scale of the accumulator."""
    scale = (np.float32(input_scale) * weight_scale.reshape(-1)).astype(np.float32)
    scale = np.broadcast_to(scale, np.shape(bias)).astype(np.float32)
    q = np.rint(np.asarray(bias, np.float64) / scale.astype(np.float64))
    return np.clip(q, -INT32_LIMIT, INT32_LIMIT).astype(np.int32), scale
