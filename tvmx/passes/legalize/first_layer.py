"""The image that a network's first convolution reads: float planes quantised straight into pixels of four bytes.

    x[N, C, H, W] float32  →  [N, rows, columns, 4] uint8        C ≤ 4; padding and missing channels included

Quantising, transposing, padding the border and padding three channels to the depth of a dot-product step are one pass
of vectors over 16 pixels, where each by itself moves single bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvmx.passes.legalize.conv import OPAQUE, constant_of, static_shape
from tvmx.target import Target

CHANNELS = 4
PIXELS = 16


def quantized_image(
    bb: Any,
    x: Any,
    before: Callable[[Any], Any],
    pads: tuple[int, ...],
    needed: tuple[int, int],
    fill: int,
    target: Target,
) -> Any:
    """The padded image of a convolution's data `x`, if that is a transposed, quantised picture of planes, else None."""
    from tvm import relax

    if target.vector_bytes != 64:
        return None
    found = _planes(bb, x, before)
    if found is None:
        return None
    planes, scale, zero = found
    shape = static_shape(planes)
    if shape is None or len(shape) != 4 or not 1 < shape[1] <= CHANNELS or shape[3] < PIXELS:
        return None
    top, left = pads[:2]
    if top < 0 or left < 0:
        return None
    size = needed[0], max(needed[1], left + shape[3])

    def compute(p: Any) -> Any:
        return _kernel(p, shape, size, (top, left), scale, zero, fill)

    flat = bb.emit(bb.normalize(relax.op.reshape(planes, (math.prod(shape),))))
    image = bb.emit(bb.call_te(compute, flat, primfunc_name_hint="image_int8", primfunc_attrs={"op_pattern": OPAQUE}))
    return bb.emit(bb.normalize(relax.op.reshape(image, (shape[0], *size, CHANNELS))))


def _planes(bb: Any, x: Any, before: Callable[[Any], Any]) -> tuple[Any, float, int] | None:
    """(float planes [N, C, H, W], scale, zero point) where `x` is their NHWC image in uint8."""

    def step(value: Any, name: str) -> Any:
        call = before(value)
        return call if call is not None and getattr(getattr(call, "op", None), "name", "") == f"relax.{name}" else None

    transpose = step(x, "permute_dims")
    quantize = step(x if transpose is None else transpose.args[0], "quantize")
    if quantize is not None and transpose is None:
        transpose = step(quantize.args[0], "permute_dims")
    if quantize is None or transpose is None or str(quantize.ty.dtype) != "uint8":
        return None
    axes = transpose.attrs.axes
    if axes is None or [int(a) for a in axes] != [0, 2, 3, 1]:
        return None
    scale, zero = (constant_of(bb, a) for a in quantize.args[1:3])
    if scale is None or zero is None or scale.size != 1 or zero.size != 1:
        return None
    source = quantize.args[0]
    planes = (
        transpose.args[0] if source is not transpose.args[0] and step(source, "permute_dims") is not None else source
    )
    if str(planes.ty.dtype) != "float32":
        return None
    return planes, float(scale.reshape(())), int(zero.reshape(()))


def _kernel(
    planes: Any,
    shape: tuple[int, ...],
    size: tuple[int, int],
    start: tuple[int, int],
    scale: float,
    zero: int,
    fill: int,
) -> Any:
    from tvm import tirx
    from tvm.script.ir_builder import tirx as T

    from tvmx.frontend.kernels import extern
    from tvmx.passes.legalize.conversions import ROUNDER, ROUNDER_BITS

    n, channels, h, w = shape
    (rows, columns), (top, left) = size, start
    border = int.from_bytes(bytes([fill] * channels), "little", signed=channels == CHANNELS)

    def spread(value: Any) -> Any:
        return T.broadcast(value, PIXELS)

    def body(x: Any, y: Any) -> None:
        def pixels(image: Any, row: Any, column: Any) -> None:
            word: Any = None
            for c in range(channels):
                value = x[T.ramp(((image * channels + c) * h + row - top) * w + column, 1, PIXELS)]
                if scale != 1.0:
                    value = value * spread(T.float32(1 / scale))
                value = tirx.max(tirx.min(value, spread(T.float32(255 - zero))), spread(T.float32(-zero)))
                code = rounded_vector(value) << spread(T.int32(8 * c)) if c else rounded_vector(value)
                word = code if word is None else word | code
            store(image, row, left + column, word)

        def rounded_vector(value: Any) -> Any:
            bits = tirx.reinterpret(f"int32x{PIXELS}", value + spread(T.float32(ROUNDER)))
            return bits - spread(T.int32(ROUNDER_BITS - zero))

        def store(image: Any, row: Any, column: Any, word: Any) -> None:
            at = ((image * rows + row) * columns + column) * CHANNELS
            y[T.ramp(at, 1, PIXELS * CHANNELS)] = tirx.reinterpret(f"uint8x{PIXELS * CHANNELS}", word)

        def edge(image: Any, row: Any, first: int, last: int) -> None:
            with T.serial(0, (last - first) * CHANNELS) as b:
                at = ((image * rows + row) * columns + first) * CHANNELS + b
                y[at] = (T.int32(border) >> ((b % CHANNELS).astype("int32") * 8)).astype("uint8")

        with T.serial(0, n * rows) as i:
            image, row = i // rows, i % rows
            with T.If(tirx.all(row >= top, row < h + top)):
                with T.Then():
                    with T.serial(0, w // PIXELS) as j:
                        pixels(image, row, j * PIXELS)
                    if w % PIXELS:
                        pixels(image, row, w - PIXELS)
                    if left:
                        edge(image, row, 0, left)
                    if left + w < columns:
                        edge(image, row, left + w, columns)
                with T.Else():
                    edge(image, row, 0, columns)

    return extern([(n * rows * columns * CHANNELS,)], ["uint8"], [planes], body, "image")
