"""Scales and zero points: per tensor as scalars, per channel along an axis, else by broadcast."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from tvmx.frontend.rewrite.rule import Match


def scalar(m: Match, name: str) -> str:
    """A one-element scale or zero point as a rank-0 value; other values and "" unchanged."""
    if not name:
        return name
    known = m.graph.type(name)
    if known is None or known.size != 1 or known.shape == ():
        return name
    value = m.graph.constant(name)
    if value is not None:
        return m.emit.const(value.reshape(()), "scalar")
    return m.emit.reshape(name, ())


def float_scale(m: Match, index: int) -> str:
    """A scale in float32 (half precision would cost a quantisation step), a scalar if of one element."""
    return m.emit.cast(scalar(m, m.input(index)), TensorProto.FLOAT)


def is_zero(m: Match, name: str) -> bool:
    """Whether a zero point is absent or a constant of zeros."""
    if not name:
        return True
    value = m.graph.constant(name)
    return value is not None and not np.asarray(value, np.float32).any()


@dataclass(frozen=True)
class QTensor:
    """Where a quantised operand stands among the inputs of a node."""

    value: int
    scale: int
    zero: int

    def dequantize(self, m: Match, axis: int) -> str:
        """DequantizeLinear of the operand; a vector scale runs along `axis`.

        Scales of the operand's own rank ([D, M, 1]) become Cast, Sub, Mul.
        """
        e = m.emit
        x, scale, zero = m.input(self.value), float_scale(m, self.scale), scalar(m, m.input(self.zero))
        s_shape = m.type(scale).shape or ()
        z_shape = (m.type(zero).shape or ()) if zero else ()
        if not s_shape and not z_shape:
            return e.dequantize(x, scale, zero)
        if max(len(s_shape), len(z_shape)) > 1:
            value = e.op("Cast", x, to=TensorProto.FLOAT)
            if zero:
                value = e.sub(value, e.op("Cast", zero, to=TensorProto.FLOAT))
            return e.mul(value, scale)
        channels = e.ints([m.dim(self.value, axis)], "channels")
        if not s_shape:
            scale = e.op("Expand", scale, channels)
        if zero and not z_shape:
            zero = e.op("Expand", zero, channels)
        return e.dequantize(x, scale, zero, axis)


def quantize_as(m: Match, y: str, scale: int, zero: int, elem_of: int) -> str:
    """QuantizeLinear with inputs `scale` and `zero`; an absent zero point is 0 of a sibling's type."""
    e = m.emit
    zero_name = scalar(m, m.input(zero))
    if not zero_name:
        zero_name = e.like(0, m.elem(elem_of), "zero_point")
    scale_name = float_scale(m, scale)
    shape = m.type(scale_name).shape or ()
    if len(shape) == 1:
        return e.op("QuantizeLinear", y, scale_name, zero_name, axis=-2)
    return e.quantize(y, scale_name, zero_name)
