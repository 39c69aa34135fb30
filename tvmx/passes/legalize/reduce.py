"""Sums, means and extrema over trailing axes as row reductions that any row length vectorises.

Over other axes TVM's own lowering is as good: there the schedules vectorise over the axis that stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvmx.passes.legalize.conv import default, default_legalization
from tvmx.passes.legalize.norm import dims, reshape
from tvmx.passes.legalize.rows_te import fold
from tvmx.target import Target

COMM_REDUCE = 3  # TVM's OpPatternKind: elementwise producers join

_KINDS = {"sum": "sum", "mean": "sum", "max": "max", "min": "min"}


def legalizers(target: Target) -> dict[str, Callable[[Any, Any], Any]]:
    """Legalizations of reductions for a CPU target; none for others."""
    if target.kind != "cpu":
        return {}

    def of(name: str) -> Callable[[Any, Any], Any]:
        return lambda bb, call: reduce(bb, call, name, target)

    return {f"relax.{name}": of(name) for name in _KINDS}


def reduce(bb: Any, call: Any, name: str, target: Target) -> Any:
    """R.sum, R.mean, R.max or R.min of float32 over the last axes, static and long enough for vectors."""
    x = call.args[0]
    shape = dims(x)
    if shape is None or not shape or str(x.ty.dtype) != "float32":
        return default_legalization(bb, call)
    rank = len(shape)
    axes = range(rank) if call.attrs.axis is None else sorted({int(a) % rank for a in call.attrs.axis})
    tail, lanes = shape[rank - len(axes) :], target.lanes("float32")
    if list(axes) != list(range(rank - len(axes), rank)) or not all(isinstance(d, int) for d in tail):
        return default_legalization(bb, call)
    outer, length = shape[: rank - len(axes)], math.prod(tail)
    if length < 2 * lanes or not all(isinstance(d, int) for d in outer):
        return default_legalization(bb, call)
    result = tuple(int(d) for d in call.ty.shape)

    def compute(data: Any) -> Any:
        from tvm import te, tirx

        def element(o: tuple[Any, ...], k: Any) -> Any:
            return data[tuple([*o, k])]

        total = fold(outer, length, element, _KINDS[name], lanes, "float32", f"row_{name}", shape=result)
        if name != "mean":
            return total
        scale = tirx.const(1.0 / length, "float32")
        return te.compute(result, lambda *i: total[i] * scale, name="row_scaled")

    if len(tail) > 1:  # rows that are one range of memory: nothing is divided while they are read
        x = bb.emit(default(bb, reshape(x, (*outer, length))))
    return bb.call_te(compute, x, primfunc_name_hint=name, primfunc_attrs={"op_pattern": COMM_REDUCE})
