"""Dequantize sinks and quantize rises through operators that only move values, until they meet or reach arithmetic.

shape(dequantize(x))  →  dequantize(shape(x))          quantize(shape(y))  →  shape(quantize(y))
quantize(dequantize(x)) with equal parameters  →  x
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tvmx.passes.constants import as_array, as_constant
from tvmx.passes.qdq.integer import shift, shifted
from tvmx.passes.qdq.params import (
    RANGE,
    Dequantized,
    QParams,
    dequantized,
    emit_dequantize,
    emit_quantize,
    has_computed_zero,
    qparams,
)
from tvmx.passes.qdq.requantize import RESHAPES
from tvmx.passes.rewrite import Refusal, RewriteRule, Scope, dims_of, dtype_of, op_name

PASS_THROUGH = (
    *RESHAPES,
    "permute_dims",
    "strided_slice",
    "nn.max_pool1d",
    "nn.max_pool2d",
    "nn.max_pool3d",
    "nn.pad",
    "image.resize2d",
    "broadcast_to",
    "tile",
    "repeat",
    "take",
    "concat",
    "split",
    "max",
    "min",
)
"""A scale is positive, so that the largest value is that of the largest code."""


def _again(call: Any, args: list[Any]) -> Any:
    import tvm

    return tvm.ir.Call(call.op, args, call.attrs, call.ty_args)


def sink_dequantize(scope: Scope, call: Any) -> Any:
    """shape(dequantize(x)) → dequantize(shape(x)); also where one scale and zero point are computed at run time."""
    from tvm import relax

    name = op_name(call)
    if name == "concat":
        return _sink_concat(scope, call)
    found = dequantized(scope, call.args[0])
    outer = scope.call(call.args[0], "dequantize")
    if isinstance(found, Refusal) and name in (*RESHAPES, "permute_dims", "strided_slice"):
        if dims_of(outer.args[1]) == () and has_computed_zero(scope, outer):
            codes = scope.emit(_again(call, [outer.args[0], *call.args[1:]]))
            return relax.op.dequantize(codes, outer.args[1], outer.args[2], -1, dtype_of(call))
    if found is None or isinstance(found, Refusal):
        return found
    if found.params.dtype not in (*RANGE, "int32"):
        return Refusal(f"{found.params.dtype} codes stay where they are")
    moved = moved_codes(scope, call, found)
    if moved is None or isinstance(moved, Refusal):
        return moved
    codes, params = moved
    return emit_dequantize(scope.emit(codes), params, dtype_of(call))


def moved_codes(scope: Scope, call: Any, x: Dequantized) -> tuple[Any, QParams] | Refusal | None:
    """The operator on codes instead of values, and the parameters of its result."""
    name, params = op_name(call), x.params
    constant = as_array(scope.definition(x.codes))
    if name in RESHAPES:
        return _reshaped(call, x, constant)
    if name == "permute_dims":
        axes = call.attrs.axes
        rank = len(dims_of(call) or ())
        order = tuple(reversed(range(rank))) if axes is None else tuple(int(a) % rank for a in axes)
        after = params if params.axis is None else params.on_axis(order.index(params.axis))
        return (_again(call, [x.codes]) if constant is None else as_constant(constant.transpose(order))), after
    if name == "take":
        return _taken(scope, call, x)
    if not params.per_tensor:
        return Refusal("codes scaled per channel stay where they are")
    if constant is not None:
        return None  # folded where it is used
    moved = on_codes(call, x.codes, params)
    return moved if isinstance(moved, Refusal) else (moved, params)


def on_codes(call: Any, codes: Any, params: QParams) -> Any:
    """A pass-through operator other than a reshape or transpose, on codes of one scale."""
    from tvm import relax

    name = op_name(call)
    if name == "nn.pad":
        code = padding_code(call, params)
        if code is None:
            return Refusal("the padding is no value that the codes can hold")
        widths = [int(v) for v in call.attrs.pad_width]
        return relax.op.nn.pad(codes, widths, call.attrs.pad_mode, float(code))
    if name == "image.resize2d":
        a = call.attrs
        if a.method != "nearest_neighbor":
            return Refusal(f"{a.method} resizing computes new values")
        return relax.op.image.resize2d(
            codes,
            call.args[1],
            roi=tuple(float(r) for r in a.roi),
            layout=a.layout,
            method=a.method,
            coordinate_transformation_mode=a.coordinate_transformation_mode,
            rounding_method=a.rounding_method,
            extrapolation_value=float(a.extrapolation_value),
        )
    if name.startswith("nn.max_pool") and any(int(p) for p in call.attrs.padding) and params.dtype not in RANGE:
        return Refusal("padding of a pool over wide codes")
    return _again(call, [codes, *call.args[1:]])


def padding_code(call: Any, params: QParams) -> int | None:
    """The code of a constant padding value, if one stands for it exactly."""
    if call.attrs.pad_mode != "constant":
        return 0
    value, scale, zero = float(call.attrs.pad_value), float(params.scale), int(params.zero)
    if params.dtype not in RANGE:
        return None
    low, high = RANGE[params.dtype]
    if value == -math.inf:
        return low
    code = round(value / scale) + zero if math.isfinite(value) else None
    if code is None or not low <= code <= high or np.float32((code - zero) * scale) != np.float32(value):
        return None
    return code


def _reshaped(call: Any, x: Dequantized, constant: np.ndarray | None) -> tuple[Any, QParams] | Refusal:
    from tvm import relax

    before, after = dims_of(x.codes), dims_of(call)
    if before is None or after is None:
        return Refusal("the shape is not known")
    params = x.params
    if params.axis is not None:
        if not all(isinstance(d, int) for d in (*before, *after)):
            return Refusal("a symbolic shape hides the scaled axis")
        place = [
            i
            for i, d in enumerate(after)
            if d == before[params.axis] and math.prod(after[:i]) == math.prod(before[: params.axis])
        ]
        if not place:
            return Refusal("the scaled axis is merged with another")
        params = params.on_axis(place[0])
    if constant is not None and all(isinstance(d, int) for d in after):
        return as_constant(constant.reshape(after)), params
    return relax.op.reshape(x.codes, after), params


def _taken(scope: Scope, call: Any, x: Dequantized) -> tuple[Any, QParams] | Refusal:
    """Rows of an embedding table, picked before they become floats."""
    if not x.params.per_tensor:
        return Refusal("a table scaled per row: its scales would have to be looked up too")
    return _again(call, [x.codes, *call.args[1:]]), x.params


def _sink_concat(scope: Scope, call: Any) -> Any:
    from tvm import relax

    if not isinstance(call.args[0], relax.Tuple):
        return None
    found = [dequantized(scope, f) for f in call.args[0].fields]
    parts = [f for f in found if isinstance(f, Dequantized)]
    if not parts:
        return None
    if len(parts) < len(found):
        return Refusal("a part is float")
    first = parts[0].params
    if not first.per_tensor or not all(p.params.same(first) for p in parts):
        return Refusal("the parts have different scales")
    return emit_dequantize(scope.emit(relax.op.concat([p.codes for p in parts], int(call.attrs.axis))), first)


def raise_quantize(scope: Scope, call: Any) -> Any:
    """quantize(shape(y)) → shape(quantize(y)), so that it ends up in the epilogue of what makes y."""
    from tvm import relax

    inner = scope.call(call.args[0], *PASS_THROUGH)
    if inner is None:
        return None
    name = op_name(inner)
    if name in ("strided_slice", "take", "split", "broadcast_to", "tile", "repeat"):
        return None
    params = qparams(call, dtype_of(call))
    if isinstance(params, Refusal):
        return params
    if not params.per_tensor:
        return Refusal("a quantize per channel stays where it is")
    if not scope.used_once(call.args[0]):
        return Refusal("the float tensor is used elsewhere")
    if name == "concat":
        if not isinstance(inner.args[0], relax.Tuple):
            return None
        parts = [scope.emit(emit_quantize(f, params)) for f in inner.args[0].fields]
        return relax.op.concat(parts, int(inner.attrs.axis))
    if name not in (*RESHAPES, "permute_dims"):
        source = scope.definition(inner.args[0])
        if not scope.used_once(inner.args[0]) or not hasattr(source, "op"):
            return Refusal("the float tensor below is used elsewhere")
        moved = on_codes(inner, scope.emit(emit_quantize(inner.args[0], params)), params)
        return moved
    return _again(inner, [scope.emit(emit_quantize(inner.args[0], params)), *inner.args[1:]])


def cancel(scope: Scope, call: Any) -> Any:
    """quantize(dequantize(x)) with equal parameters → x; with equal scales another zero point is a clipped shift."""
    found = dequantized(scope, call.args[0])
    if found is None or isinstance(found, Refusal):
        return found
    params = qparams(call, dtype_of(call))
    if isinstance(params, Refusal):
        return params
    if found.params.same(params):
        return found.codes
    return Refusal("the parameters differ: requantised in one kernel")


def same_sign(preferred: str) -> Any:
    """Rule body: activations get codes of the dtype that the target's dot unit reads."""

    def rewrite(scope: Scope, call: Any) -> Any:
        if dtype_of(call) == preferred or dtype_of(call) not in RANGE:
            return None
        params = qparams(call, dtype_of(call))
        if isinstance(params, Refusal):
            return params
        by = 128 if preferred == "uint8" else -128
        codes = scope.emit(emit_quantize(call.args[0], params.shifted(by, preferred)))
        return shift(scope, codes, dtype_of(call))

    return rewrite


def unshift(scope: Scope, call: Any) -> Any:
    """dequantize(shift(x)) → dequantize(x) with the zero point shifted."""
    under = shifted(scope, call.args[0])
    if under is None:
        return None
    params = qparams(call, dtype_of(call.args[0]))
    if isinstance(params, Refusal):
        return params
    by = 128 if dtype_of(under) == "uint8" else -128
    return emit_dequantize(under, params.shifted(by, dtype_of(under)), dtype_of(call))


RULES = (
    RewriteRule("unshift", ("dequantize",), unshift),
    RewriteRule("cancel", ("quantize",), cancel),
    RewriteRule("sink_dequantize", tuple(n for n in PASS_THROUGH if n != "split"), sink_dequantize),
    RewriteRule("raise_quantize", ("quantize",), raise_quantize),
)
