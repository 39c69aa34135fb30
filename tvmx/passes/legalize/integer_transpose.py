"""Transposed convolutions of 8-bit codes: one dense convolution makes all phases of an output block on a dot unit."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvmx.passes.legalize import conv_te, integer_te
from tvmx.passes.legalize import matmul as float_matmul
from tvmx.passes.legalize.conv import constant_of, emit, static_shape
from tvmx.passes.legalize.conv_model import register_tile
from tvmx.passes.legalize.dot_unit import unit_of
from tvmx.passes.legalize.integer_model import NARROW_DOT
from tvmx.target import Target


def legalize(bb: Any, call: Any, target: Target) -> Any:
    """R.nn.conv2d_transpose of int16(codes) - zero by int8 weights, as the qdq phase writes it; None for another."""
    from tvm import relax

    from tvmx.passes.legalize.integer import BYTES, codes_of, correction_of, offset_of

    attrs = call.attrs
    if str(call.ty.dtype) != "int32":
        return None
    filters = constant_of(bb, call.args[1])
    operand, zero = codes_of(bb, float_matmul.Operand(call.args[0], (), False))
    x = operand.value
    shape = static_shape(x)
    assert filters is not None
    assert shape is not None
    data = str(x.ty.dtype)
    if data not in BYTES:
        return None
    kh, kw, depth, out = filters.shape
    pads = tuple(int(p) for p in attrs.padding)
    strides, extra = ((int(a), int(b)) for a, b in (attrs.strides, attrs.output_padding))
    up = conv_te.Upsampling.of((shape[1], shape[2]), (kh, kw), strides, pads, extra)  # type: ignore[arg-type]
    dense = up.filters(filters)
    unit = unit_of(target, data, str(dense.dtype), dense)
    offset = offset_of(data, unit)
    width = up.window.output(shape[1], shape[2])[1]
    steps = integer_te.steps(depth, unit) * dense.shape[0] * dense.shape[1]
    tile = register_tile(width, dense.shape[3], steps, target, narrow=NARROW_DOT)
    packed = relax.const(integer_te.pack_filters(dense.astype(unit.weight), tile.panel, unit))
    # Beyond the image lies the zero point, so that one constant per phase and channel takes it off everywhere.
    constant = relax.const(np.ascontiguousarray(correction_of(dense, zero + offset, tile.panel, 1)))
    (sh, sw), (oh, ow) = up.strides, up.output

    def compute(a: Any, w: Any, c: Any) -> Any:
        from tvm import te

        def finish(sums: Any, correction: Any) -> Any:
            def value(b: Any, y: Any, z: Any, o: Any) -> Any:
                i, j = y + up.before[0], z + up.before[1]
                at = (i % sh * sw + j % sw) * out + o
                return sums[b, i // sh, j // sw, at] + correction(at)

            return te.compute((shape[0], oh, ow, out), value, name="unpack")

        return integer_te.conv(a, w, dense.shape[3], up.window, unit, tile.rows, offset, zero, c, finish=finish)

    return emit(bb, compute, "conv2d_transpose_int8", x, packed, constant)
