"""Per-channel scale and shift folded into the weights of the Conv, ConvTranspose, Gemm or MatMul before.

BatchNormalization, and Mul, Div, Add, Sub by a constant, are all y = s x + t with one s and t per
channel; s goes into the weight, t into the bias, both computed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray

from tvmx.frontend.rewrite.qoperator import attrs_of
from tvmx.frontend.rewrite.rule import Match, RewriteRule

Vector = NDArray[np.float64]

_CONVS = ("Conv", "ConvTranspose")
_PRODUCTS = ("Gemm", "MatMul")
_FLOATS = (np.float32, np.float64, np.float16)


@dataclass(frozen=True)
class Affine:
    """y = scale * x + shift; each [channels] or one element. `x` is the index of the input."""

    scale: Vector
    shift: Vector
    x: int


def batch_norm_affine(m: Match) -> Affine | str:
    """Inference-mode BatchNormalization as an Affine, or why it is none."""
    if m.attr("training_mode", 0) or sum(map(bool, m.node.output)) > 1:
        return "it is in training mode"
    values = [m.const(k) for k in range(1, 5)]
    if any(v is None for v in values):
        return "its statistics are not constants"
    gamma, beta, mean, var = (np.asarray(v, np.float64) for v in values)
    scale = gamma / np.sqrt(var + m.attr("epsilon", 1e-5))
    return Affine(scale, beta - mean * scale, 0)


def _vector(m: Match, value: NDArray[np.generic], x: int, axis: int) -> Vector | str:
    """A constant operand as a vector along `axis` of input `x`."""
    known = m.graph.type(m.input(x))
    if known is None or known.shape is None:
        return "the rank of the other operand is unknown"
    rank = len(known.shape)
    if value.size == 1 and value.ndim <= rank:
        return np.asarray(value, np.float64).reshape(1)
    if value.ndim > rank or rank == 0:
        return "the constant widens the result"
    shape = [1] * (rank - value.ndim) + list(value.shape)
    axis %= rank
    if shape[axis] != value.size or known.shape[axis] != value.size:
        return "the constant is not one value per channel"
    return np.asarray(value, np.float64).reshape(-1)


def binary_affine(m: Match, axis: int) -> Affine | str:
    """Mul, Div, Add or Sub by a constant vector along `axis`, or why it is none."""
    for x, c in ((0, 1), (1, 0)):
        value = m.const(c)
        if value is None or m.const(x) is not None:
            continue
        if value.dtype not in _FLOATS:
            return "it is not floating point"
        vector = _vector(m, value, x, axis)
        if isinstance(vector, str):
            return vector
        one, zero = np.ones(1), np.zeros(1)
        op = m.node.op_type
        if op == "Mul":
            return Affine(vector, zero, x)
        if op == "Add":
            return Affine(one, vector, x)
        if op == "Sub":
            return Affine(one, -vector, 0) if x == 0 else Affine(-one, vector, 1)
        if op == "Div" and x == 0 and (vector != 0).all():
            return Affine(1 / vector, zero, 0)
    return "no operand is a constant"


def affine_of(m: Match) -> Affine | str:
    """The node as an Affine over the channels of its producer."""
    if m.node.op_type == "BatchNormalization":
        return batch_norm_affine(m)
    for index in (0, 1):
        maker = m.producer(index)
        if maker is not None and maker.op_type in (*_CONVS, *_PRODUCTS):
            return binary_affine(m, 1 if maker.op_type in _CONVS else -1)
    return "no convolution or product makes its input"


def _reject_fold(m: Match) -> str | None:
    affine = affine_of(m)
    if isinstance(affine, str):
        return affine
    maker = m.producer(affine.x)
    if maker is None or maker.op_type not in (*_CONVS, *_PRODUCTS) or maker.domain != "":
        return "no convolution or product makes its input"
    if not m.used_once(m.input(affine.x)):
        return "the result before it is used elsewhere"
    inner = Match(maker, m.graph)
    weight = inner.const(1)
    if weight is None or weight.dtype not in _FLOATS:
        return "the weight is not a float constant"
    if m.graph.uses[maker.input[1]] > 1:
        return "the weight is shared"
    if inner.input(2) and inner.const(2) is None:
        return "the bias is not a constant"
    if maker.op_type in _PRODUCTS and weight.ndim != 2:
        return "a batched weight"
    if maker.op_type == "MatMul" and affine.shift.any():
        return "a product without bias; the addition fuses by itself"
    if m.node.op_type == "BatchNormalization" and maker.op_type in _PRODUCTS:
        known = m.graph.type(m.input(0))
        if known is None or known.shape is None or len(known.shape) != 2:
            return "its channels are not the columns of the product"
    return None


def fold_affine(m: Match) -> list[str]:
    """conv(x, w, b) * s + t  →  conv(x, w s, b s + t)"""
    affine = affine_of(m)
    assert isinstance(affine, Affine)
    maker = m.producer(affine.x)
    assert maker is not None
    inner = Match(maker, m.graph)
    weight = inner.const(1)
    assert weight is not None
    channels, scaled = _scale_weight(inner, np.asarray(weight, np.float64), affine.scale)
    e = m.emit
    bias = _bias(inner, channels) * affine.scale + affine.shift
    w = e.const(scaled, "weight", weight.dtype)
    has_bias = bool(inner.input(2)) or bool(affine.shift.any())
    b = e.const(bias, "bias", weight.dtype) if has_bias and maker.op_type != "MatMul" else ""
    attrs = attrs_of(inner, tuple(a.name for a in maker.attribute))
    if maker.op_type == "Gemm":
        attrs["beta"] = 1.0
    return [e.op(maker.op_type, maker.input[0], w, b, **attrs)]


def _scale_weight(conv: Match, weight: Vector, scale: Vector) -> tuple[int, Vector]:
    """Number of output channels, and the weight with each one's part multiplied."""
    kind, spatial = conv.node.op_type, [1] * (weight.ndim - 2)
    if kind == "Conv":
        return weight.shape[0], weight * scale.reshape(-1, *[1] * (weight.ndim - 1))
    if kind == "ConvTranspose":
        group = conv.attr("group", 1)
        channels = weight.shape[1] * group
        grouped = weight.reshape(group, -1, *weight.shape[1:])
        scale = np.broadcast_to(scale, (channels,)).reshape(group, 1, -1, *spatial)
        return channels, (grouped * scale).reshape(weight.shape)
    axis = 0 if conv.attr("transB", 0) else 1
    return weight.shape[axis], weight * scale.reshape((-1, 1) if axis == 0 else (1, -1))


