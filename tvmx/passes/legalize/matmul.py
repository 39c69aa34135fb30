"""R.matmul to tiled products: constant weights in panels packed now, dynamic operands packed in the kernel if need be.

What no case here claims (vectors, integers, symbolic n or k, one row times a dynamic matrix) keeps TVM's own
lowering, which the catch-all schedule vectorises.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmx.passes.legalize import short
from tvmx.passes.legalize.conv import constant_of, default_legalization, emit
from tvmx.passes.legalize.matmul_te import (
    LINE,
    Product,
    pack_columns,
    pack_rows,
    panels_of,
    product,
)
from tvmx.target import Target

MIN_DYNAMIC_ROWS = 4  # below this, packing B costs as much as the product
SYMBOLIC_ROWS = 64  # what an unknown number of rows is taken for


def legalizers(target: Target) -> dict[str, Callable[[Any, Any], Any]]:
    """Legalizations of matrix products for a CPU target; none for others."""
    if target.kind != "cpu":
        return {}
    return {"relax.matmul": lambda bb, call: matmul(bb, call, target)}


@dataclass(frozen=True)
class Operand:
    """A matrix operand: the tensor that is read, its dims, and whether its last two are swapped."""

    value: Any
    shape: tuple[Any, ...]
    transposed: bool

    @property
    def batch(self) -> tuple[Any, ...]:
        return self.shape[:-2]

    @property
    def rows(self) -> Any:
        return self.shape[-1] if self.transposed else self.shape[-2]

    @property
    def columns(self) -> Any:
        return self.shape[-2] if self.transposed else self.shape[-1]

    def access(self, tensor: Any, out_batch: tuple[Any, ...]) -> Callable[[Any, Any, Any], Any]:
        """Element (group, row, column) of `tensor`, the batch broadcast to `out_batch`."""

        def element(g: Any, row: Any, column: Any) -> Any:
            indices = []
            for extent, size in zip(reversed(out_batch), reversed(_aligned(self.batch, len(out_batch)))):
                if size is not None:
                    indices.append(0 if _is_one(size) else (g if len(out_batch) == 1 else g % extent))
                g = g if len(out_batch) == 1 else g // extent
            pair = (column, row) if self.transposed else (row, column)
            return tensor[tuple([*reversed(indices), *pair])]

        return element


def matmul(bb: Any, call: Any, target: Target) -> Any:
    """R.matmul(a, b) to float32 → `matmul_te.product`. A constant b may be in 16 bits."""
    if not short.is_float_product(call):
        return default_legalization(bb, call)
    a, b = operand(bb, short.widened(bb, call.args[0])), operand(bb, short.weight_of(bb, call.args[1]))
    if a is None or b is None:
        return default_legalization(bb, call)
    n, k = b.columns, a.columns
    if not isinstance(n, int) or not isinstance(k, int) or n == 0 or k == 0:
        return default_legalization(bb, call)
    out_shape = tuple(_dim(d) for d in call.ty.shape)
    if any(isinstance(d, int) and d == 0 for d in out_shape):
        return default_legalization(bb, call)
    constant = constant_of(bb, b.value)
    if math.prod(d if isinstance(d, int) else 2 for d in b.batch) == 1:
        return _shared(bb, a, b, constant, out_shape, n, k, target)
    return _batched(bb, call, a, b, out_shape, n, k, target)


def _shared(
    bb: Any, a: Operand, b: Operand, constant: Any, out_shape: tuple[Any, ...], n: int, k: int, target: Target
) -> Any:
    """One B for all of A: batch and rows are one axis."""
    rows: Any = 1
    for d in out_shape[:-1]:
        rows = rows * d
    fixed = isinstance(rows, int)
    if a.transposed and len(out_shape) > 2 and math.prod(d if isinstance(d, int) else 2 for d in a.batch) != 1:
        fixed_batch = False
    else:
        fixed_batch = True
    if not fixed_batch or (constant is None and fixed and rows < MIN_DYNAMIC_ROWS):
        return _default(bb, a, b, out_shape)
    p = _plan(1, rows, n, k, a, out_shape, target)

    def a_access(tensor: Any) -> Any:
        inner = out_shape[-2]

        def element(g: Any, m: Any, c: Any) -> Any:
            index: list[Any] = []
            rest, row = (0, m) if len(a.batch) == 0 or all(_is_one(d) for d in a.batch) else (m // inner, m % inner)
            for extent in reversed(a.batch):
                index.append(0 if _is_one(extent) else rest % extent)
                rest = rest // extent
            pair = (c, row) if a.transposed else (row, c)
            return tensor[tuple([*reversed(index), *pair])]

        return element

    if constant is not None:
        from tvm import relax

        matrix = constant.reshape(constant.shape[-2:])
        packed = relax.const(pack_array(matrix.T if b.transposed else matrix, p))

        def with_panels(x: Any, w: Any) -> Any:
            left = pack_rows(a_access(x), p, "float32") if p.pack_a else a_access(x)
            return product(left, panels_of(w, p), p)

        return emit(bb, with_panels, "matmul", a.value, packed)

    def dynamic(x: Any, y: Any) -> Any:
        left = pack_rows(a_access(x), p, "float32") if p.pack_a else a_access(x)
        right = b.access(y, (1,) * len(b.batch))
        if _must_pack(b, p, target):
            right = pack_columns(right, p, "float32", 1)
        return product(left, right, p)

    return emit(bb, dynamic, "matmul", a.value, b.value)


def _batched(
    bb: Any, call: Any, a: Operand, b: Operand, out_shape: tuple[Any, ...], n: int, k: int, target: Target
) -> Any:
    """A product per group."""
    m = out_shape[-2]
    if isinstance(m, int) and m < MIN_DYNAMIC_ROWS:
        return _default(bb, a, b, out_shape)
    groups: Any = 1
    for d in out_shape[:-2]:
        groups = groups * d
    p = _plan(groups, m, n, k, a, out_shape, target)

    def compute(x: Any, y: Any) -> Any:
        left, right = a.access(x, out_shape[:-2]), b.access(y, out_shape[:-2])
        if p.pack_a:
            left = pack_rows(left, p, "float32")
        if _must_pack(b, p, target):
            right = pack_columns(right, p, "float32", groups)
        return product(left, right, p)

    return emit(bb, compute, "batch_matmul", a.value, b.value)


def _plan(groups: Any, m: Any, n: int, k: int, a: Operand, out_shape: tuple[Any, ...], target: Target) -> Product:
    from tvmx.passes.legalize.conv_model import register_tile

    tile = register_tile(m if isinstance(m, int) else SYMBOLIC_ROWS, n, k, target, rounding=True)
    ragged = not isinstance(m, int) or m % tile.rows != 0
    conflict = (k * 4) % 2048 == 0 and k >= 512 and tile.rows >= 8  # rows of a tile fall into one or two cache sets
    pack = tile.rows > 1 and (ragged or conflict or a.transposed)
    if not pack and ragged:
        pack = True
    return Product(groups, m, n, k, tile.rows, tile.panel, pack, out_shape, "float32")


def _must_pack(b: Operand, p: Product, target: Target) -> bool:
    """Can B's rows not be read in place, panel by panel?"""
    far = p.n * p.k * 4 > target.l2_bytes // 2  # a panel's rows lie a page apart: TLB misses
    return b.transposed or p.n % p.panel != 0 or p.padded_k != p.k or far


