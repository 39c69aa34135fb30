"""4-bit and 2-bit constants in int8, and blocked QuantizeLinear / DequantizeLinear."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from tvmx.frontend.rewrite.context import Refuse
from tvmx.frontend.rewrite.rule import Match, RewriteRule

# element type -> the 8-bit type that holds it, and its own range
WIDER: dict[int, tuple[int, int, int]] = {
    TensorProto.INT4: (TensorProto.INT8, -8, 7),
    TensorProto.UINT4: (TensorProto.UINT8, 0, 15),
    getattr(TensorProto, "INT2", -1): (TensorProto.INT8, -2, 1),
    getattr(TensorProto, "UINT2", -2): (TensorProto.UINT8, 0, 3),
}
INTEGERS: dict[int, type[np.integer]] = {
    TensorProto.INT8: np.int8,
    TensorProto.UINT8: np.uint8,
    TensorProto.INT16: np.int16,
    TensorProto.UINT16: np.uint16,
}
_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16}


def widened(m: Match, index: int) -> str:
    """A constant input in 8 bits when its type is narrower; others unchanged."""
    name = m.input(index)
    known = m.graph.type(name) if name else None
    if known is None or known.elem not in WIDER:
        return name
    value = m.need_const(index, "a 4-bit tensor")
    return m.emit.const(value.astype(INTEGERS[WIDER[known.elem][0]]), "int8")


def _block_shape(m: Match, axis: int) -> tuple[list[int], list[int], list[int]]:
    """Shapes of x cut into blocks, of a scale against that, and of x itself."""
    block, shape, scales = m.attr("block_size"), list(m.shape(0)), list(m.shape(1))
    count = scales[axis]
    cut = [*shape[:axis], count, block, *shape[axis + 1 :]]
    return cut, [*scales[: axis + 1], 1, *scales[axis + 1 :]], shape


def _short_block(m: Match, axis: int) -> bool:
    """Whether the last block along `axis` is shorter than the others. Raises Refuse for numbers that do not fit."""
    block, extent, count = m.attr("block_size"), m.dim(0, axis), m.dim(1, axis)
    if not (count - 1) * block < extent <= count * block:
        raise Refuse(
            f"{extent} elements in blocks of {block} with {count} scales",
            f"give {-(-extent // block)} scales along axis {axis}",
        )
    return bool(extent != count * block)


def _per_element(m: Match, name: str, axis: int) -> str:
    """A scale or zero point per block, repeated along `axis` for each element of the block."""
    if not name:
        return name
    index = np.arange(m.dim(0, axis)) // m.attr("block_size")
    return m.emit.op("Gather", name, m.emit.const(index, "block_of", np.int64), axis=axis)


def _narrow_or_blocked(m: Match) -> str | None:
    if m.attr("block_size", 0):
        return None
    names = [m.input(0), m.input(2)] if m.node.op_type == "DequantizeLinear" else [m.input(2)]
    types = [m.graph.type(n) for n in names if n]
    if any(t is not None and t.elem in WIDER for t in types):
        return None
    return "neither blocked nor below 8 bits"


def dequantize(m: Match) -> list[str]:
    """4-bit x: the same on an int8 constant. Blocked: (x - zero) * scale on [.., n, block, ..].

    QuantizeLinear to 4 bits followed by this one is done in float, where every step is exact.
    """
    e = m.emit
    elem = m.attr("output_dtype", 0) or m.elem(1)
    x = _from_quantize(m)
    zero = widened(m, 2)
    axis = m.attr("axis", 1)
    if not m.attr("block_size", 0):
        x = x or widened(m, 0)
        if m.graph.type(x) and m.type(x).elem in _FLOATS:
            scale, zero = _along(m, m.input(1), axis), _along(m, zero, axis)
            return [e.mul(e.sub(x, e.cast(zero, elem)) if zero else x, e.cast(scale, elem))]
        per_axis = m.rank(1) == 1
        return [e.dequantize(x, m.input(1), zero, axis if per_axis else None)]
    axis %= m.rank(0)
    if _short_block(m, axis):
        x = e.cast(x or widened(m, 0), elem)
        if zero:
            x = e.sub(x, e.cast(_per_element(m, zero, axis), elem))
        return [e.mul(x, e.cast(_per_element(m, m.input(1), axis), elem))]
    cut, scales, shape = _block_shape(m, axis)
    x = e.cast(e.reshape(x or widened(m, 0), cut), elem)
    if zero:
        x = e.sub(x, e.cast(e.reshape(zero, scales), elem))
    return [e.reshape(e.mul(x, e.cast(e.reshape(m.input(1), scales), elem)), shape)]


def _along(m: Match, name: str, axis: int) -> str:
    """A per-axis parameter shaped to broadcast against x."""
    if not name or len(m.type(name).shape or ()) != 1:
        return name
    shape = [1] * m.rank(0)
    shape[axis] = -1
    return m.emit.reshape(name, shape)


def _from_quantize(m: Match) -> str:
    """The float values of a 4-bit QuantizeLinear that feeds this node; "" for anything else."""
    known, node = m.graph.type(m.input(0)), m.producer(0)
    if known is None or known.elem not in WIDER or node is None or node.op_type != "QuantizeLinear":
        return ""
    inner = Match(node, m.graph)
    inner.emit = m.emit
    return _quantized(inner, WIDER[known.elem])


def _quantized(m: Match, kind: tuple[int, int, int]) -> str:
    """round(x / scale) + zero, clipped, still as float and in x's own shape."""
    e = m.emit
    elem, axis = m.elem(0), m.attr("axis", 1)
    x, scale, shape = m.input(0), m.input(1), None
    zero = widened(m, 2)
    if m.attr("block_size", 0) and _short_block(m, axis % m.rank(0)):
        scale, zero = _per_element(m, scale, axis % m.rank(0)), _per_element(m, zero, axis % m.rank(0))
    elif m.attr("block_size", 0):
        cut, scales, shape = _block_shape(m, axis % m.rank(0))
        x, scale = e.reshape(x, cut), e.reshape(scale, scales)
        zero = e.reshape(zero, scales) if zero else ""
    else:
        scale, zero = _along(m, scale, axis), _along(m, zero, axis)
    y = e.op("Round", e.div(x, e.cast(scale, elem)))
    if zero:
        y = e.add2(y, e.cast(zero, elem))
    y = e.clip(y, kind[1], kind[2], elem)
    return e.reshape(y, shape) if shape is not None else y


def quantize(m: Match) -> list[str]:
    """Blocked QuantizeLinear to 8 bits; one to 4 bits is absorbed by the DequantizeLinear after it."""
    elem = m.elem(2) if m.input(2) else m.attr("output_dtype", 0) or TensorProto.UINT8
    if elem in WIDER:
        raise Refuse("a 4-bit result that is not dequantised", "quantise to 8 bits")
    if elem not in INTEGERS:
        raise Refuse("a blocked result that is no 8 or 16-bit integer", "quantise to 8 bits")
    info = np.iinfo(INTEGERS[elem])
    return [m.emit.cast(_quantized(m, (elem, info.min, info.max)), elem)]


RULES = (
    RewriteRule("widen_DequantizeLinear", ("DequantizeLinear",), dequantize, _narrow_or_blocked),
    RewriteRule("widen_QuantizeLinear", ("QuantizeLinear",), quantize, _narrow_or_blocked),
)
