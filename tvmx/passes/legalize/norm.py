"""Softmax, layer, RMS, instance and group norm as row reductions that any row length vectorises.

Variances are taken in a second pass over the data: a mean of squares less a squared mean cancels far from zero.
Softmax and layer norm over other axes than the last keep TVM's own lowering: there the schedules vectorise over the
axis that stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvmx.passes.legalize.conv import default, default_legalization
from tvmx.passes.legalize.rows_te import fold
from tvmx.target import Target


def legalizers(target: Target) -> dict[str, Callable[[Any, Any], Any]]:
    """Legalizations of row normalisations for a CPU target; none for others."""
    if target.kind != "cpu":
        return {}
    return {
        "relax.nn.softmax": lambda bb, call: softmax(bb, call, target, log=False),
        "relax.nn.log_softmax": lambda bb, call: softmax(bb, call, target, log=True),
        "relax.nn.layer_norm": lambda bb, call: layer_norm(bb, call, target),
        "relax.nn.rms_norm": lambda bb, call: rms_norm(bb, call, target),
        "relax.nn.instance_norm": lambda bb, call: channel_norm(bb, call, target, groups=None),
        "relax.nn.group_norm": lambda bb, call: channel_norm(bb, call, target, groups=int(call.attrs.num_groups)),
    }


def softmax(bb: Any, call: Any, target: Target, log: bool) -> Any:
    """exp(x - max) / sum(exp(x - max)), or its logarithm."""
    x = call.args[0]
    shape = dims(x)
    if (
        shape is None
        or not shape
        or str(x.ty.dtype) != "float32"
        or int(call.attrs.axis) % len(shape) != len(shape) - 1
    ):
        return default_legalization(bb, call)

    def compute(data: Any) -> Any:
        from tvm import te, tirx

        outer, length, lanes = shape[:-1], shape[-1], target.lanes("float32")
        largest = fold(outer, length, lambda o, k: data[tuple([*o, k])], "max", lanes, "float32", "row_max")
        if log:
            total = fold(
                outer,
                length,
                lambda o, k: tirx.exp(data[tuple([*o, k])] - largest[o]),
                "sum",
                lanes,
                "float32",
                "row_sum",
            )
            shift = te.compute(outer, lambda *o: largest[o] + tirx.log(total[o]), name="row_shift")
            return te.compute(shape, lambda *i: data[i] - shift[i[:-1]], name="log_softmax")
        powers = te.compute(shape, lambda *i: tirx.exp(data[i] - largest[i[:-1]]), name="exp")
        total = fold(outer, length, lambda o, k: powers[tuple([*o, k])], "sum", lanes, "float32", "row_sum")
        scale = te.compute(outer, lambda *o: tirx.const(1.0, "float32") / total[o], name="row_scale")
        return te.compute(shape, lambda *i: powers[i] * scale[i[:-1]], name="softmax")

    return bb.call_te(compute, x, primfunc_name_hint="log_softmax" if log else "softmax")


def layer_norm(bb: Any, call: Any, target: Target) -> Any:
    """(x - mean) / sqrt(var + eps) * gamma + beta over the last axis."""
    x, gamma, beta = call.args
    attrs = call.attrs
    shape = dims(x)
    if shape is None or str(x.ty.dtype) != "float32" or [int(a) % len(shape) for a in attrs.axes] != [len(shape) - 1]:
        return default_legalization(bb, call)

    def compute(data: Any, g: Any, b: Any) -> Any:
        from tvm import te, tirx

        outer, length, lanes = shape[:-1], shape[-1], target.lanes("float32")
        inverse = tirx.const(1.0, "float32") / tirx.Cast("float32", tirx.convert(length))
        if isinstance(length, int):
            inverse = tirx.const(1.0 / length, "float32")
        total = fold(outer, length, lambda o, k: data[tuple([*o, k])], "sum", lanes, "float32", "row_sum")
        mean = te.compute(outer, lambda *o: total[o] * inverse, name="mean")

        def square(o: tuple[Any, ...], k: Any) -> Any:
            d = data[tuple([*o, k])] - mean[o]
            return d * d

        squares = fold(outer, length, square, "sum", lanes, "float32", "row_squares")
        epsilon = tirx.const(float(attrs.epsilon), "float32")
        one = tirx.const(1.0, "float32")
        scale = te.compute(outer, lambda *o: one / tirx.sqrt(squares[o] * inverse + epsilon), name="row_scale")

        def normal(*i: Any) -> Any:
            value = (data[i] - mean[i[:-1]]) * scale[i[:-1]]
            value = value * g[i[-1]] if attrs.scale else value
            return value + b[i[-1]] if attrs.center else value

        return te.compute(shape, normal, name="layer_norm")

    return bb.call_te(compute, x, gamma, beta, primfunc_name_hint="layer_norm")


def rms_norm(bb: Any, call: Any, target: Target) -> Any:
    """x / sqrt(mean(x²) + eps) * weight over the last axis."""
    x, weight = call.args
    attrs = call.attrs
    shape = dims(x)
    if shape is None or str(x.ty.dtype) != "float32" or [int(a) % len(shape) for a in attrs.axes] != [len(shape) - 1]:
        return default_legalization(bb, call)

    def compute(data: Any, w: Any) -> Any:
        from tvm import te, tirx

        outer, length, lanes = shape[:-1], shape[-1], target.lanes("float32")
        squares = fold(
            outer,
            length,
            lambda o, k: data[tuple([*o, k])] * data[tuple([*o, k])],
            "sum",
            lanes,
            "float32",
            "row_squares",
        )
        one, epsilon = tirx.const(1.0, "float32"), tirx.const(float(attrs.epsilon), "float32")
        scale = te.compute(
            outer, lambda *o: one / tirx.sqrt(squares[o] / tirx.Cast("float32", length) + epsilon), name="row_scale"
        )
        return te.compute(shape, lambda *i: data[i] * scale[i[:-1]] * w[i[-1]], name="rms_norm")

    return bb.call_te(compute, x, weight, primfunc_name_hint="rms_norm")


def channel_norm(bb: Any, call: Any, target: Target, groups: int | None) -> Any:
    """Instance norm (`groups` None: one channel a group) or group norm, channels before or after the other axes.

    Sums are taken per channel, whichever axis is contiguous, and then joined per group.
    """
    x, gamma, beta = call.args
    attrs = call.attrs
    shape = dims(x)
    if shape is None or str(x.ty.dtype) != "float32" or not all(isinstance(d, int) for d in shape):
        return default_legalization(bb, call)
    rank = len(shape)
    channel = int(attrs.channel_axis) % rank
    axes = sorted(int(a) % rank for a in attrs.axes)
    kept = [a for a in range(rank) if a not in axes]
    adjacent = axes == list(range(axes[0], axes[0] + len(axes))) if axes else False
    if len(kept) != 2 or kept[-1] != channel or not adjacent or 0 in shape:
        return default_legalization(bb, call)
    batch, channels = shape[kept[0]], shape[channel]
    length = math.prod(shape[a] for a in axes)
    last = channel > axes[-1]
    members = 1 if groups is None else channels // groups
    flat = (batch, length, channels) if last else (batch, channels, length)
    affine = (groups is None or bool(attrs.scale), groups is None or bool(attrs.center))

    def compute(data: Any, g: Any, b: Any) -> Any:
        return _channel_norm_te(data, g, b, members, float(attrs.epsilon), last, affine, target)

    source = bb.emit(default(bb, reshape(x, flat))) if len(axes) > 1 else x
    normal = bb.call_te(compute, source, gamma, beta, primfunc_name_hint="group_norm" if groups else "instance_norm")
    return default(bb, reshape(bb.emit(normal), shape)) if len(axes) > 1 else normal


def _channel_norm_te(
    data: Any,
    gamma: Any,
    beta: Any,
    members: int,
    epsilon: float,
    last: bool,
    affine: tuple[bool, bool],
    target: Target,
) -> Any:
    """data[N, L, C] (`last`) or [N, C, L], `members` channels a group."""
    from tvm import te, tirx

    shape = tuple(int(d) for d in data.shape)
    batch, channels, length = (shape[0], shape[2], shape[1]) if last else shape
    groups, inverse = channels // members, tirx.const(1.0 / (length * members), "float32")

    def at(n: Any, c: Any, k: Any) -> Any:
        return data[n, k, c] if last else data[n, c, k]

    def total(value: Callable[[Any, Any, Any], Any], name: str) -> Any:
        """Σ over a channel's elements, then over the group's channels: [N, G]"""
        if last:
            k = te.reduce_axis((0, length), "k")
            sums = te.compute((batch, channels), lambda n, c: te.sum(value(n, c, k), axis=k), name=name)
        else:
            sums = fold(
                (batch, channels),
                length,
                lambda o, k: value(o[0], o[1], k),
                "sum",
                target.lanes("float32"),
                "float32",
                name,
            )
        if members == 1:
            return sums
        m = te.reduce_axis((0, members), "m")
        return te.compute((batch, groups), lambda n, g: te.sum(sums[n, g * members + m], axis=m), name=f"{name}_group")

    sums = total(at, "row_sum")
    mean = te.compute((batch, groups), lambda n, g: sums[n, g] * inverse, name="mean")

    def square(n: Any, c: Any, k: Any) -> Any:
        d = at(n, c, k) - mean[n, c // members]
        return d * d

    squares = total(square, "row_squares")
    one, tiny = tirx.const(1.0, "float32"), tirx.const(epsilon, "float32")
    scale = te.compute(
        (batch, groups), lambda n, g: one / tirx.sqrt(squares[n, g] * inverse + tiny), name="group_scale"
    )

    def normal(*i: Any) -> Any:
        n, c = i[0], i[2] if last else i[1]
        value = (data[i] - mean[n, c // members]) * scale[n, c // members]
        value = value * gamma[c] if affine[0] else value
        return value + beta[c] if affine[1] else value

    return te.compute(shape, normal, name="channel_norm")


def reshape(x: Any, shape: tuple[Any, ...]) -> Any:
    """R.reshape; RewriteDataflowReshape makes its lowering a view again."""
    from tvm import relax

    return relax.op.reshape(x, shape)


def dims(value: Any) -> tuple[Any, ...] | None:
    """Shape with ints where static; None when the rank is unknown."""
    from tvm.tirx import IntImm

    shape = getattr(value.ty, "shape", None)
    if shape is None:
        return None
    return tuple(int(d) if isinstance(d, (int, IntImm)) else d for d in shape)
