"""Reductions over axes, all of them in the same shape: prepare, reduce, finish."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import te, tirx
from tvm.relax import op as R

from tvmx.frontend import kernels
from tvmx.frontend.node import Expr, Node, converter, dtype_of
from tvmx.frontend.ops_elementwise import is_float
from tvmx.frontend.ops_shape import cast, reshape

# Value of a reduction over nothing.
_EMPTY = {
    "ReduceSum": 0.0, "ReduceSumSquare": 0.0, "ReduceL1": 0.0, "ReduceL2": 0.0, "ReduceProd": 1.0,
    "ReduceLogSum": -math.inf, "ReduceLogSumExp": -math.inf, "ReduceMean": math.nan,
    "ReduceMax": -math.inf, "ReduceMin": math.inf,
}  # fmt: skip


def _axes(node: Node, rank: int) -> list[int] | None:
    """Sorted axes, or None when the node reduces nothing (noop_with_empty_axes)."""
    if node.has(1):
        axes = node.known_ints(1, "axes")
    else:
        axes = list(node.attr("axes", []))
    if not axes:
        if node.attr("noop_with_empty_axes", 0):
            return None
        axes = list(range(rank))
    return sorted({node.axis(a, rank) for a in axes})


@converter(*_EMPTY)
def reduce(node: Node) -> Expr:
    x = node[0]
    dims = node.shape(0)
    dtype = dtype_of(x)
    axes = _axes(node, len(dims))
    keep = bool(node.attr("keepdims", 1))
    kind = node.op.removeprefix("Reduce")
    if axes is None or not dims:
        return _finish(node, _prepare(node, x, kind), kind, dtype) if dims or axes else x
    out = [1 if i in axes else d for i, d in enumerate(dims)]
    if not keep:
        out = [d for i, d in enumerate(dims) if i not in axes]
    if any(isinstance(dims[a], int) and dims[a] == 0 for a in axes):
        return node.const(np.full(out, _empty(kind, dtype)), dtype)
    if kind in ("Max", "Min") and dtype == "bool":
        small = cast(node, x, "int8")
        fn = R.max if kind == "Max" else R.min
        return cast(node, node.emit(fn(small, axes, keep)), "bool")
    if dtype in ("float16", "bfloat16") and kind in ("Max", "Min"):
        return cast(node, _extreme(node, cast(node, x, "float32"), axes, out), dtype)
    if kind == "LogSumExp":
        return _log_sum_exp(node, x, axes, keep)
    wide = x
    if dtype in ("float16", "bfloat16"):
        wide = cast(node, x, "float32")
    if kind == "Mean" and not is_float(dtype):
        return _integer_mean(node, x, axes, out)
    if kind in ("Max", "Min"):
        return _extreme(node, x, axes, out)
    fns: dict[str, Any] = {"Prod": R.prod, "Mean": R.mean}
    y = node.emit(fns.get(kind, R.sum)(_prepare(node, wide, kind), axes, keep))
    return cast(node, _finish(node, y, kind, dtype_of(wide)), dtype)


def _prepare(node: Node, x: Expr, kind: str) -> Expr:
    if kind == "L1":
        return node.emit(R.abs(x))
    if kind in ("L2", "SumSquare"):
        return node.emit(R.multiply(x, x))
    if kind == "LogSumExp":
        return node.emit(R.exp(x))
    return x


def _finish(node: Node, y: Expr, kind: str, dtype: str) -> Expr:
    if kind not in ("L2", "LogSum", "LogSumExp"):
        return y
    fn = R.sqrt if kind == "L2" else R.log
    if is_float(dtype):
        return node.emit(fn(y))
    return cast(node, node.emit(fn(cast(node, y, "float64"))), dtype)


def _empty(kind: str, dtype: str) -> Any:
    value = _EMPTY[f"Reduce{kind}"]
    if is_float(dtype) or math.isfinite(value):
        return value
    if dtype == "bool":
        return kind == "Min"
    info = np.iinfo(dtype)
    return info.max if value > 0 else info.min


def _log_sum_exp(node: Node, x: Expr, axes: list[int], keep: bool) -> Expr:
    """log(sum(exp(x - max))) + max, so that large values do not overflow."""
    dtype = dtype_of(x)
    wide = cast(node, x, dtype if dtype in ("float32", "float64") else "float32")
    top = node.emit(R.max(wide, axes, keepdims=True))
    # A row of -inf alone (or with +inf) must not become inf - inf.
    finite = node.emit(R.where(
        node.emit(R.equal(node.emit(R.abs(top)), node.const(math.inf, dtype_of(wide)))),
        node.const(0, dtype_of(wide)), top,
    ))  # fmt: skip
    total = node.emit(R.sum(node.emit(R.exp(node.emit(R.subtract(wide, finite)))), axes, keepdims=True))
    y = node.emit(R.add(node.emit(R.log(total)), finite))
    if not keep:
        y = reshape(node, y, [d for i, d in enumerate(node.dims(x)) if i not in axes])
    return cast(node, y, dtype)


COLUMNS = (64, 32, 16)  # accumulators of a whole tensor's extremum, in vector lanes


def _extreme(node: Node, x: Expr, axes: list[int], out: list[Any]) -> Expr:
    """Largest or smallest element, infinities included. Of a whole tensor: of its columns as a matrix first."""
    dims = node.dims(x)
    if len(axes) == len(dims) and all(isinstance(d, int) for d in dims):
        size = math.prod(dims)
        columns = next((c for c in COLUMNS if size % c == 0 and size >= 2 * c), None)
        if columns is not None:
            x = _extreme_over(node, reshape(node, x, [size // columns, columns]), [0])
            axes = [0]
    return reshape(node, _extreme_over(node, x, axes), out)


def _extreme_over(node: Node, x: Expr, axes: list[int]) -> Expr:
    """Over `axes`, which the result lacks (all: [1])."""
    reducer = kernels.maximum if node.op == "ReduceMax" else kernels.minimum

    def kernel(t: Any) -> Any:
        loops = {a: te.reduce_axis((0, t.shape[a]), f"k{a}") for a in axes}
        rest = [d for i, d in enumerate(t.shape) if i not in axes] or [1]

        def at(*i: Any) -> Any:
            free = iter(i)
            where = [loops[a] if a in loops else next(free) for a in range(len(t.shape))]
            return reducer(t(*where), axis=list(loops.values()))

        return te.compute(rest, at, name="extreme")

    return node.te(kernel, x)


def _integer_mean(node: Node, x: Expr, axes: list[int], out: list[Any]) -> Expr:
    """Mean of integers, truncated towards zero."""

    def kernel(t: Any) -> Any:
        loops = {a: te.reduce_axis((0, t.shape[a]), f"k{a}") for a in axes}
        rest = [d for i, d in enumerate(t.shape) if i not in axes] or [1]
        count: Any = 1
        for a in axes:
            count = count * t.shape[a]

        def at(*i: Any) -> Any:
            free = iter(i)
            return te.sum(
                t(*(loops[a] if a in loops else next(free) for a in range(len(t.shape)))).astype("int64"),
                axis=list(loops.values()),
            )

        sums = te.compute(rest, at, name="sum")
        return te.compute(
            rest,
            lambda *i: tirx.truncdiv(sums(*i), tirx.Cast("int64", count)).astype(t.dtype),
            name="mean",
        )

    return reshape(node, node.te(kernel, x), out)
