"""Sums, means and average pools of dequantised tensors: int32 sums of codes, scaled once per result.

    sum(s · (q - z)) = s · (sum q - n · z)          mean likewise, with s / n

The codes are read where they lie; no float tensor is made of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvmx.passes.legalize.conv import constant_of, emit, static_shape

BYTES = ("int8", "uint8")


def mean(bb: Any, call: Any, before: Callable[[Any], Any]) -> Any:
    """R.mean over static axes of a dequantize with one scale; None for anything else."""
    return _summed(bb, call, before, "mean")


def total(bb: Any, call: Any, before: Callable[[Any], Any]) -> Any:
    """R.sum likewise."""
    return _summed(bb, call, before, "sum")


def _summed(bb: Any, call: Any, before: Callable[[Any], Any], kind: str) -> Any:
    from tvm import te, tirx

    found = _source(bb, call.args[0], before)
    if found is None or call.attrs.axis is None:
        return None
    codes, scale, zero = found
    shape, result = static_shape(codes), static_shape(call)
    if shape is None or result is None:
        return None
    axes = sorted(int(a) % len(shape) for a in call.attrs.axis)
    count = math.prod(shape[a] for a in axes)
    if count == 0 or count > 1 << 22:
        return None
    keep = bool(call.attrs.keepdims)
    factor = scale / count if kind == "mean" else scale

    def compute(x: Any) -> Any:
        reductions = {a: te.reduce_axis((0, shape[a]), f"r{a}") for a in axes}

        def codes_of(*i: Any) -> Any:
            left = iter(i)
            index = [reductions[a] if a in reductions else next(left) for a in range(len(shape))]
            return te.sum(x[tuple(index)].astype("int32"), list(reductions.values()))

        sums = te.compute([d for a, d in enumerate(shape) if a not in axes] or [1], codes_of, name="sums")

        def value(*i: Any) -> Any:
            kept = [v for a, v in enumerate(i) if a not in axes] if keep else list(i)
            found = sums[tuple(kept or [0])] - tirx.const(zero * count, "int32")
            return found.astype("float32") * tirx.const(factor, "float32")

        return te.compute(result, value, name=kind)

    return emit(bb, compute, f"{kind}_int8", codes)


def avg_pool2d(bb: Any, call: Any, before: Callable[[Any], Any]) -> Any:
    """R.nn.avg_pool2d over NHWC of a dequantize with one scale; None for anything else."""
    from tvm import te, tirx

    found = _source(bb, call.args[0], before)
    attrs = call.attrs
    if found is None or attrs.layout != "NHWC" or str(attrs.out_layout) != "NHWC":
        return None
    codes, scale, zero = found
    shape, result = static_shape(codes), static_shape(call)
    if shape is None or result is None or any(int(d) != 1 for d in attrs.dilation):
        return None
    (kh, kw), (sh, sw) = ([int(v) for v in pair] for pair in (attrs.pool_size, attrs.strides))
    top, left, bottom, right = (int(p) for p in attrs.padding)
    _, h, w, _ = shape
    include = bool(attrs.count_include_pad)
    needed = (result[1] - 1) * sh + kh - top, (result[2] - 1) * sw + kw - left
    inner = not (top or left) and needed[0] <= h and needed[1] <= w

    def counted(start: Any, size: int, extent: int, before: int, after: int) -> Any:
        """How many rows of a window that starts at `start` count."""
        low, high = (-before, extent + after) if include else (0, extent)
        return tirx.min(start + size, high) - tirx.max(start, low)

    def compute(x: Any) -> Any:
        ry, rx = te.reduce_axis((0, kh), "ry"), te.reduce_axis((0, kw), "rx")

        def total(b: Any, i: Any, j: Any, c: Any) -> Any:
            row, column = i * sh + ry - top, j * sw + rx - left
            element = x[b, row, column, c].astype("int32") - tirx.const(zero, "int32")
            if not inner:
                inside = tirx.all(row >= 0, row < h, column >= 0, column < w)
                element = tirx.if_then_else(inside, element, tirx.const(0, "int32"))
            return te.sum(element, [ry, rx])

        sums = te.compute(result, total, name="sums")

        def value(b: Any, i: Any, j: Any, c: Any) -> Any:
            found = sums[b, i, j, c].astype("float32")
            if inner:
                return found * tirx.const(scale / (kh * kw), "float32")
            rows = counted(i * sh - top, kh, h, top, bottom)
            columns = counted(j * sw - left, kw, w, left, right)
            return found * tirx.const(scale, "float32") / (rows * columns).astype("float32")

        return te.compute(result, value, name="average")

    return emit(bb, compute, "avg_pool2d_int8", codes)


def _source(bb: Any, value: Any, before: Callable[[Any], Any]) -> tuple[Any, float, int] | None:
    """(codes, scale, zero point) where `value` dequantises 8-bit codes with one constant scale."""
    from tvm.ir import Call

    call = before(value)
    if not isinstance(call, Call) or getattr(call.op, "name", "") != "relax.dequantize":
        return None
    scale, zero = constant_of(bb, call.args[1]), constant_of(bb, call.args[2])
    if scale is None or zero is None or scale.size != 1 or zero.size != 1:
        return None
    if str(call.args[0].ty.dtype) not in BYTES or str(call.attrs.out_dtype) != "float32":
        return None
    return call.args[0], float(scale.reshape(())), int(zero.reshape(()))
