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

import math
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
    m: int
    n: int
    k: int
    tile: Tile
    accumulate: str
    vector_a: int
    vector_b: int
    transposed: bool = True  # B is [n, k]: both operands then have k contiguous

    @property
    def padded(self) -> tuple[int, int, int]:
        """(m, n, k) as whole tiles."""
        return tuple(-(-s // t) * t for s, t in zip((self.m, self.n, self.k), (self.tile.tm, self.tile.tn, self.tile.tk)))  # type: ignore[return-value]  # fmt: skip


def product(a: Access, b: Access, dtype: str, shared_b: bool, p: Gemm) -> Any:
    """gemm[g, m, n], padded. `shared_b`: one B for all groups."""
    from tvm import te

    m, n, k = p.padded
    load_a = _load(a, (p.groups, m, k), dtype, "load_a")
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
        "tvmx.size": [p.groups, p.m, p.n, p.k],
    }
    return te.compute((p.groups, m, n), element, name="gemm", attrs=notes)


def unpack(c: Any, shape: Sequence[int], p: Gemm, dtype: str, rows_of_groups: bool = False) -> Any:
    """The valid part of gemm[g, m, n] as `shape` (..., rows, n); `rows_of_groups`: the last group axis is part of n."""
    from tvm import te

    def element(*index: Any) -> Any:
        *lead, column = index
        if rows_of_groups:
            return c[column // p.n, _linear(lead, shape[:-1]), column % p.n].astype(dtype)
        if p.groups == 1:
            return c[0, _linear(lead, shape[:-1]), column].astype(dtype)
        return c[_linear(lead[:-1], shape[:-2]), lead[-1], column].astype(dtype)

    return te.compute(tuple(shape), element, name="unpack")


def _load(access: Access, shape: tuple[int, int, int], dtype: str, name: str) -> Any:
    from tvm import te, tirx

    def element(g: Any, i: Any, j: Any) -> Any:
        conditions, value = access(g, i, j)
        if not conditions:
            return value
        return tirx.if_then_else(tirx.all(*conditions), value, tirx.const(0, dtype))

    return te.compute(shape, element, name=name)


def matrix(
    tensor: Any, rows: int, columns: int, padded: tuple[int, int], vector: int, index: Callable[[Any, Any, Any], Any]
) -> Access:
    """Access of a plain matrix; `index(g, row, column)` gives the tensor's index."""

    def access(g: Any, i: Any, j: Any) -> tuple[list[Any], Any]:
        conditions = []
        if padded[0] != rows:
            conditions.append(i < rows)
        if padded[1] != columns:
            conditions.append(j // vector < columns // vector)
        return conditions, tensor[tuple(index(g, i, j))]

    return access


def window_rows(x: Any, window: Window, groups: int, p_rows: int, p_k: int, vector: int) -> Access:
    """Rows of the implicit matrix of a convolution: x[N, H, W, C], column k = (kh, kw, channel of the group)."""
    n, h, w, c = (int(d) for d in x.shape)
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
        if p_rows != n * oh * ow:
            conditions.append(m < n * oh * ow)
        if p_k != kh * kw * depth:
            conditions.append(chunk < kh * kw * chunks)
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


def sum_parts(parts: Any, shape: Sequence[int], m: int, n: int, dtype: str) -> Any:
    """[splits, m, n] partial products → their sum as `shape`, the last axis n."""
    from tvm import te

    splits = int(parts.shape[0])

    def total(*index: Any) -> Any:
        *lead, column = index
        row = _linear(lead, shape[:-1])
        value = parts[0, row, column]
        for s in range(1, splits):
            value = value + parts[s, row, column]
        return value.astype(dtype)

    return te.compute(tuple(shape), total, name="sum_parts")


def _linear(index: Sequence[Any], extents: Sequence[int]) -> Any:
    """Row-major position; an axis of extent 1 has no part in it, and schedules need not see through it."""
    value: Any = None
    for i, e in zip(index, extents):
        if e != 1:
            value = i if value is None else value * e + i
    return 0 if value is None else value


def vector_of(*extents: int, element: int) -> int:
    """The most elements, 16 bytes at most, that divide every one of `extents`."""
    lanes = 16 // element
    while lanes > 1 and any(e % lanes for e in extents):
        lanes //= 2
    return lanes


