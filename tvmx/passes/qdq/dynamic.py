"""Convolutions over codes whose zero point is computed at run time, as dynamic quantisation writes them (ConvInteger).

conv(x - z, w) = conv(x, w) - z · sum w        around the image lies z
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tvmx.passes.constants import as_array, as_constant
from tvmx.passes.legalize.conv import OPAQUE
from tvmx.passes.qdq.integer import constant_weights, convolve, scaled, slower
from tvmx.passes.qdq.params import RANGE, Dequantized, QParams, has_computed_zero
from tvmx.passes.rewrite import Refusal, RewriteRule, Scope, dtype_of
from tvmx.target import Target


def dynamic_conv(scope: Scope, call: Any, target: Target) -> Any:
    """conv2d(dequantize(x, constant scale, computed zero), dequantized constant weights) over NHWC."""
    from tvm import relax

    outer = scope.call(call.args[0], "dequantize")
    if outer is None or not has_computed_zero(scope, outer):
        return None
    codes, zero = outer.args[0], outer.args[2]
    scale = as_array(scope.definition(outer.args[1]))
    if scale is None or dtype_of(codes) not in RANGE:
        return Refusal("the scale is computed at run time")
    x = Dequantized(codes, QParams(scale.astype(np.float32), np.zeros((), np.int64), None, dtype_of(codes)))
    found = constant_weights(scope, call, x)
    if isinstance(found, Refusal):
        return found
    weights, scales = found
    refusal = slower(scope, call, x, weights, target)
    if refusal is not None:
        return refusal
    pads = [int(p) for p in call.attrs.padding]
    if any(pads):
        codes = scope.emit(scope.kernel(lambda a, z: _padded(a, z, pads), codes, zero, name="pad_by_zero_point"))
    sums = convolve(scope, call, codes, weights)
    if isinstance(sums, Refusal):
        return sums
    columns = as_constant(weights.sum((0, 1, 2)).astype(dtype_of(sums)))
    # A kernel of its own: one with the subtraction would not be an epilogue of the convolution any more.
    moved = scope.emit(scope.kernel(_times, columns, zero, name="zero_point_times_sums", pattern=OPAQUE))
    return scaled(scope, scope.emit(relax.op.subtract(sums, moved)), np.zeros(1, np.int64), scales)


def _times(columns: Any, zero: Any) -> Any:
    from tvm import te

    return te.compute(columns.shape, lambda k: columns[k] * zero[()].astype(columns.dtype), name="times")


def _padded(x: Any, zero: Any, pads: list[int]) -> Any:
    """x[N, H, W, C] with the zero point around it."""
    from tvm import te, tirx

    n, h, w, c = x.shape
    top, left, bottom, right = pads

    def value(b: Any, i: Any, j: Any, k: Any) -> Any:
        inside = tirx.all(i >= top, i < h + top, j >= left, j < w + left)
        return tirx.if_then_else(inside, x[b, i - top, j - left, k], zero[()].astype(str(x.dtype)))

    return te.compute((n, h + top + bottom, w + left + right, c), value, name="pad_by_zero_point")


def rules(target: Target) -> tuple[RewriteRule, ...]:
    """On CPUs; elsewhere such convolutions stay in float, where they are exact too."""
    if target.kind != "cpu":
        return ()
    return (RewriteRule("dynamic_conv2d", ("nn.conv2d",), lambda scope, call: dynamic_conv(scope, call, target)),)
