"""Tensor expressions of GEMM and implicit-GEMM convolution for Tensor Cores.

Every product has the same form, padded to whole tiles, so that one schedule serves them all:

    load_a[g, m, k]   the operand, zero outside its range; for a convolution, element k of the window at position m
    load_b[g, n, k]   (or [g, k, n]) likewise; constant weights are packed and padded already
    gemm[g, m, n]     = Σ_k load_a · load_b in the accumulator's dtype, annotated `tvmx.op` = "cuda.gemm"
    unpack            gemm's valid part in the output's own shape and dtype

k is indexed as (k // vector, k % vector): predicates then depend on k // vector alone, and a vectorised load keeps
one predicate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvmx.passes.legalize.conv_te import Window
from tvmx.passes.legalize.gemm_model import Tile
from tvmx.schedule.workload import OP_ANNOTATION

OP = "cuda.gemm"

Access = Callable[[Any, Any, Any], tuple[list[Any], Any]]
"""(group, row, column) → (conditions under which the element exists, the element)."""


@dataclass(frozen=True)
class Gemm:
    """`vector` elements of a row of A (and of B) lie together and exist together; `accumulate` is gemm's dtype."""

    groups: int
    m: Any  # an expression where the number of rows is symbolic
    n: int
    k: int
    tile: Tile
    accumulate: str
    vector_a: int
    vector_b: int
    grouped: bool = False  # the output has an axis for the groups beside its columns
    transposed: bool = True  # B is [n, k]: both operands then have k contiguous

    @property
    def padded(self) -> tuple[Any, int, int]:
        """(m, n, k) as whole tiles."""
        t = self.tile
        return _up(self.m, t.tm), _up(self.n, t.tn), _up(self.k, t.tk)


def product(a: Access, b: Access, dtype: str, shared_b: bool, p: Gemm, fill: int = 0, shift: int = 0) -> Any:
    """gemm[g, m, n], padded. `shared_b`: one B for all groups.

    `fill` stands for elements of A that do not exist; `shift` is taken off A's elements (uint8 data as int8).
    """
    from tvm import te

    m, n, k = p.padded
    load_a = _load(a, (p.groups, m, k), dtype, "load_a", fill, shift)
    shape = (1 if shared_b else p.groups, n, k) if p.transposed else (1 if shared_b else p.groups, k, n)
    load_b = _load(b, shape, dtype, "load_b")
    axis = te.reduce_axis((0, k), "k")

    def element(g: Any, i: Any, j: Any) -> Any:
        h = 0 if shared_b else g
        right = load_b[h, j, axis] if p.transposed else load_b[h, axis, j]
        return te.sum(load_a[g, i, axis].astype(p.accumulate) * right.astype(p.accumulate), axis=axis)

    tile = p.tile
    notes = {
        OP_ANNOTATION: OP,
        "tvmx.tile": [tile.tm, tile.tn, tile.tk, tile.wm, tile.wn, tile.stages],
        "tvmx.vectors": [p.vector_a, p.vector_b],
        "tvmx.transposed": int(p.transposed),
        "tvmx.grouped": int(p.grouped),
        "tvmx.size": [p.groups, p.m if isinstance(p.m, int) else 0, p.n, p.k],  # 0: symbolic
    }
    return te.compute((p.groups, m, n), element, name="gemm", attrs=notes)


Finish = Callable[..., Any]
"""(sum, *index in the output) → the sum with a correction."""


def unpack(c: Any, shape: Sequence[int], p: Gemm, dtype: str, finish: Finish = lambda v, *_: v) -> Any:
    """The valid part of gemm[g, m, n] as `shape` (..., rows, n), or (..., groups, n) of a grouped convolution."""
    from tvm import te

    def element(*index: Any) -> Any:
        *lead, column = index
        if p.grouped:
            value = c[lead[-1], _linear(lead[:-1], shape[:-2]), column]
        elif p.groups == 1:
            value = c[0, _linear(lead, shape[:-1]), column]
        else:
            value = c[_linear(lead[:-1], shape[:-2]), lead[-1], column]
        return finish(value, *index).astype(dtype)

    return te.compute(tuple(shape), element, name="unpack")


