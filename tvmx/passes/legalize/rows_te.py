"""Row reductions as tensor expressions: partial results in vector lanes, whatever the row's length.

    parts[o, l] = fold over j of value(o, j * L + l)      vectors; lanes past the end of the row take the identity
    few[o, q]   = fold over the lanes l with l % 4 == q
    out[o]      = fold of the four

The bounds check is wrapped in `likely`, so that LoopPartition makes the last vector of a row its own loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

FEW = 4
LONG = 32  # rows of at least this many vectors keep two vectors of partial results: adds have a latency of four

Value = Callable[[tuple[Any, ...], Any], Any]  # (outer index, position in the row) → element


def fold(
    outer: Sequence[Any],
    length: Any,
    value: Value,
    kind: str,
    lanes: int,
    dtype: str,
    name: str,
    shape: Sequence[Any] | None = None,
) -> Any:
    """Reduce rows of `length` (an int, or symbolic) by `kind` ("sum", "max", "min").

    → tensor of shape `outer`, or of `shape` (the same with unit dims added at the end).
    """
    from tvm import te, tirx

    identity = tirx.const({"sum": 0.0, "max": float("-inf"), "min": float("inf")}[kind], dtype)
    combine = {"sum": te.sum, "max": _max, "min": _min}[kind]
    outer, rank = tuple(outer), len(outer)
    final = tuple(shape) if shape is not None else outer
    if isinstance(length, int) and length < 2 * lanes:
        k = te.reduce_axis((0, length), "k")
        return te.compute(final, lambda *i: combine(value(i[:rank], k), axis=k), name=name)
    if isinstance(length, int) and length >= LONG * lanes:
        lanes *= 2
    steps = (length + lanes - 1) // lanes
    j = te.reduce_axis((0, steps), "j")

    def part(index: tuple[Any, ...]) -> Any:
        position = j * lanes + index[-1]
        element = value(index[:-1], position)
        if isinstance(length, int) and length % lanes == 0:
            return element
        return tirx.if_then_else(tirx.likely(position < length), element, identity)

    parts = te.compute((*outer, lanes), lambda *i: combine(part(i), axis=j), name=f"{name}_parts")
    if lanes > 2 * FEW:
        q = te.reduce_axis((0, lanes // FEW), "q")
        parts, width = (
            te.compute(
                (*outer, FEW), lambda *i: combine(_at(parts, i[:-1], q * FEW + i[-1]), axis=q), name=f"{name}_few"
            ),
            FEW,
        )
    else:
        width = lanes
    last = te.reduce_axis((0, width), "l")
    few = parts
    return te.compute(final, lambda *i: combine(_at(few, i[:rank], last), axis=last), name=name)


def _at(tensor: Any, outer: Sequence[Any], inner: Any) -> Any:
    return tensor[tuple([*outer, inner])]


def _max(expr: Any, axis: Any) -> Any:
    return _reducer("max")(expr, axis=axis)


def _min(expr: Any, axis: Any) -> Any:
    return _reducer("min")(expr, axis=axis)


def _reducer(kind: str) -> Any:
    """Like te.max and te.min with infinities as identities: the largest of a row of -inf is -inf."""
    from tvm import te, tirx

    if kind == "max":
        return te.comm_reducer(lambda a, b: tirx.max(a, b), lambda t: tirx.const(float("-inf"), t), name="max")
    return te.comm_reducer(lambda a, b: tirx.min(a, b), lambda t: tirx.const(float("inf"), t), name="min")