def _bias(conv: Match, channels: int) -> Vector:
    value = conv.const(2) if conv.input(2) else None
    if value is None:
        return np.zeros(channels)
    beta = conv.attr("beta", 1.0) if conv.node.op_type == "Gemm" else 1.0
    bias = np.asarray(value, np.float64) * beta
    return np.broadcast_to(bias, (channels,)) if bias.ndim < 2 else bias


def _reject_spread(m: Match) -> str | None:
    affine = batch_norm_affine(m)
    if isinstance(affine, str):
        return affine
    known = m.graph.type(m.input(0))
    return "the rank of its input is unknown" if known is None or known.shape is None else None


def spread_batch_norm(m: Match) -> list[str]:
    """A BatchNormalization that no weight takes: Mul and Add, which fuse with anything."""
    affine = batch_norm_affine(m)
    assert isinstance(affine, Affine)
    e = m.emit
    dtype = onnx.helper.tensor_dtype_to_np_dtype(m.elem(0))
    shape = (-1, *[1] * (m.rank(0) - 2))
    scale = e.const(affine.scale.reshape(shape), "scale", dtype)
    return [e.add2(e.mul(m.input(0), scale), e.const(affine.shift.reshape(shape), "shift", dtype))]


def _reject_scaled_input(m: Match) -> str | None:
    maker = m.producer(0)
    if maker is None or maker.op_type not in ("Mul", "Div"):
        return "its input is not scaled"
    affine = binary_affine(Match(maker, m.graph), 1)
    if isinstance(affine, str):
        return affine
    if not m.used_once(m.input(0)):
        return "the scaled input is used elsewhere"
    weight = m.const(1)
    if weight is None or weight.dtype not in _FLOATS or m.graph.uses[m.input(1)] > 1:
        return "the weight is not a float constant of its own"
    return None


def scale_input(m: Match) -> list[str]:
    """conv(x * s, w)  →  conv(x, w s), s per input channel; padding is zero either way."""
    maker = m.producer(0)
    weight = m.const(1)
    assert maker is not None
    assert weight is not None
    affine = binary_affine(Match(maker, m.graph), 1)
    assert isinstance(affine, Affine)
    group = m.attr("group", 1)
    scale = np.broadcast_to(affine.scale, (weight.shape[1] * group,)).reshape(group, 1, weight.shape[1], -1)
    grouped = np.asarray(weight, np.float64).reshape(group, -1, weight.shape[1], int(np.prod(weight.shape[2:])))
    w = m.emit.const((grouped * scale).reshape(weight.shape), "weight", weight.dtype)
    attrs = attrs_of(m, tuple(a.name for a in m.node.attribute))
    return [m.emit.op("Conv", maker.input[affine.x], w, m.input(2), **attrs)]


RULES = (
    RewriteRule(
        "fold_affine",
        ("BatchNormalization", "Mul", "Div", "Add", "Sub"),
        fold_affine,
        _reject_fold,
        required=False,
    ),
    RewriteRule(
        "spread_BatchNormalization", ("BatchNormalization",), spread_batch_norm, _reject_spread, required=False
    ),
    RewriteRule("scale_into_Conv", ("Conv",), scale_input, _reject_scaled_input, required=False),
)
