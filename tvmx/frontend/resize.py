"""Resize along one axis as a table: for each output position its source positions and weights.

Sizes and scales are known while importing, so every mode of ONNX's Resize (all coordinate
transformations, cubic, antialias, exclude_outside, crop) becomes the same small kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Axis:
    """How one axis is resized. `scale` is the one given, which need not be out / size exactly."""

    size: int
    out: int
    scale: float
    coordinates: str = "half_pixel"
    mode: str = "nearest"
    nearest: str = "round_prefer_floor"
    cubic_a: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    roi: tuple[float, float] = (0.0, 1.0)

    def source(self, o: int) -> float:
        """Position in the input that output position `o` looks at (ONNX Resize, "x_original")."""
        full = self.scale * self.size  # the output length before it is cut to an integer
        if self.coordinates == "asymmetric":
            return o / self.scale
        if self.coordinates == "align_corners":
            return 0.0 if full == 1 or self.out == 1 else o * (self.size - 1) / (full - 1)
        if self.coordinates == "tf_crop_and_resize":
            start, end = self.roi
            if self.out == 1:
                return 0.5 * (start + end) * (self.size - 1)
            step = (end - start) * (self.size - 1) / (self.out - 1)
            return start * (self.size - 1) + o * step
        if self.coordinates == "pytorch_half_pixel" and self.out == 1:
            return 0.0
        middle = (o + 0.5) / self.scale - 0.5
        if self.coordinates == "half_pixel_symmetric":
            return self.size / 2 * (1 - self.out / full) + middle
        return middle

    def table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(index [out, taps] int32 inside the axis, weight [out, taps], outside [out] bool)."""
        index, weight, outside = [], [], []
        for o in range(self.out):
            x = self.source(o)
            taps, weights = self._taps(x)
            clipped = np.clip(taps, 0, self.size - 1)
            if self.exclude_outside:
                weights = np.where(taps == clipped, weights, 0.0)
                weights = weights / weights.sum()
            index.append(clipped)
            weight.append(weights)
            outside.append(x < 0 or x > self.size - 1)
        width = max(len(i) for i in index)
        pad = [width - len(i) for i in index]
        return (
            np.array([np.pad(i, (0, p)) for i, p in zip(index, pad)], np.int32),
            np.array([np.pad(w, (0, p)) for w, p in zip(weight, pad)], np.float64),
            np.array(outside, bool),
        )

    def _taps(self, x: float) -> tuple[np.ndarray, np.ndarray]:
        if self.mode == "nearest":
            rounding = {
                "round_prefer_floor": lambda v: math.ceil(v - 0.5),
                "round_prefer_ceil": lambda v: math.floor(v + 0.5),
                "floor": math.floor,
                "ceil": math.ceil,
            }[self.nearest]
            return np.array([rounding(x)]), np.ones(1)
        left = math.floor(x)
        ratio = x - left
        shrink = min(self.scale, 1.0) if self.antialias else 1.0
        reach = (1 if self.mode == "linear" else 2) / shrink
        start = math.floor(-reach) + 1
        offsets = np.arange(start, 2 - start)
        distance = np.abs((offsets - ratio) * shrink)
        if self.mode == "linear":
            weights = np.clip(1 - distance, 0, 1)
        else:
            a = self.cubic_a
            near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
            far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
            weights = np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
        return left + offsets, weights / weights.sum()