def pack_array(matrix: Any, p: Product) -> Any:
    """[k, n] → [1, panels, padded k, panel], zeros past n and k."""
    wide = np.zeros((p.padded_k, p.panels * p.panel), matrix.dtype)
    wide[: p.k, : p.n] = matrix
    panels = wide.reshape(p.padded_k, p.panels, p.panel).transpose(1, 0, 2)
    return np.ascontiguousarray(panels)[None]


def operand(bb: Any, value: Any) -> Operand | None:
    """Look through a swap of the last two dims; None for a vector or an unknown rank."""
    from tvm import relax
    from tvm.ir import Call

    transposed = False
    bound = bb.lookup_binding(value) if isinstance(value, relax.Var) else None
    if isinstance(bound, Call) and getattr(bound.op, "name", "") == "relax.permute_dims":
        rank = len(bound.args[0].ty.shape)
        axes = [int(i) for i in bound.attrs.axes] if bound.attrs.axes is not None else list(range(rank))[::-1]
        if axes == [*range(rank - 2), rank - 1, rank - 2]:
            value, transposed = bound.args[0], True
    shape = getattr(value.ty, "shape", None)
    if shape is None or len(shape) < 2:
        return None
    return Operand(value, tuple(_dim(d) for d in shape), transposed)


def _default(bb: Any, a: Operand, b: Operand, out_shape: tuple[Any, ...]) -> Any:
    """The plain definition, for the catch-all schedule."""
    from tvm import te

    def compute(x: Any, y: Any) -> Any:
        k = te.reduce_axis((0, a.columns), "k")
        rank = len(out_shape) - 2

        def at(tensor: Any, o: Operand, batch: tuple[Any, ...], row: Any, column: Any) -> Any:
            own = batch[rank - len(o.batch) :]
            index = [0 if _is_one(d) else i for i, d in zip(own, o.batch)]
            pair = (column, row) if o.transposed else (row, column)
            return tensor[tuple([*index, *pair])]

        return te.compute(
            out_shape,
            lambda *i: te.sum(at(x, a, i[:-2], i[-2], k) * at(y, b, i[:-2], k, i[-1]).astype("float32"), axis=k),
            name="matmul",
        )

    return emit(bb, compute, "matmul_small", a.value, b.value)


def _aligned(batch: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    return (None,) * (rank - len(batch)) + batch


def _is_one(extent: Any) -> bool:
    return isinstance(extent, int) and extent == 1


def _dim(extent: Any) -> Any:
    from tvm.tirx import IntImm

    return int(extent) if isinstance(extent, (int, IntImm)) else extent


__all__ = ["LINE", "legalizers", "matmul", "operand", "pack_array"]
