"""Products by constant int8 weights on AMX tiles: rows × K codes, seen as one matrix, by panels of one or two tiles.

Every unit of rows is a whole number of tiles: sizes are chosen so that few rows, best none, are computed twice.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tvmx.passes.legalize import integer_te
from tvmx.passes.legalize.conv import emit
from tvmx.passes.legalize.dot_unit import DotUnit
from tvmx.passes.legalize.integer_te import IntegerProduct

ROWS, COLUMNS = 16, 16  # of a tile of sums
MAX_TILES = 8  # of rows in one call, which configures the tiles once


def product(bb: Any, x: Any, matrix: np.ndarray, out_shape: tuple[int, ...], unit: DotUnit) -> Any:
    """int32 [*out_shape] = x[..., K] · matrix[K, N]"""
    from tvm import relax, te

    depth, columns = matrix.shape
    rows = math.prod(out_shape[:-1])
    tile, count = tiles_of(rows)
    panel = COLUMNS * min(2, math.ceil(columns / COLUMNS))
    p = IntegerProduct(1, rows, columns, depth, tile * count, panel, unit, tile)
    packed = integer_te.pack_filters(matrix[None, None], panel, unit)
    panels = np.ascontiguousarray(packed[:, 0, 0])[None]
    flat = bb.emit(relax.op.reshape(x, (rows, depth)))  # a view

    def compute(a: Any, b: Any) -> Any:
        left = integer_te.rows_of(lambda g, m, k: a[m, k], str(a.dtype), p, 0)

        def value(sums: Any, i: tuple[Any, ...]) -> Any:
            row: Any = 0
            for index, extent in zip(i[:-1], out_shape[:-1]):
                row = row * extent + index
            return sums[0, row, i[-1]]

        return integer_te.product(
            left, b, p, lambda sums: te.compute(out_shape, lambda *i: value(sums, i), name="unpack")
        )

    return emit(bb, compute, "matmul_int8_amx", flat, relax.const(panels))


def tiles_of(rows: int) -> tuple[int, int]:
    """(rows of a tile, tiles in one call): the fewest tiles in all, then the fewest rows past the last one."""
    if rows <= ROWS:
        return rows, 1
    choices = []
    for tile in range(ROWS // 2, ROWS + 1):
        for count in range(1, MAX_TILES + 1):
            calls = math.ceil(rows / (tile * count))
            choices.append((calls * count, calls * count * tile - rows, -count, tile, count))
    return min(choices)[3:]
