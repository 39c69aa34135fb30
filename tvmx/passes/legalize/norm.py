"""Softmax and layer norm over the last axis as row reductions that any row length vectorises.

Other axes keep TVM's own lowering: there the schedules vectorise over the axis that stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvmx.passes.legalize.conv import default_legalization
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


def dims(value: Any) -> tuple[Any, ...] | None:
    """Shape with ints where static; None when the rank is unknown."""
    from tvm.tirx import IntImm

    shape = getattr(value.ty, "shape", None)
    if shape is None:
        return None
    return tuple(int(d) if isinstance(d, (int, IntImm)) else d for d in shape)
