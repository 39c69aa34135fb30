"""Tensor expressions of matrix products: register tiles over a packed or row-major right operand.

    C[g, m, j] = sum_k A[g, m, k] B[g, k, j]        anchor, m and j padded to whole tiles, carries `tvmx.op`
    D[..., m, n] = C[g, m, n]                       the output's own shape; epilogues join here

Blocks `pack_a` and `pack_b` exist only where the operand cannot be read in place (see `Product`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvmx.schedule.workload import OP_ANNOTATION

LINE = 16  # elements of k that a packed row of A holds together

Access = Callable[[Any, Any, Any], Any]  # (group, row, column) → element


@dataclass(frozen=True)
class Product:
    """`groups` products of m × k by k × n, computed in tiles of `rows` × `panel`.

    m, groups may be symbolic expressions; n and k are ints. `shared_b`: one B serves all groups.
    """

    groups: Any
    m: Any
    n: int
    k: int
    rows: int
    panel: int
    pack_a: bool
    out_shape: tuple[Any, ...]
    out_dtype: str

    @property
    def panels(self) -> int:
        return math.ceil(self.n / self.panel)

    @property
    def padded_m(self) -> Any:
        return (self.m + self.rows - 1) // self.rows * self.rows

    @property
    def padded_k(self) -> int:
        """Whole lines where A is packed; only there may B have more rows than k."""
        return math.ceil(self.k / LINE) * LINE if self.pack_a else self.k


def product(a: Access, b: Access, p: Product) -> Any:
    """The blocks from (packed) operands to the output; `b(g, k, j)` is defined up to `padded_k`, `panels` × `panel`."""
    from tvm import te

    k = te.reduce_axis((0, p.padded_k), "k")
    c = te.compute(
        (p.groups, p.padded_m, p.panels * p.panel),
        lambda g, m, j: te.sum(a(g, m, k).astype(p.out_dtype) * b(g, k, j).astype(p.out_dtype), axis=k),
        name="matmul",
        attrs={OP_ANNOTATION: "matmul", "tvmx.tile": [p.rows, p.panel]},
    )
    return te.compute(p.out_shape, lambda *i: c[tuple([*row_of(i[:-1], p), i[-1]])], name="unpack")


def row_of(index: tuple[Any, ...], p: Product) -> tuple[Any, Any]:
    """(group, row) of an output position without its column."""
    *batch, row = index
    flat: Any = 0
    for i, extent in zip(batch, p.out_shape[: len(batch)]):
        if not (isinstance(extent, int) and extent == 1):  # `i * 1 + row` hides from TVM that rows are rows
            flat = flat * extent + i
    if isinstance(p.groups, int) and p.groups == 1:
        return 0, row if isinstance(flat, int) else flat * p.out_shape[len(batch)] + row
    return flat, row


def pack_rows(a: Access, p: Product, dtype: str) -> Access:
    """A in tiles of `rows` × LINE: no two rows of a tile share a cache set, rows past m and columns past k are 0."""
    from tvm import te, tirx

    def value(g: Any, t: Any, line: Any, r: Any, c: Any) -> Any:
        row, column = t * p.rows + r, line * LINE + c
        inside = []
        if not _divides(p.rows, p.m):
            inside.append(row < p.m)
        if p.k % LINE:
            inside.append(column < p.k)
        element = a(g, row, column)
        return tirx.if_then_else(tirx.all(*inside), element, tirx.const(0, dtype)) if inside else element

    tiles = p.padded_m // p.rows
    packed = te.compute((p.groups, tiles, p.padded_k // LINE, p.rows, LINE), value, name="pack_a")
    return lambda g, m, k: packed[g, m // p.rows, k // LINE, m % p.rows, k % LINE]


def pack_columns(b: Access, p: Product, dtype: str, groups: Any) -> Access:
    """B in panels [panels][k][panel], columns past n and rows past k are 0."""
    from tvm import te, tirx

    def value(g: Any, q: Any, k: Any, j: Any) -> Any:
        column = q * p.panel + j
        inside = []
        if p.n % p.panel:
            inside.append(column < p.n)
        if p.padded_k != p.k:
            inside.append(k < p.k)
        element = b(g, k, column)
        return tirx.if_then_else(tirx.all(*inside), element, tirx.const(0, dtype)) if inside else element

    packed = te.compute((groups, p.panels, p.padded_k, p.panel), value, name="pack_b")
    return panels_of(packed, p)


def panels_of(packed: Any, p: Product) -> Access:
    """Access to a B that already lies in panels [groups or 1][panels][k][panel]."""
    shared = isinstance(packed.shape[0], int) or getattr(packed.shape[0], "value", 0) == 1
    return lambda g, k, j: packed[0 if shared else g, j // p.panel, k, j % p.panel]


def _divides(rows: int, m: Any) -> bool:
    return isinstance(m, int) and m % rows == 0
