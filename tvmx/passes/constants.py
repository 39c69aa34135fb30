"""Relax constants as numpy arrays and back."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401 - numpy then knows bfloat16
import numpy as np

FOLDABLE = frozenset("bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64".split())


def as_array(expr: Any) -> np.ndarray | None:
    """The value of a constant, or None if `expr` is none or its dtype is one that numpy lacks."""
    import tvm

    if not isinstance(expr, tvm.ir.GenericConst) or not hasattr(expr.value, "numpy"):
        return None
    if str(expr.value.dtype) not in FOLDABLE:
        return None
    return np.asarray(expr.value.numpy())


def as_constant(array: np.ndarray) -> Any:
    """A Relax constant that owns a contiguous copy of `array`."""
    from tvm import relax

    return relax.const(np.array(array, order="C", copy=True), str(array.dtype))  # without a dtype, int64 scalars shrink


def scalar(expr: Any) -> float | None:
    """The value of a constant with one element, whatever its rank; else None."""
    array = as_array(expr)
    return None if array is None or array.size != 1 else float(array.reshape(()))
