"""QOperator nodes in QDQ form: QLinearX(q, s, z, ...) -> Quantize(X(Dequantize(q, s, z), ...)).

Weights stay int8 initializers behind DequantizeLinear, which is what the integer passes match.
The result may differ from an integer kernel by one step where the float scale rounds a tie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto

from tvmx.frontend.rewrite.context import Refuse
from tvmx.frontend.rewrite.qparams import QTensor, float_scale, quantize_as, scalar
from tvmx.frontend.rewrite.rule import Match, RewriteRule

_CONV_ATTRS = (
    "auto_pad",
    "dilations",
    "group",
    "kernel_shape",
    "pads",
    "strides",
    "output_padding",
    "output_shape",
)


def attrs_of(m: Match, names: tuple[str, ...]) -> dict[str, Any]:
    """The node's attributes among `names`."""
    return {n: v for n in names if (v := m.attr(n)) is not None}


def _bias(m: Match, index: int, x_scale: int, w_scale: int) -> str:
    """The int32 bias [M] as float: bias * x_scale * w_scale."""
    if not m.input(index):
        return ""
    e = m.emit
    scale = e.mul(float_scale(m, x_scale), float_scale(m, w_scale))
    return e.mul(e.op("Cast", m.input(index), to=TensorProto.FLOAT), scale)


def _conv(op: str, channel_axis: int) -> Callable[[Match], list[str]]:
    def rewrite(m: Match) -> list[str]:
        if m.attr("channels_last"):
            raise Refuse("channels_last is not supported", "export the model channels first")
        x = QTensor(0, 1, 2).dequantize(m, 1)
        w = QTensor(3, 4, 5).dequantize(m, channel_axis)
        y = m.emit.op(op, x, w, _bias(m, 8, 1, 4), **attrs_of(m, _CONV_ATTRS))
        return [quantize_as(m, y, 6, 7, 0)]

    return rewrite


def _matmul(m: Match) -> list[str]:
    a = QTensor(0, 1, 2).dequantize(m, m.rank(0) - 2)
    b = QTensor(3, 4, 5).dequantize(m, m.rank(3) - 1)
    return [quantize_as(m, m.emit.matmul(a, b), 6, 7, 0)]


def _gemm(m: Match) -> list[str]:
    """QGemm: A, B quantised, C int32 at scale alpha * a_scale * b_scale; float output without y_scale."""
    e = m.emit
    a = QTensor(0, 1, 2).dequantize(m, 0)
    b = QTensor(3, 4, 5).dequantize(m, 0 if m.attr("transB", 0) else 1)
    alpha = m.attr("alpha", 1.0)
    bias = _bias(m, 6, 1, 4)
    if bias and alpha != 1.0:
        bias = e.mul(bias, e.like(alpha, TensorProto.FLOAT, "alpha"))
    y = e.op("Gemm", a, b, bias, alpha=alpha, transA=m.attr("transA", 0), transB=m.attr("transB", 0))
    return [quantize_as(m, y, 7, 8, 0) if m.input(7) else y]


def _binary(op: str) -> Callable[[Match], list[str]]:
    def rewrite(m: Match) -> list[str]:
        a, b = QTensor(0, 1, 2).dequantize(m, 1), QTensor(3, 4, 5).dequantize(m, 1)
        return [quantize_as(m, m.emit.op(op, a, b), 6, 7, 0)]

    return rewrite


def _unary(body: Callable[[Match, str], str]) -> Callable[[Match], list[str]]:
    def rewrite(m: Match) -> list[str]:
        return [quantize_as(m, body(m, QTensor(0, 1, 2).dequantize(m, 1)), 3, 4, 0)]

    return rewrite


def _pool(op: str, *attrs: str) -> Callable[[Match, str], str]:
    def body(m: Match, x: str) -> str:
        e = m.emit
        last = m.attr("channels_last", 0)
        rank = m.rank(0)
        if last:
            x = e.transpose(x, (0, rank - 1, *range(1, rank - 1)))
        y = e.op(op, x, **attrs_of(m, attrs))
        return e.transpose(y, (0, *range(2, rank), 1)) if last else y

    return body


def _softmax(m: Match, x: str) -> str:
    e = m.emit
    axis, rank = m.attr("axis", -1), m.rank(0)
    axis += rank if axis < 0 else 0
    if m.attr("opset", 13) >= 13 and m.graph.opset >= 13:
        return e.op("Softmax", x, axis=axis)
    if axis == rank - 1:  # the flattening of opset 12 and before changes nothing
        return e.op("Softmax", x, axis=axis)
    raise Refuse(f"softmax over axis {axis} as opset 12 defines it", "export it with opset 13")


def _reduce_mean(m: Match, x: str) -> str:
    axes = m.attr("axes") or list(range(m.rank(0)))
    return m.emit.reduce_mean(x, axes, bool(m.attr("keepdims", 1)))


