"""Tensor expressions of integer products: 8-bit operands, int32 sums, the reduction cut to a dot unit's depth.

    C[...] = sum A[..., d·k + i] · B[panel, ..., k, column, i]     i < depth: one step of the dot unit

Every anchor carries `tvmx.op` and the name of its unit; the last block is a copy into the output's own shape, where
elementwise epilogues (bias, requantisation, residual) join. A block `pack` brings activations into the unit's dtype,
pads them with the zero point and the reduction to whole steps; it exists only where the operand cannot be read in
place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmx.passes.legalize.conv_te import Window
from tvmx.passes.legalize.dot_unit import DotUnit
from tvmx.schedule.workload import OP_ANNOTATION

UNIT_ANNOTATION = "tvmx.unit"
TILE_ANNOTATION = "tvmx.tile"


@dataclass(frozen=True)
class Padding:
    """Rows and columns around an image, as (top, left, bottom, right), filled with `value`."""

    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    value: int = 0


def _attrs(op: str, unit: DotUnit, tile: tuple[int, ...]) -> dict[str, Any]:
    return {OP_ANNOTATION: op, UNIT_ANNOTATION: unit.name, TILE_ANNOTATION: list(tile)}


def steps(depth: int, unit: DotUnit) -> int:
    """How many steps of the unit a reduction over `depth` channels takes."""
    return math.ceil(depth / unit.depth)


def image(x: Any, unit: DotUnit, offset: int, padding: Padding, rows: int, columns: int, groups: int = 1) -> Any:
    """x[N, H, W, G·C] as the unit reads it: [N, rows, columns, G·steps·depth]; `x` itself where it fits already.

    `offset` is added to every value and to the padding (128 turns int8 into uint8).
    """
    from tvm import te, tirx

    n, h, w, channels = (int(d) for d in x.shape)
    mine = channels // groups
    wide = steps(mine, unit) * unit.depth
    top, left = padding.pads[:2]
    spatial = (rows, columns) != (h, w) or top or left
    if not spatial and wide == mine and str(x.dtype) == unit.data and not offset:
        return x

    def value(b: Any, i: Any, j: Any, c: Any) -> Any:
        channel = c if wide == mine else c // wide * mine + c % wide
        element = convert(x[b, i - top, j - left, channel], unit.data, offset)
        fill = tirx.const(padding.value + offset, unit.data)
        if spatial:
            inside = tirx.all(i >= top, i < h + top, j >= left, j < w + left)
            element = tirx.if_then_else(inside, element, fill)
        return element if wide == mine else tirx.if_then_else(c % wide < mine, element, tirx.const(0, unit.data))

    return te.compute((n, rows, columns, groups * wide), value, name="pack")


def line(x: Any, unit: DotUnit, offset: int, padding: Padding, rows: int, columns: int) -> Any:
    """x[N, H, W, 1] as rows of bytes [N, rows, columns], `offset` added, padding around."""
    from tvm import te, tirx

    n, h, w, _ = (int(d) for d in x.shape)
    top, left = padding.pads[:2]

    def value(b: Any, i: Any, j: Any) -> Any:
        inside = tirx.all(i >= top, i < h + top, j >= left, j < w + left)
        fill = tirx.const(padding.value + offset, unit.data)
        return tirx.if_then_else(inside, convert(x[b, i - top, j - left, 0], unit.data, offset), fill)

    return te.compute((n, rows, columns), value, name="pack")


def convert(value: Any, dtype: str, offset: int) -> Any:
    """An 8-bit value plus `offset` in the unit's dtype."""
    from tvm import tirx

    if not offset:
        return value.astype(dtype)
    return (value.astype("int16") + tirx.const(offset, "int16")).astype(dtype)


def padded_size(size: tuple[int, int], window: Window, rows: int) -> tuple[int, int]:
    """Rows and columns of the input, padding included, that a convolution in tiles of `rows` columns reads."""
    (sh, sw), (dh, dw), (kh, kw) = window.strides, window.dilation, window.kernel
    oh, ow = window.output(*size)
    columns = math.ceil(ow / rows) * rows
    return (oh - 1) * sh + (kh - 1) * dh + 1, (columns - 1) * sw + (kw - 1) * dw + 1


Finish = Callable[[Any, Callable[[Any], Any]], Any]
"""(sums [N, OH, columns, P·nb], the correction of a stored channel or 0) → the output."""


