"""Scales meet: bias into the int32 sums, the output's scale into those of the inputs, clips that saturation implies.

quantize((sum·S + b) / s)  →  quantize(sum·(S/s) + b/s, 1)       no division is left in an epilogue

A product by the rounded 1/s may fall on the other side of a tie than the quotient: such a code is off by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tvmx.passes.constants import as_array, as_constant
from tvmx.passes.qdq.params import (
    RANGE,
    Dequantized,
    QParams,
    constant_value,
    dequantized,
    emit_dequantize,
    emit_quantize,
    qparams,
)
from tvmx.passes.rewrite import Refusal, RewriteRule, Scope, dims_of, dtype_of, op_name

INTEGRAL = 1e-3  # how far a float bias may be from a whole number of steps and count as one
ROUNDING = 2.0**-22  # and the share of it that the roundings of the bias and of both scales to float32 make


def fold_bias(scope: Scope, call: Any) -> Any:
    """add(float(sums) · S, b) → float(sums + b / S) · S where b is a whole number of steps, as quantisers make it."""
    from tvm import relax

    for scaled, bias in (call.args, call.args[::-1]):
        product = scope.call(scaled, "multiply")
        value = constant_value(scope, bias)
        if product is None or value is None or dtype_of(call) != "float32":
            continue
        factor = as_array(product.args[1])
        found = None if factor is None else _whole_sums(scope, product.args[0])
        if factor is None or found is None:
            continue
        if not scope.used_once(scaled) or not scope.used_once(product.args[0]):
            return Refusal("the product is used elsewhere")
        flat = _per_column(value, call)
        if flat is None:
            return Refusal("the bias is not one value per output channel")
        if (factor == 0).any():
            return Refusal("a scale is zero")
        steps = flat.astype(np.float64) / factor.astype(np.float64)
        whole = np.rint(steps)
        if (np.abs(steps - whole) > INTEGRAL + ROUNDING * np.abs(whole)).any():
            return Refusal("the bias is no whole number of steps")
        sums = _plus(scope, found, whole)
        if sums is None:
            return Refusal("the bias does not fit into int32")
        if dtype_of(sums) != "float32":
            sums = scope.emit(relax.op.astype(sums, "float32"))
        return relax.op.multiply(sums, product.args[1])
    return None


def _whole_sums(scope: Scope, expr: Any) -> Any | None:
    """Sums of codes: int32 that are cast, or the floats of a depthwise window."""
    cast = scope.call(expr, "astype")
    if cast is not None and dtype_of(cast.args[0]) == "int32":
        return cast.args[0]
    add = scope.call(expr, "add")
    conv = scope.call(expr if add is None else add.args[0], "nn.conv2d")
    return expr if conv is not None and "int" in dtype_of(conv.args[1]) else None


def _plus(scope: Scope, sums: Any, whole: np.ndarray) -> Any | None:
    """sums + whole, merged with an offset that is there already; None where that may leave int32."""
    from tvm import relax

    inner = scope.call(sums, "add")
    offset = None if inner is None else as_array(inner.args[1])
    if inner is not None and offset is not None and scope.used_once(sums):
        whole, sums = whole + offset, inner.args[0]
    if dtype_of(sums) == "int32" and np.abs(whole).max(initial=0) >= 1 << 30:
        return None
    return scope.emit(relax.op.add(sums, as_constant(whole.astype(dtype_of(sums)))))


def _per_column(value: np.ndarray, call: Any) -> np.ndarray | None:
    """A constant that varies along the last axis only, as [n] or [1]."""
    if value.ndim > len(dims_of(call) or ()) or any(d != 1 for d in value.shape[:-1]):
        return None
    return value.reshape(-1)


def fold_output_scale(scope: Scope, call: Any) -> Any:
    """quantize(y, s, z) → quantize(y / s, 1, z) with 1 / s moved into the constants that y is made with, if any."""
    from tvm import relax

    params = qparams(call, dtype_of(call))
    if isinstance(params, Refusal):
        return params
    if not params.per_tensor or params.dtype not in RANGE:
        return Refusal("a quantize per channel keeps its division")
    scale = float(params.scale)
    if scale == 1.0:
        return None
    if dtype_of(call.args[0]) != "float32":
        return None
    if not np.isfinite(1 / np.float32(scale)):
        return Refusal("the scale has no reciprocal")
    moved = _rescaled(scope, call.args[0], 1 / scale, 0)
    if moved is None:
        if _is_given(scope, call.args[0]):
            return Refusal("the value is an input of the program")
        factor = as_constant(np.float32(1 / scale))
        moved = scope.emit(relax.op.multiply(call.args[0], factor))  # a third of a division's time
    return emit_quantize(moved, QParams(np.ones((), np.float32), params.zero, None, params.dtype))


def _is_given(scope: Scope, expr: Any) -> bool:
    """Is it an input of the program, or one in another shape or order?"""
    while (view := scope.call(expr, "permute_dims", *RESHAPES)) is not None:
        expr = view.args[0]
    return scope.definition(expr) is expr


RESHAPES = ("reshape", "flatten", "squeeze", "expand_dims", "nn.batch_flatten")
MAX_DEPTH = 8


def _rescaled(scope: Scope, expr: Any, factor: float, depth: int) -> Any | None:
    """An expression for `expr` · factor that costs nothing more, or None."""
    from tvm import relax

    value = constant_value(scope, expr)
    if value is not None and value.dtype == np.float32:
        return as_constant((value.astype(np.float64) * factor).astype(np.float32))
    call = scope.definition(expr)
    name = op_name(call)
    if depth > MAX_DEPTH or (not scope.used_once(expr) and name != "dequantize"):
        return None
    if name == "dequantize":
        found = dequantized(scope, expr)
        if not isinstance(found, Dequantized):
            return None
        p = found.params
        scaled = QParams((p.scale.astype(np.float64) * factor).astype(np.float32), p.zero, p.axis, p.dtype)
        return scope.emit(emit_dequantize(found.codes, scaled))
    if name == "multiply":
        for index in (1, 0):
            constant = constant_value(scope, call.args[index])
            if constant is not None:
                scaled_constant = as_constant((constant.astype(np.float64) * factor).astype(np.float32))
                return scope.emit(relax.op.multiply(call.args[1 - index], scaled_constant))
        left = _rescaled(scope, call.args[0], factor, depth + 1)
        return None if left is None else scope.emit(relax.op.multiply(left, call.args[1]))
    if name in ("add", "subtract", "maximum", "minimum"):
        if name in ("maximum", "minimum") and factor <= 0:
            return None
        parts = [_rescaled(scope, a, factor, depth + 1) for a in call.args]
        if parts[0] is None or parts[1] is None:
            return None
        return scope.emit(getattr(relax.op, name)(*parts))
    if name == "nn.relu" and factor > 0:
        inner = _rescaled(scope, call.args[0], factor, depth + 1)
        return None if inner is None else scope.emit(relax.op.nn.relu(inner))
    if name == "clip" and factor > 0:
        bounds = _bounds(call)
        inner = None if bounds is None else _rescaled(scope, call.args[0], factor, depth + 1)
        if inner is None or bounds is None:
            return None
        return scope.emit(relax.op.clip(inner, bounds[0] * factor, bounds[1] * factor))
    return None


def _bounds(call: Any) -> tuple[float, float] | None:
    try:
        return float(call.args[1].value), float(call.args[2].value)
    except (AttributeError, TypeError):
        return None


def drop_implied_clip(scope: Scope, call: Any) -> Any:
    """quantize(relu(y)) → quantize(y) where zero is the lowest code; the same for a clip outside the codes' range."""
    inner = scope.call(call.args[0], "nn.relu", "clip")
    if inner is None:
        return None
    params = qparams(call, dtype_of(call))
    if isinstance(params, Refusal):
        return params
    if not params.per_tensor or params.dtype not in RANGE:
        return Refusal("a quantize per channel keeps its clip")
    low, high = (float((v - int(params.zero)) * params.scale) for v in RANGE[params.dtype])
    bounds = (0.0, float("inf")) if op_name(inner) == "nn.relu" else _bounds(inner)
    if bounds is None:
        return None
    # A bound half a step inside the range still rounds to the last code.
    half = 0.499 * float(params.scale)
    if bounds[0] > low + half or bounds[1] < high - half:
        return Refusal("the clip is tighter than the codes' range")
    return emit_quantize(inner.args[0], params)


RULES = (
    RewriteRule("fold_bias", ("add",), fold_bias),
    RewriteRule("drop_implied_clip", ("quantize",), drop_implied_clip),
    RewriteRule("fold_output_scale", ("quantize",), fold_output_scale),
)