def _concat(m: Match) -> list[str]:
    parts = [QTensor(k, k + 1, k + 2).dequantize(m, 1) for k in range(2, len(m.node.input), 3)]
    return [quantize_as(m, m.emit.concat(parts, m.attr("axis")), 0, 1, 2)]


def _where(m: Match) -> list[str]:
    a, b = QTensor(1, 2, 3).dequantize(m, 1), QTensor(4, 5, 6).dequantize(m, 1)
    return [quantize_as(m, m.emit.op("Where", m.input(0), a, b), 7, 8, 1)]


def _contrib_dequantize(m: Match) -> list[str]:
    """com.microsoft DequantizeLinear: as the standard one, with 16-bit types before opset 21."""
    e = m.emit
    scale, zero = scalar(m, m.input(1)), scalar(m, m.input(2))
    axis = m.attr("axis", 1)
    per_axis = m.type(scale).shape != ()
    if m.graph.opset >= 21 or m.elem(0) in _EIGHT_BIT:
        return [e.dequantize(m.input(0), scale, zero, axis if per_axis else None)]
    shape = [1] * m.rank(0)
    shape[axis if per_axis else 0] = -1
    if per_axis:
        scale = e.reshape(scale, shape)
    x = e.cast(m.input(0), m.elem(1))
    if zero:
        offset = e.cast(zero, m.elem(1))
        x = e.sub(x, e.reshape(offset, shape) if per_axis else offset)
    return [e.mul(x, scale)]


def _contrib_quantize(m: Match) -> list[str]:
    """com.microsoft QuantizeLinear, per tensor: round half to even, add the zero point, saturate."""
    e = m.emit
    scale, zero = scalar(m, m.input(1)), scalar(m, m.input(2))
    if m.type(scale).shape != ():
        raise Refuse("a com.microsoft QuantizeLinear per axis", "export standard QuantizeLinear")
    elem = m.elem(2) if zero else 2
    if m.graph.opset >= 21 or elem in _EIGHT_BIT:
        return [e.quantize(m.input(0), scale, zero)]
    limits = np.iinfo({4: np.uint16, 5: np.int16}[elem])
    y = e.op("Round", e.div(m.input(0), scale))
    y = e.add2(y, e.cast(zero, m.elem(0)))
    return [e.cast(e.clip(y, limits.min, limits.max, m.elem(0)), elem)]


_EIGHT_BIT = (2, 3)  # uint8, int8


def _is_scalar_already(m: Match) -> str | None:
    for index in (1, 2):
        if m.input(index) and m.type(m.input(index)).shape == (1,):
            return None if m.rank(0) != 1 or m.dim(0, 0) != 1 else "a vector of one element"
    return "the scale is a scalar or per channel"


def _scalar_params(m: Match) -> list[str]:
    """Scale [1] -> scale []: the importer takes a vector for a per-channel scale."""
    attrs = {a.name: m.attr(a.name) for a in m.node.attribute if a.name != "axis"}
    scale, zero = scalar(m, m.input(1)), scalar(m, m.input(2))
    return [m.emit.op(m.node.op_type, m.input(0), scale, zero, **attrs)]


def _row(op: str, rewrite: Callable[[Match], list[str]]) -> RewriteRule:
    return RewriteRule(f"qdq_{op.split(':')[-1]}", (op,), rewrite)


_MS = "com.microsoft:"
RULES = (
    _row("QLinearConv", _conv("Conv", 0)),
    _row(_MS + "QLinearConv", _conv("Conv", 0)),
    _row(_MS + "QLinearConvTranspose", _conv("ConvTranspose", 1)),
    _row("QLinearMatMul", _matmul),
    _row(_MS + "QGemm", _gemm),
    _row(_MS + "QLinearAdd", _binary("Add")),
    _row(_MS + "QLinearMul", _binary("Mul")),
    _row(_MS + "QLinearSigmoid", _unary(lambda m, x: m.emit.op("Sigmoid", x))),
    _row(
        _MS + "QLinearLeakyRelu",
        _unary(lambda m, x: m.emit.op("LeakyRelu", x, alpha=m.attr("alpha", 0.01))),
    ),
    _row(_MS + "QLinearSoftmax", _unary(_softmax)),
    _row(_MS + "QLinearReduceMean", _unary(_reduce_mean)),
    _row(_MS + "QLinearGlobalAveragePool", _unary(_pool("GlobalAveragePool"))),
    _row(
        _MS + "QLinearAveragePool",
        _unary(
            _pool(
                "AveragePool",
                "auto_pad",
                "ceil_mode",
                "count_include_pad",
                "kernel_shape",
                "pads",
                "strides",
            )
        ),
    ),
    _row(_MS + "QLinearConcat", _concat),
    _row(_MS + "QLinearWhere", _where),
    _row(_MS + "DequantizeLinear", _contrib_dequantize),
    _row(_MS + "QuantizeLinear", _contrib_quantize),
    RewriteRule(
        "scalar_qparams",
        ("QuantizeLinear", "DequantizeLinear"),
        _scalar_params,
        _is_scalar_already,
        required=False,
    ),
)
