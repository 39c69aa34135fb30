"""com.microsoft operators over packed 2-, 4- and 8-bit blocks: MatMulNBits and GatherBlockQuantized.

A product becomes MatMul by `(codes - zero) · scale` over blocks, the form of a blocked DequantizeLinear, which the qdq
phase turns into a kernel that reads packed codes. A look-up picks the packed rows first and unpacks only those.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from tvmx.frontend.rewrite.blocks import scaled_blocks
from tvmx.frontend.rewrite.context import Array, Refuse
from tvmx.frontend.rewrite.rule import Match, RewriteRule
from tvmx.frontend.rewrite.subbyte import widened

BITS = (2, 4, 8)


def unpack(packed: Array, bits: int, count: int) -> Array:
    """uint8 [.., bytes] → uint8 [.., count]: codes of `bits` bits, the lowest of a byte first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (packed.astype(np.uint8)[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return np.asarray(codes.reshape(*packed.shape[:-1], -1)[..., :count])


def _bits(m: Match) -> int:
    bits: int = m.attr("bits", 4)
    if bits not in BITS:
        raise Refuse(f"codes of {bits} bits", "quantise to 2, 4 or 8 bits")
    return bits


def matmul_nbits(m: Match) -> list[str]:
    """A [.., K], B [N, blocks, bytes], scales, zero points (packed, float or absent), g_idx, bias → [.., N]."""
    e = m.emit
    bits, depth, width, block = _bits(m), int(m.attr("K")), int(m.attr("N")), int(m.attr("block_size"))
    blocks = -(-depth // block)
    packed = m.need_const(1, "the packed weight")
    scales = np.asarray(m.need_const(2, "the scales"), np.float32)
    order = m.const(4)
    if m.input(4) and order is None:
        raise Refuse("its g_idx is computed", "store it as an initializer")
    if packed.size * 8 // bits < width * blocks * block or scales.size != width * blocks:
        raise Refuse(f"the weight holds no {blocks} blocks of {block} for {width} columns", "repair the model")
    codes = unpack(packed.reshape(width, -1), bits, blocks * block)[:, :depth]
    zero = _zero_points(m, bits, width, blocks)
    scales = scales.reshape(width, blocks)
    a, elem = m.input(0), m.elem(0)
    if order is not None and not np.array_equal(order, np.arange(depth) // block):
        w = _gathered_blocks(codes, scales, zero, np.asarray(order, np.int64))
        weight = e.const(np.ascontiguousarray(w.T), "weight")
    else:
        weight = scaled_blocks(e, codes.T, scales.T, zero.T, block)
    y = e.matmul(e.cast(a, TensorProto.FLOAT), weight)
    if m.input(5):
        y = e.add2(y, e.cast(m.input(5), TensorProto.FLOAT))
    return [e.cast(y, elem)]


def _gathered_blocks(codes: Array, scales: Array, zero: Array, order: Array) -> Array:
    """Weights [N, K] whose column k belongs to block `order[k]`: floats, for no run of columns shares a scale."""
    values: Array = np.subtract(codes, zero[:, order], dtype=np.float32) * scales[:, order]
    return values


def _zero_points(m: Match, bits: int, width: int, blocks: int) -> Array:
    """Float32 [N, blocks]; the middle of the range where the node gives none."""
    if not m.input(3):
        return np.full((width, blocks), 1 << (bits - 1), np.float32)
    zero = m.need_const(3, "the zero points")
    if zero.dtype == np.uint8:
        zero = unpack(zero.reshape(width, -1), bits, blocks)
    if zero.size != width * blocks:
        raise Refuse(f"{zero.size} zero points for {width * blocks} blocks", "repair the model")
    return zero.reshape(width, blocks).astype(np.float32)


def gather_block_quantized(m: Match) -> list[str]:
    """Data, indices, scales, zero points → rows as floats. Packed codes stay packed until they are looked up."""
    e = m.emit
    bits, block = _bits(m), int(m.attr("block_size", 128))
    packed = m.elem(0) == TensorProto.UINT8 and bits < 8
    rank = m.rank(0)
    along, axis = m.attr("quantize_axis", 1) % rank, m.attr("gather_axis", 0) % rank
    if along == axis or (packed and axis == rank - 1):
        raise Refuse("the look-up runs along the blocks or the packed axis", "quantise along another axis")
    place = along if along < axis else along + m.rank(1) - 1

    def rows(name: str) -> str:
        return e.op("Gather", name, m.input(1), axis=axis)

    if packed:
        values = _unpacked(m, rows(m.input(0)), bits, None)
        zero = _unpacked(m, rows(m.input(3)), bits, m.dim(2, rank - 1)) if m.input(3) else ""
    else:
        values = rows(widened(m, 0))
        zero = rows(widened(m, 3)) if m.input(3) else ""
    if not zero and m.elem(0) == TensorProto.UINT8:
        zero = e.like(float(1 << (bits - 1)), m.elem(2), "middle")
    return [_blocks_to_float(m, values, rows(m.input(2)), zero, place, block)]


def _unpacked(m: Match, packed: str, bits: int, count: int | None) -> str:
    """uint8 [.., bytes] → uint8 [.., codes], by arithmetic that every opset has; cut to `count`."""
    e = m.emit
    known = m.graph.type(packed)
    dims = None if known is None else known.shape
    if dims is None or not isinstance(dims[-1], int):
        raise Refuse("the shape of the looked-up rows is unknown", "give every input a fixed shape")
    base = e.const(np.uint8(1 << bits), "base")
    parts, rest = [], packed
    for _ in range(8 // bits - 1):
        higher = e.div(rest, base)
        parts.append(e.sub(rest, e.mul(higher, base)))
        rest = higher
    last = len(dims)
    codes = e.concat([e.unsqueeze(part, last) for part in (*parts, rest)], last)
    whole = dims[-1] * 8 // bits
    codes = e.reshape(codes, [*([0] * (last - 1)), whole])
    return codes if count is None or count == whole else e.slice(codes, last - 1, 0, count)


def _blocks_to_float(m: Match, codes: str, scale: str, zero: str, axis: int, block: int) -> str:
    """(codes - zero) · scale with one scale a run of `block` codes along `axis`."""
    e, elem = m.emit, m.elem(2)
    known, scales = m.graph.type(codes), m.graph.type(scale)
    dims = None if known is None else known.shape
    counts = None if scales is None else scales.shape
    extent = None if dims is None else dims[axis]
    if counts is None or not isinstance(extent, int) or not isinstance(counts[axis], int):
        raise Refuse("the shape of the looked-up rows is unknown", "give every input a fixed shape")
    block_of = e.const(np.arange(extent) // block, "block_of", np.int64)

    def spread(name: str) -> str:
        return e.op("Gather", name, block_of, axis=axis) if m.graph.type(name) and m.type(name).shape else name

    value = e.cast(codes, elem)
    if zero:
        value = e.sub(value, spread(e.cast(zero, elem)))
    return e.mul(value, spread(scale))


_MS = "com.microsoft:"
RULES = (
    RewriteRule("blocks_MatMulNBits", (_MS + "MatMulNBits",), matmul_nbits),
    RewriteRule("blocks_GatherBlockQuantized", (_MS + "GatherBlockQuantized",), gather_block_quantized),
)
