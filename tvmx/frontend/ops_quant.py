"""QuantizeLinear and DequantizeLinear with every granularity: tensor, axis, block.

Per-tensor and per-axis forms stay Relax quantize/dequantize operators, the canonical form that the
quantisation passes look for; what those operators do not take becomes a kernel of ours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper
from tvm import te, tirx
from tvm.relax import op as R

from tvmx.frontend import float8
from tvmx.frontend.node import Expr, Node, converter, dtype_of
from tvmx.frontend.ops_shape import reshape

_RANGE = {
    "int8": (-128, 127), "uint8": (0, 255), "int16": (-32768, 32767), "uint16": (0, 65535),
    "int32": (-(2**31), 2**31 - 1),
}  # fmt: skip


def _spread(node: Node, i: int, scale_dims: list[Any]) -> tuple[str, int, int]:
    """Granularity of the scale: ("tensor" | "axis" | "block", axis, block size)."""
    dims = node.shape(0)
    axis = node.attr("axis", 1)
    block = int(node.attr("block_size", 0))
    if not scale_dims or (len(scale_dims) == 1 and scale_dims[0] == 1 and not node.attr("block_size", 0)):
        return "tensor", 0, 0
    axis = node.axis(axis, len(dims))
    if block:
        return "block", axis, block
    return "axis", axis, 0


def _params_at(kind: str, axis: int, block: int) -> Any:
    """Index of the scale that serves element `i`."""

    def at(i: Any, rank: int) -> list[Any]:
        if kind == "tensor":
            return [0] * rank
        if kind == "axis":
            return [i[axis]]
        return [tirx.indexdiv(v, block) if a == axis else v for a, v in enumerate(i)]

    return at


@converter("DequantizeLinear")
def dequantize(node: Node) -> Expr:
    x, scale = node[0], node[1]
    dtype, out = dtype_of(x), dtype_of(scale)
    if node.attrs.get("output_dtype"):
        out = str(helper.tensor_dtype_to_np_dtype(node.attrs["output_dtype"]))
    kind, axis, block = _spread(node, 1, node.shape(1))
    if dtype not in _RANGE:
        if dtype not in float8.FLOAT8:
            raise node.fail(f"input of type {dtype} is not supported")
        wide = float8.decode(node, x, "float32")
        return _dequantize_te(node, wide, scale, None, kind, axis, block, out)
    zero = node.get(2)
    if kind != "block" and out in ("float32", "float16") and dtype_of(scale) == out and dtype != "uint16":
        if zero is None:
            zero = node.const(np.zeros(node.int_shape(1)), dtype)
        scale, zero = _flat(node, scale, kind), _flat(node, zero, kind)
        return node.emit(R.dequantize(x, scale, zero, axis if kind == "axis" else -1, out))
    return _dequantize_te(node, x, scale, zero, kind, axis, block, out)


def _flat(node: Node, x: Expr, kind: str) -> Expr:
    """A per-tensor parameter as scalar."""
    return reshape(node, x, []) if kind == "tensor" else x


def _dequantize_te(
    node: Node, x: Expr, scale: Expr, zero: Expr | None, kind: str, axis: int, block: int, out: str
) -> Expr:
    at = _params_at(kind, axis, block)

    def kernel(q: Any, s: Any, *z: Any) -> Any:
        def value(*i: Any) -> Any:
            where = at(i, len(s.shape))
            if z:
                v = (q(*i).astype("int32") - z[0](*where).astype("int32")).astype("float32")
            else:
                v = q(*i).astype("float32")
            return (v * s(*where).astype("float32")).astype(out)

        return te.compute(q.shape, value, name="dequantize")

    return node.te(kernel, x, scale, *([] if zero is None else [zero]))


def _quantize_float8(node: Node, x: Expr, scale: Expr, kind: str, axis: int, block: int, out: str) -> Expr:
    at = _params_at(kind, axis, block)

    def kernel(t: Any, s: Any) -> Any:
        return te.compute(
            t.shape,
            lambda *i: t(*i).astype("float32") / s(*at(i, len(s.shape))).astype("float32"),
            name="scaled",
        )

    return float8.encode(node, node.te(kernel, x, scale), out, bool(node.attr("saturate", 1)))


@converter("QuantizeLinear")
def quantize(node: Node) -> Expr:
    x, scale = node[0], node[1]
    zero = node.get(2)
    out = dtype_of(zero) if zero is not None else "uint8"
    if zero is None and node.attrs.get("output_dtype"):
        out = str(helper.tensor_dtype_to_np_dtype(node.attrs["output_dtype"]))
    kind, axis, block = _spread(node, 1, node.shape(1))
    if out in float8.FLOAT8:
        return _quantize_float8(node, x, scale, kind, axis, block, out)
    if out not in _RANGE:
        raise node.fail(f"quantising to {out} is not supported; int8, uint8, int16 and uint16 are")
    dtype = dtype_of(x)
    if dtype == dtype_of(scale) == "float32" and kind != "block" and out in ("int8", "uint8"):
        if zero is None:
            zero = node.const(np.zeros(node.int_shape(1)), out)
        scale, zero = _flat(node, scale, kind), _flat(node, zero, kind)
        return node.emit(R.quantize(x, scale, zero, axis if kind == "axis" else -1, out))
    at = _params_at(kind, axis, block)
    low, high = _RANGE[out]

    def kernel(t: Any, s: Any, *z: Any) -> Any:
        def value(*i: Any) -> Any:
            where = at(i, len(s.shape))
            v = tirx.nearbyint(t(*i).astype("float32") / s(*where).astype("float32"))
            if z:
                v = v + z[0](*where).astype("float32")
            v = tirx.max(tirx.min(v, tirx.const(high, "float32")), tirx.const(low, "float32"))
            return v.astype(out)

        return te.compute(t.shape, value, name="quantize")

    return node.te(kernel, x, scale, *([] if zero is None else [zero]))