def _load(access: Access, shape: tuple[int, int, int], dtype: str, name: str, fill: int = 0, shift: int = 0) -> Any:
    from tvm import te, tirx

    def element(g: Any, i: Any, j: Any) -> Any:
        conditions, value = access(g, i, j)
        if shift:
            value = (value.astype("int32") - shift).astype(dtype)
        if not conditions:
            return value
        return tirx.if_then_else(tirx.all(*conditions), value, tirx.const(fill - shift, dtype))

    return te.compute(shape, element, name=name)


def window_rows(x: Any, window: Window, groups: int, p_rows: int, vector: int) -> Access:
    """Rows of the implicit matrix of a convolution: x[N, H, W, C], column k = (kh, kw, channel of the group).

    `p_rows` is the padded number of rows; the caller guards k.
    """
    h, w, c = (int(d) for d in x.shape[1:])
    n = int(x.shape[0]) if hasattr(x.shape[0], "value") or isinstance(x.shape[0], int) else x.shape[0]
    oh, ow = window.output(h, w)
    kh, kw = window.kernel
    top, left = window.pads[:2]
    (sh, sw), (dh, dw) = window.strides, window.dilation
    depth = c // groups
    chunks = depth // vector

    def access(g: Any, m: Any, k: Any) -> tuple[list[Any], Any]:
        chunk, lane = k // vector, k % vector
        tap = chunk // chunks
        channel = (chunk % chunks) * vector + lane
        image, row, column = m // (oh * ow), m % (oh * ow) // ow, m % ow
        y = row * sh + (tap // kw) * dh - top
        z = column * sw + (tap % kw) * dw - left
        conditions = []
        if not isinstance(n, int) or p_rows != n * oh * ow:
            conditions.append(m < n * oh * ow)
        if top > 0:
            conditions.append(y >= 0)
        if (oh - 1) * sh + (kh - 1) * dh - top >= h:
            conditions.append(y < h)
        if left > 0:
            conditions.append(z >= 0)
        if (ow - 1) * sw + (kw - 1) * dw - left >= w:
            conditions.append(z < w)
        return conditions, x[image, y, z, g * depth + channel if groups > 1 else channel]

    return access


def packed(weight: Any) -> Access:
    """A weight that is packed and padded already: [g, n, k]."""
    return lambda g, i, j: ([], weight[g, i, j])


def sum_parts(parts: Any, shape: Sequence[int], dtype: str, finish: Finish = lambda v, *_: v) -> Any:
    """[splits, m, n] partial products → their sum as `shape`, the last axis n."""
    from tvm import te

    splits = int(parts.shape[0])

    def total(*index: Any) -> Any:
        *lead, column = index
        row = _linear(lead, shape[:-1])
        value = parts[0, row, column]
        for s in range(1, splits):
            value = value + parts[s, row, column]
        return finish(value, *index).astype(dtype)

    return te.compute(tuple(shape), total, name="sum_parts")


def _up(size: Any, step: int) -> Any:
    return (size + (step - 1)) // step * step


def is_int(value: Any, number: int) -> bool:
    """Is `value` this very number, and no expression?"""
    return isinstance(value, int) and value == number


def _linear(index: Sequence[Any], extents: Sequence[int]) -> Any:
    """Row-major position; an axis of extent 1 has no part in it, and schedules need not see through it."""
    value: Any = None
    for i, e in zip(index, extents):
        if not is_int(e, 1):
            value = i if value is None else value * e + i
    return 0 if value is None else value


def vector_of(*extents: int, element: int) -> int:
    """The most elements, 16 bytes at most, that divide every one of `extents`."""
    lanes = 16 // element
    while lanes > 1 and any(e % lanes for e in extents):
        lanes //= 2
    return lanes
