"""Winograd F(4×4, 3×3) over NHWC: 36 GEMMs in place of a 3×3 convolution, 4 times fewer multiplications.

Lavin & Gray, "Fast Algorithms for Convolutional Neural Networks" (2015), points 0, ±1, ±2, ∞. Errors are a few 1e-6 of
the output's range in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tvmx.passes.legalize.conv_te import STAGE_ANNOTATION, Window, padded
from tvmx.schedule.workload import OP_ANNOTATION

TILE = 4  # outputs a side
PATCH = 6  # inputs a side

_G = np.array(
    [[1 / 4, 0, 0], [-1 / 6, -1 / 6, -1 / 6], [-1 / 6, 1 / 6, -1 / 6],
     [1 / 24, 1 / 12, 1 / 6], [1 / 24, -1 / 12, 1 / 6], [0, 0, 1]]
)  # fmt: skip


def weights(weight: Any, width: int) -> Any:
    """numpy weight[3, 3, K, O] → G·g·Gᵀ in panels: [6, 6, ⌈O/width⌉, K, width]."""
    _, _, depth, out = weight.shape
    panels = math.ceil(out / width)
    wide = np.zeros((PATCH, PATCH, depth, panels * width))
    wide[..., :out] = np.einsum("ea,abko,fb->efko", _G, weight.astype("float64"), _G)
    panelled = wide.reshape(PATCH, PATCH, depth, panels, width).transpose(0, 1, 3, 2, 4)
    return np.ascontiguousarray(panelled, dtype=weight.dtype)


def _input_1d(d: Sequence[Any]) -> list[Any]:
    """Bᵀ·d for one row or column of 6."""
    even, odd = d[4] - 4.0 * d[2], d[3] - 4.0 * d[1]
    even2, odd2 = d[4] - d[2], 2.0 * (d[3] - d[1])
    return [
        4.0 * d[0] - 5.0 * d[2] + d[4],
        even + odd,
        even - odd,
        even2 + odd2,
        even2 - odd2,
        4.0 * d[1] - 5.0 * d[3] + d[5],
    ]


def _output_1d(m: Sequence[Any]) -> list[Any]:
    """Aᵀ·m: 6 products → 4 outputs."""
    sum12, diff12, sum34, diff34 = m[1] + m[2], m[1] - m[2], m[3] + m[4], m[3] - m[4]
    return [m[0] + sum12 + sum34, diff12 + 2.0 * diff34, sum12 + 4.0 * sum34, diff12 + 8.0 * diff34 + m[5]]


def _choose(index: Any, options: Sequence[Any]) -> Any:
    """options[index] as an expression; a schedule unrolls the index, so that one option remains."""
    from tvm import tirx

    chosen = options[-1]
    for value in range(len(options) - 2, -1, -1):
        chosen = tirx.Select(index == value, options[value], chosen)
    return chosen


def winograd(x: Any, packed: Any, channels: int, window: Window) -> Any:
    """x[N, H, W, K], packed as `weights` makes it → [N, OH, OW, channels]."""
    from tvm import te

    n, h, w, depth = (int(d) for d in x.shape)
    _, _, panels, _, width = (int(d) for d in packed.shape)
    oh, ow = window.output(h, w)
    rows, columns = math.ceil(oh / TILE), math.ceil(ow / TILE)
    source = padded(x, window, rows * TILE + 2, columns * TILE + 2)
    tiles = n * rows * columns

    def patch(e: Any, f: Any, p: Any, c: Any) -> Any:
        b, i, j = p // (rows * columns), p % (rows * columns) // columns, p % columns
        return _choose(e, _input_1d([source[b, i * TILE + k, j * TILE + f, c] for k in range(PATCH)]))

    half = te.compute(
        (PATCH, PATCH, tiles, depth), patch, name="input_columns", attrs={STAGE_ANNOTATION: "input_columns"}
    )
    patches = te.compute(
        (PATCH, PATCH, tiles, depth),
        lambda e, f, p, c: _choose(f, _input_1d([half[e, k, p, c] for k in range(PATCH)])),
        name="input_rows",
        attrs={STAGE_ANNOTATION: "input_rows"},
    )
    k = te.reduce_axis((0, depth), "k")
    products = te.compute(
        (PATCH, PATCH, tiles, panels * width),
        lambda e, f, p, o: te.sum(patches[e, f, p, k] * packed[e, f, o // width, k, o % width], axis=k),
        name="conv2d_winograd",
        attrs={OP_ANNOTATION: "conv2d_winograd"},
    )
    back = te.compute(
        (TILE, PATCH, tiles, panels * width),
        lambda u, f, p, o: _choose(u, _output_1d([products[e, f, p, o] for e in range(PATCH)])),
        name="output_columns",
        attrs={STAGE_ANNOTATION: "output_columns"},
    )
    out = te.compute(
        (TILE, TILE, tiles, panels * width),
        lambda u, v, p, o: _choose(v, _output_1d([back[u, f, p, o] for f in range(PATCH)])),
        name="output_rows",
        attrs={STAGE_ANNOTATION: "output_rows"},
    )
    return te.compute(
        (n, oh, ow, channels),
        lambda b, i, j, o: out[i % TILE, j % TILE, (b * rows + i // TILE) * columns + j // TILE, o],
        name="unpack",
    )