def conv(
    x: Any,
    packed: Any,
    channels: int,
    window: Window,
    unit: DotUnit,
    rows: int,
    offset: int,
    fill: int,
    correction: Any = None,
    groups: int = 1,
    size: tuple[int, int] | None = None,
    finish: Finish | None = None,
    flat: bool = False,
    panel: int = 0,
) -> Any:
    """Integer convolution. x[N, H, W, G·K], packed[P, KH, KW, steps, nb, depth] → int32 [N, OH, OW, channels].

    `rows` is the register tile along an output row; `correction` [P·nb] int32 is added to the sums. With `size`, the
    image's own (H, W), x is padded as the unit reads it already. `finish` makes another output of the sums. `flat`: x
    has one channel, and a step of the unit takes neighbouring columns (packed[P, KH, 1, steps, nb, depth]). `panel`: nb
    of weights that `one_panel` cut.
    """
    from tvm import te

    n, h, w, _ = (int(d) for d in x.shape)
    cut = len(packed.shape) == 2
    if cut:
        kh, kw = window.kernel
        kw, mine = (1, kw) if flat else (kw, int(x.shape[3]))
        panels, count, width, depth = 1, steps(mine, unit), panel, unit.depth
    else:
        panels, kh, kw, count, width, depth = (int(d) for d in packed.shape)
    (sh, sw), (dh, dw) = window.strides, window.dilation
    oh, ow = window.output(*(size or (h, w)))
    columns = math.ceil(ow / rows) * rows
    source = x
    if size is None:
        needed = padded_size((h, w), window, rows)
        plain = not any(window.pads) and needed[0] <= h and needed[1] <= w
        around = Padding((*window.pads[:2], 0, 0), fill)
        if flat:
            source = line(x, unit, offset, around, needed[0], (columns - 1) * sw + count * depth)
        else:
            source = image(x, unit, offset, around, *((h, w) if plain else needed), groups)
    ry, rx = te.reduce_axis((0, kh), "kh"), te.reduce_axis((0, kw), "kw")
    k, ki = te.reduce_axis((0, count), "k"), te.reduce_axis((0, depth), "ki")

    def product(n_: Any, i: Any, j: Any, o: Any) -> Any:
        step = k if groups == 1 else o // width // (panels // groups) * count + k
        row = i * sh + ry * dh
        if flat:
            a = source[n_, row, j * sw + k * depth + ki]
        else:
            a = source[n_, row, j * sw + rx * dw, step * depth + ki]
        if cut:
            b = packed[((ry * kw + rx) * count + k) * channels + o, ki]
        else:
            b = packed[o // width, ry, rx, k, o % width, ki]
        return te.sum(a.astype(unit.sums) * b.astype(unit.sums), [ry, rx, k, ki])

    mine, stored = channels // groups, panels // groups * width
    detached = finish is not None or (mine != stored and groups > 1)
    op = "dot_conv_detached" if detached else "dot_conv"
    out = te.compute((n, oh, columns, panels * width), product, name="dot", attrs=_attrs(op, unit, (rows, width)))
    if finish is not None:
        return finish(out, lambda o: 0 if correction is None else correction[o])

    def value(b: Any, i: Any, j: Any, o: Any) -> Any:
        at = o // mine * stored + o % mine if detached else o
        found = out[b, i, j, at]
        return found if correction is None else found + correction[at]

    return te.compute((n, oh, ow, channels), value, name="unpack")


@dataclass(frozen=True)
class IntegerProduct:
    """`groups` products of m × k by k × n in tiles of `rows` × `panel`; all static."""

    groups: int
    m: int
    n: int
    k: int
    rows: int
    panel: int
    unit: DotUnit
    tile: int = 0  # rows of a tile of AMX, of which `rows` are a multiple; 0 for a vector unit

    @property
    def panels(self) -> int:
        return math.ceil(self.n / self.panel)

    @property
    def padded_m(self) -> int:
        return math.ceil(self.m / self.rows) * self.rows

    @property
    def steps(self) -> int:
        return steps(self.k, self.unit)

    @property
    def wide_k(self) -> int:
        return self.steps * self.unit.depth


Access = Callable[[Any, Any, Any], Any]


def rows_of(a: Access, dtype: str, p: IntegerProduct, offset: int) -> Access:
    """A as the unit reads it: in place where it fits, else a block `pack` [groups, m, wide k]."""
    from tvm import te, tirx

    if dtype == p.unit.data and not offset and p.wide_k == p.k and (not p.tile or p.padded_m == p.m):
        return lambda g, m, k: a(g, m if p.padded_m == p.m else tirx.min(m, p.m - 1), k)

    def value(g: Any, m: Any, k: Any) -> Any:
        row = tirx.min(m, p.m - 1) if p.tile and p.padded_m != p.m else m
        element = convert(a(g, row, k), p.unit.data, offset)
        return element if p.wide_k == p.k else tirx.if_then_else(k < p.k, element, tirx.const(0, p.unit.data))

    if p.tile:  # whole tiles are read: the rows past the last one too
        whole = te.compute((p.groups, p.padded_m, p.wide_k), value, name="pack")
        return lambda g, m, k: whole[g, m, k]
    packed = te.compute((p.groups, p.m, p.wide_k), value, name="pack")
    return lambda g, m, k: packed[g, m if p.padded_m == p.m else tirx.min(m, p.m - 1), k]


def panels_of(b: Access, p: IntegerProduct, offset: int, groups: int) -> Any:
    """A computed B in panels [groups, P, steps, nb, depth], its values plus `offset`; zeros past n and k."""
    from tvm import te, tirx

    def value(g: Any, q: Any, k: Any, j: Any, i: Any) -> Any:
        row, column = k * p.unit.depth + i, q * p.panel + j
        inside = []
        if p.n % p.panel:
            inside.append(column < p.n)
        if p.wide_k != p.k:
            inside.append(row < p.k)
        element = convert(b(g, row, column), p.unit.weight, offset)
        return tirx.if_then_else(tirx.all(*inside), element, tirx.const(0, p.unit.weight)) if inside else element

    return te.compute((groups, p.panels, p.steps, p.panel, p.unit.depth), value, name="pack_b")


def product(a: Access, panels: Any, p: IntegerProduct, finish: Callable[[Any], Any]) -> Any:
    """`finish(sums)` of sums int32 [groups, padded m, P·nb]; `panels` [groups or 1, P, steps, nb, depth] or cut."""
    from tvm import te

    cut = len(panels.shape) == 2
    shared = int(panels.shape[0]) == 1
    k, ki = te.reduce_axis((0, p.steps), "k"), te.reduce_axis((0, p.unit.depth), "ki")

    def body(g: Any, m: Any, j: Any) -> Any:
        left = a(g, m, k * p.unit.depth + ki).astype(p.unit.sums)
        right = panels[k * p.n + j, ki] if cut else panels[0 if shared else g, j // p.panel, k, j % p.panel, ki]
        return te.sum(left * right.astype(p.unit.sums), [k, ki])

    shape = (p.groups, p.padded_m, p.panels * p.panel)
    attrs = _attrs("dot_matmul", p.unit, (p.rows, p.panel, *([p.tile] if p.tile else [])))
    return finish(te.compute(shape, body, name="dot", attrs=attrs))


def pack_filters(weight: np.ndarray, width: int, unit: DotUnit, groups: int = 1) -> np.ndarray:
    """weight[KH, KW, K, G·O] → [G·⌈O/width⌉, KH, KW, steps, width, depth], zeros past O and K."""
    kh, kw, depth, out = weight.shape
    mine = out // groups
    panels, count = math.ceil(mine / width), steps(depth, unit)
    wide = np.zeros((kh, kw, count * unit.depth, groups, panels * width), unit.weight)
    wide[:, :, :depth, :, :mine] = weight.reshape(kh, kw, depth, groups, mine)
    split = wide.reshape(kh, kw, count, unit.depth, groups * panels, width)
    return np.ascontiguousarray(split.transpose(4, 0, 1, 2, 5, 3))


def one_panel(packed: np.ndarray, out: int) -> np.ndarray:
    """A single panel [1, ..., steps, nb, depth] without the zeros past its `out` columns: [steps · out + rest, depth].

    The vectors of a step run on into the next step's weights; the sums that they make there are read by nobody.
    """
    width, depth = packed.shape[-2:]
    if packed.shape[0] != 1 or out >= width:
        return packed
    whole = np.ascontiguousarray(packed[..., :out, :]).reshape(-1, depth)
    return np.concatenate([whole, np.zeros((width - out, depth), packed.dtype)])
