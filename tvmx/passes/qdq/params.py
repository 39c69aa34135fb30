"""Scale, zero point and axis of a quantize or dequantize call, as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmx.passes.constants import as_array, as_constant
from tvmx.passes.rewrite import Refusal, Scope, dims_of, dtype_of

RANGE = {"int8": (-128, 127), "uint8": (0, 255)}


@dataclass(frozen=True, eq=False)
class QParams:
    """real = scale · (q - zero). `scale` float32 and `zero` int64, both 0-d or [C] along `axis`."""

    scale: np.ndarray
    zero: np.ndarray
    axis: int | None  # None: one scale for the whole tensor
    dtype: str

    @property
    def per_tensor(self) -> bool:
        return self.axis is None

    def same(self, other: QParams) -> bool:
        """Do both give every code the same value?"""
        return (
            self.dtype == other.dtype
            and self.axis == other.axis
            and self.scale.shape == other.scale.shape
            and bool((self.scale == other.scale).all())
            and bool((self.zero == other.zero).all())
        )

    def on_axis(self, axis: int | None) -> QParams:
        return QParams(self.scale, self.zero, axis, self.dtype)

    def shifted(self, by: int, dtype: str) -> QParams:
        """The parameters of codes `q + by` of another dtype."""
        return QParams(self.scale, self.zero + by, self.axis, dtype)

    def along(self, extent: int) -> tuple[np.ndarray, np.ndarray]:
        """(scale, zero) spread to [extent]."""
        return np.broadcast_to(self.scale.reshape(-1), (extent,)), np.broadcast_to(self.zero.reshape(-1), (extent,))


def qparams(call: Any, dtype: str) -> QParams | Refusal:
    """Of a quantize or dequantize call whose codes have `dtype`."""
    scale, zero = as_array(call.args[1]), as_array(call.args[2])
    if scale is None or zero is None:
        return Refusal("the scale or the zero point is computed at run time")
    if scale.ndim > 1:
        return Refusal("the scale has more than one axis")
    rank = len(dims_of(call) or ())
    scale, zero = scale.astype(np.float32), zero.astype(np.int64)
    if scale.size == 1 and zero.size == 1:
        return QParams(scale.reshape(()), zero.reshape(()), None, dtype)
    size = max(scale.size, zero.size)
    scale, zero = (np.broadcast_to(a.reshape(-1), (size,)) for a in (scale, zero))
    return QParams(scale, zero, int(call.attrs.axis) % max(rank, 1), dtype)


@dataclass(frozen=True, eq=False)
class Dequantized:
    """A float tensor that is a dequantised one: its codes and their parameters."""

    codes: Any
    params: QParams


def dequantized(scope: Scope, expr: Any) -> Dequantized | Refusal | None:
    """What `expr` dequantises; None when it is no dequantize, a Refusal when its parameters are not known."""
    call = scope.call(expr, "dequantize")
    if call is None:
        return None
    found = qparams(call, dtype_of(call.args[0]))
    return found if isinstance(found, Refusal) else Dequantized(call.args[0], found)


def has_computed_zero(scope: Scope, call: Any) -> bool:
    """Is the zero point of this dequantize one scalar that the program computes?"""
    return dims_of(call.args[2]) == () and as_array(scope.definition(call.args[2])) is None


def emit_dequantize(codes: Any, params: QParams, out: str = "float32") -> Any:
    """The relax.dequantize call (not yet bound)."""
    from tvm import relax

    axis = -1 if params.axis is None else params.axis
    zero = params.zero.astype(params.dtype if fits(params.zero, params.dtype) else "int32")
    return relax.op.dequantize(codes, as_constant(params.scale.astype("float32")), as_constant(zero), axis, out)


def emit_quantize(value: Any, params: QParams) -> Any:
    """The relax.quantize call (not yet bound)."""
    from tvm import relax

    axis = -1 if params.axis is None else params.axis
    zero = params.zero.astype(params.dtype)
    scale = as_constant(params.scale.astype("float32"))
    return relax.op.quantize(value, scale, as_constant(zero), axis, params.dtype)


def fits(values: np.ndarray, dtype: str) -> bool:
    """Are all integers `values` representable in `dtype`?"""
    info = np.iinfo(dtype)
    return bool((values >= info.min).all() and (values <= info.max).all())


def constant_value(scope: Scope, expr: Any) -> np.ndarray | None:
    """The float value of a constant or of a dequantised constant, else None."""
    array = as_array(scope.definition(expr))
    if array is not None:
        return array
    found = dequantized(scope, expr)
    if isinstance(found, Dequantized):
        codes = as_array(scope.definition(found.codes))
        if codes is not None:
            return dequantize_array(codes, found.params)
    return None


def dequantize_array(codes: np.ndarray, params: QParams) -> np.ndarray:
    """scale · (codes - zero) in float32, as the operator computes it."""
    scale, zero = params.scale, params.zero
    if params.axis is not None:
        shape = [1] * codes.ndim
        shape[params.axis] = -1
        scale, zero = scale.reshape(shape), zero.reshape(shape)
    difference = (codes.astype(np.int64) - zero).astype(np.float32)
    return np.asarray(difference * scale.astype(np.float32), np.float32)
