"""Arrays that kernels are tried on: made, aligned, compared. numpy only, carried along in offline bundles.

bfloat16 is kept as uint16, so that no package of its own is needed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest error, as a fraction of the reference's largest magnitude."""


def numpy_dtype(name: str) -> Any:
    """How numpy holds an element of TVM's dtype."""
    return np.dtype("uint16" if name == "bfloat16" else name)


def nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * int(numpy_dtype(dtype).itemsize)


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A zeroed array whose data lies at a multiple of 64 bytes, as kernels assume."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out: np.ndarray = raw[start : start + size].view(dtype).reshape(shape)
    return out


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, positive: bool) -> np.ndarray:
    """Floats in (-1, 1) or (0.1, 1); 8-bit integers over their range; other integers 0 or 1, fit for an index."""
    out = aligned(shape, numpy_dtype(dtype))
    if dtype == "bfloat16":
        out[...] = to_bfloat16(rng.uniform(0.1 if positive else -1.0, 1.0, shape).astype(np.float32))
    elif out.dtype.kind in "iu" and out.dtype.itemsize == 1:
        info = np.iinfo(out.dtype)
        out[...] = rng.integers(info.min, info.max, shape, endpoint=True, dtype=out.dtype)
    elif out.dtype.kind in "iub":
        out[...] = rng.integers(0, 2, shape)
    else:
        out[...] = rng.uniform(0.1 if positive else -1.0, 1.0, shape).astype(np.float32)
    return out


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Finite float32 → bfloat16's bits, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widened(array: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers in float64."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def difference(got: np.ndarray, want: np.ndarray, dtype: str) -> str:
    """Why `got` is not `want` at the tolerance of its dtype; empty when it is."""
    if got.size == 0:
        return ""
    if dtype not in TOLERANCE:
        wrong = int(np.count_nonzero(got != want))
        if wrong and numpy_dtype(dtype).itemsize == 1 and dtype != "bool" and wrong <= max(1, got.size // 1000):
            # a rounding of a float at the midpoint may fall to either side when its sum is taken in another order
            steps = np.abs(got.astype(np.int32) - want.astype(np.int32)).max()
            wrong = wrong if steps > 1 else 0
        return f"{wrong} of {got.size} {dtype} elements differ" if wrong else ""
    a, b = widened(got, dtype).ravel(), widened(want, dtype).ravel()
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return "infinities or NaNs differ"
    if not finite.any():
        return ""
    error = float(np.abs(a[finite] - b[finite]).max())
    scale = float(np.abs(b[finite]).max())
    if not error <= TOLERANCE[dtype] * max(scale, 1e-6):  # a NaN is an error too
        return f"max abs error {error:.3g} on outputs up to {scale:.3g}"
    return ""
