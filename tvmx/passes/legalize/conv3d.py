"""conv3d as the direct 2-D kernel: depth and height are one axis of rows, depth and height of the filter another.

    x[N, D, H, W, C]  →  source[N, D·H, W, C] with its padding      a view, or a kernel of its own
    conv over rows (d, h) and taps (kd, kh) × kw × k                  "conv2d"'s schedule
    [N, OD·OH, OW, O]  →  [N, OD, OH, OW, O]                          the last block, where epilogues join

Filters that are not constant, groups and other layouts keep TVM's own lowering.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tvmx.passes.legalize.conv import (
    OPAQUE,
    constant_of,
    default,
    default_legalization,
    emit,
    pack_array,
    static_shape,
)
from tvmx.passes.legalize.conv_model import register_tile
from tvmx.schedule.workload import OP_ANNOTATION
from tvmx.target import Target


def legalizers(target: Target) -> dict[str, Callable[[Any, Any], Any]]:
    """Legalization of conv3d for a CPU target; none for others."""
    return {"relax.nn.conv3d": lambda bb, call: conv3d(bb, call, target)} if target.kind == "cpu" else {}


def conv3d(bb: Any, call: Any, target: Target) -> Any:
    """R.nn.conv3d over NDHWC × DHWIO float32, constant filters, one group."""
    from tvm import relax

    attrs = call.attrs
    x, weight = call.args
    shape, filters = static_shape(x), constant_of(bb, weight)
    layouts = (str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout))
    if shape is None or filters is None or int(attrs.groups) != 1 or layouts != ("NDHWC", "DHWIO", "NDHWC"):
        return default_legalization(bb, call)
    if any(str(a.ty.dtype) != "float32" for a in (x, weight, call)):
        return default_legalization(bb, call)
    *kernel, depth, out = filters.shape
    strides, dilation = ([int(v) for v in values] for values in (attrs.strides, attrs.dilation))
    first = [int(p) for p in attrs.padding[:3]]
    size = [int(d) for d in list(call.ty.shape)[1:4]]
    spans = [(o - 1) * s + (k - 1) * d + 1 for o, s, k, d in zip(size, strides, kernel, dilation)]
    tile = register_tile(size[2], out, math.prod(kernel) * depth, target)
    columns = math.ceil(size[2] / tile.rows) * tile.rows
    spans[2] = (columns - 1) * strides[2] + (kernel[2] - 1) * dilation[2] + 1
    flat = filters.reshape(kernel[0] * kernel[1], kernel[2], depth, out)
    packed = relax.const(np.ascontiguousarray(pack_array(flat, tile.panel)))

    if any(first) or spans != list(shape[1:4]):
        source = bb.call_te(
            lambda a: padded_rows(a, first, spans), x, primfunc_name_hint="pad", primfunc_attrs={"op_pattern": OPAQUE}
        )
    else:
        source = default(bb, relax.op.reshape(x, (shape[0], shape[1] * shape[2], *shape[3:])))
    return emit(
        bb,
        lambda a, w: direct(a, w, out, size, kernel, strides, dilation, spans[1], columns),
        "conv3d",
        bb.emit(source),
        packed,
    )


def padded_rows(x: Any, first: list[int], spans: list[int]) -> Any:
    """x[N, D, H, W, C] with `first` zeros before each spatial axis, cut or filled to `spans`: [N, D·H, W, C]."""
    from tvm import te, tirx

    n, *size, c = (int(d) for d in x.shape)
    zero = tirx.const(0, x.dtype)

    def value(b: Any, row: Any, j: Any, k: Any) -> Any:
        place = [row // spans[1] - first[0], row % spans[1] - first[1], j - first[2]]
        inside = [
            condition
            for at, extent, before, span in zip(place, size, first, spans)
            for condition, needed in ((at >= 0, before > 0), (at < extent, span - before > extent))
            if needed
        ]
        element = x[tuple([b, *place, k])]
        return tirx.if_then_else(tirx.all(*inside), element, zero) if inside else element

    return te.compute((n, spans[0] * spans[1], spans[2], c), value, name="pad")


def direct(
    source: Any,
    packed: Any,
    channels: int,
    size: list[int],
    kernel: list[int],
    strides: list[int],
    dilation: list[int],
    height: int,
    columns: int,
) -> Any:
    """source[N, D·height, W, K], packed[P, KD·KH, KW, K, nb] → [N, OD, OH, OW, channels]."""
    from tvm import te

    panels, taps, kw, depth, width = (int(d) for d in packed.shape)
    od, oh, ow = size
    ry, rx, k = (te.reduce_axis((0, e), n) for e, n in ((taps, "kh"), (kw, "kw"), (depth, "k")))

    def product(b: Any, i: Any, j: Any, o: Any) -> Any:
        d = i // oh * strides[0] + ry // kernel[1] * dilation[0]
        h = i % oh * strides[1] + ry % kernel[1] * dilation[1]
        element = source[b, d * height + h, j * strides[2] + rx * dilation[2], k]
        return te.sum(element * packed[o // width, ry, rx, k, o % width], axis=[ry, rx, k])

    batch = int(source.shape[0])
    grid = te.compute(
        (batch, od * oh, columns, panels * width), product, name="conv2d", attrs={OP_ANNOTATION: "conv2d"}
    )
    return te.compute((batch, od, oh, ow, channels), lambda b, d, i, j, o: grid[b, d * oh + i, j, o], name="unpack")
