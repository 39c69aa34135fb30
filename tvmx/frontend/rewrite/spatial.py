"""Operators that move or sample data: ReverseSequence, Col2Im, DeformConv."""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto, helper

from tvmx.frontend.rewrite.context import Refuse
from tvmx.frontend.rewrite.rule import Match, RewriteRule


def reverse_sequence(m: Match) -> list[str]:
    """The first lens[b] entries of each sequence reversed: a Gather of rows of [T*B, ...]."""
    e = m.emit
    time, batch = m.attr("time_axis", 0), m.attr("batch_axis", 1)
    if {time, batch} != {0, 1}:
        raise Refuse(f"time_axis {time} and batch_axis {batch}", "use axes 0 and 1")
    shape = m.shape(0)
    steps, batches = shape[time], shape[batch]
    t_shape, b_shape = ((-1, 1), (1, -1)) if time == 0 else ((1, -1), (-1, 1))
    t = e.const(np.arange(steps).reshape(t_shape), "time", np.int64)
    b = e.const(np.arange(batches).reshape(b_shape), "batch", np.int64)
    lens = e.reshape(e.cast(m.input(1), TensorProto.INT64), b_shape)
    mirrored = e.sub(e.sub(lens, e.const(1, "one", np.int64)), t)
    source = e.op("Where", e.op("Less", t, lens), mirrored, t)
    if time == 0:
        row = e.add2(e.mul(source, e.const(batches, "batches", np.int64)), b)
    else:
        row = e.add2(source, e.mul(b, e.const(steps, "steps", np.int64)))
    rows = e.reshape(m.input(0), (shape[0] * shape[1], *shape[2:]))
    return [e.reshape(e.op("Gather", rows, e.reshape(row, (-1,)), axis=0), shape)]


def col2im(m: Match) -> list[str]:
    """Sum of blocks: a grouped ConvTranspose whose kernels are one-hot (dilated with zeros)."""
    e = m.emit
    image = [int(v) for v in m.need_const(1, "the image shape")]
    block = [int(v) for v in m.need_const(2, "the block shape")]
    n = len(image)
    dilations = m.attr("dilations", [1] * n)
    pads = m.attr("pads", [0] * 2 * n)
    strides = m.attr("strides", [1] * n)
    size = math.prod(block)
    channels = m.dim(0, 1) // size
    reach = [d * (b - 1) + 1 for d, b in zip(dilations, block)]
    padded = [i + pads[k] + pads[k + n] for k, i in enumerate(image)]
    counts = [(p - r) // s + 1 for p, r, s in zip(padded, reach, strides)]
    if math.prod(counts) != m.dim(0, 2):
        raise Refuse(f"{m.dim(0, 2)} blocks where image and strides give {counts}", "repair the model")
    kernel = np.zeros((size, 1, *reach), helper.tensor_dtype_to_np_dtype(m.elem(0)))
    for index, place in enumerate(np.ndindex(*block)):
        tap = tuple(p * d for p, d in zip(place, dilations))
        kernel[(index, 0) + tap] = 1  # noqa: RUF005 (a star in an index needs Python 3.11)
    rest = [p - s * (c - 1) - r for p, s, c, r in zip(padded, strides, counts, reach)]
    x = e.reshape(m.input(0), (0, channels * size, *counts))
    y = e.op(
        "ConvTranspose",
        x,
        e.const(np.tile(kernel, (channels, *[1] * (n + 1))), "blocks"),
        group=channels,
        strides=strides,
        pads=pads,
        output_padding=rest if any(rest) else None,
        kernel_shape=reach,
    )
    return [y]


def deform_conv(m: Match) -> list[str]:
    """Sample at the shifted places with GridSample, then one matrix product per group."""
    e = m.emit
    n, channels, height, width = m.shape(0)
    outputs, per_group, kh, kw = m.shape(1)
    out_h, out_w = m.dim(2, 2), m.dim(2, 3)
    group, shifts = m.attr("group", 1), m.attr("offset_group", 1)
    strides, dilations = m.attr("strides", [1, 1]), m.attr("dilations", [1, 1])
    pads = m.attr("pads", [0, 0, 0, 0])
    k = kh * kw
    if m.graph.opset < 16 or m.elem(0) != TensorProto.FLOAT:
        raise Refuse("it needs float32 and opset 16 (GridSample)", "convert the model")

    def base(axis: int, kernel: int, count: int) -> np.ndarray:
        taps = np.arange(kernel) * dilations[axis]
        return np.asarray(taps[:, None] + np.arange(count)[None, :] * strides[axis] - pads[axis])

    rows = np.broadcast_to(base(0, kh, out_h)[:, None, :, None], (kh, kw, out_h, out_w))
    cols = np.broadcast_to(base(1, kw, out_w)[None, :, None, :], (kh, kw, out_h, out_w))
    places = np.stack([rows, cols], 2).reshape(1, 1, k, 2, out_h, out_w).astype(np.float32)
    where = e.add2(e.reshape(m.input(2), (n, shifts, k, 2, out_h, out_w)), e.const(places, "places"))
    # pixel p -> (2 p + 1) / size - 1, GridSample's coordinate without aligned corners
    sizes = np.array([height, width], np.float32).reshape(2, 1, 1)
    grid = e.add2(e.mul(where, e.const(2 / sizes, "scale")), e.const(1 / sizes - 1, "shift"))
    y, x = (e.select(grid, 3, a) for a in (0, 1))
    grid = e.concat([e.unsqueeze(x, 5), e.unsqueeze(y, 5)], 5)  # [n, shifts, k, oh, ow, 2]
    grid = e.reshape(grid, (n * shifts, k * out_h, out_w, 2))
    image = e.reshape(m.input(0), (n * shifts, channels // shifts, height, width))
    mode = "linear" if m.graph.opset >= 20 else "bilinear"
    taken = e.op("GridSample", image, grid, mode=mode, padding_mode="zeros", align_corners=0)
    taken = e.reshape(taken, (n, shifts, channels // shifts, k, out_h, out_w))
    if m.input(4):
        taken = e.mul(taken, e.reshape(m.input(4), (n, shifts, 1, k, out_h, out_w)))
    columns = e.reshape(taken, (n, group, per_group * k, out_h * out_w))
    weight = e.reshape(m.input(1), (1, group, outputs // group, per_group * k))
    result = e.reshape(e.matmul(weight, columns), (n, outputs, out_h, out_w))
    if m.input(3):
        result = e.add2(result, e.reshape(m.input(3), (1, outputs, 1, 1)))
    return [result]


RULES = (
    RewriteRule("gather_ReverseSequence", ("ReverseSequence",), reverse_sequence),
    RewriteRule("convtranspose_Col2Im", ("Col2Im",), col2im),
    RewriteRule("sample_DeformConv", ("DeformConv",), deform_conv),
)
