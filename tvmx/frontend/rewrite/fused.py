"""com.microsoft fusions taken apart again, into standard operators the fuser may combine its way."""

from __future__ import annotations

import math
from collections.abc import Callable

from onnx import TensorProto

from tvmx.frontend.rewrite.activations import activations
from tvmx.frontend.rewrite.context import Refuse
from tvmx.frontend.rewrite.qoperator import attrs_of
from tvmx.frontend.rewrite.rule import Match, RewriteRule


def layer_norm(m: Match, x: str, axis: int, scale: str, bias: str, outputs: int = 1) -> list[str]:
    """[Y, mean, 1/std] of LayerNormalization; the standard operator from opset 17 on."""
    e = m.emit
    epsilon = m.attr("epsilon", 1e-5)
    if m.graph.opset >= 17 and outputs == 1:
        return e.ops("LayerNormalization", x, scale, bias, outputs=1, axis=axis, epsilon=epsilon)
    elem = m.elem(0)
    axes = _axes(m, axis)
    mean = e.reduce_mean(x, axes)
    centred = e.sub(x, mean)
    variance = e.reduce_mean(e.mul(centred, centred), axes)
    std = e.op("Sqrt", e.add2(variance, e.like(epsilon, elem, "epsilon")))
    y = e.mul(e.div(centred, std), scale)
    inverse = e.op("Reciprocal", std) if outputs > 2 else ""
    return [e.add2(y, bias) if bias else y, mean, inverse]


def rms_norm(m: Match, x: str, axis: int, scale: str) -> str:
    """x / sqrt(mean(x²) + epsilon) * scale"""
    e = m.emit
    mean = e.reduce_mean(e.mul(x, x), _axes(m, axis))
    epsilon = e.like(m.attr("epsilon", 1e-5), m.elem(0), "epsilon")
    return e.mul(e.div(x, e.op("Sqrt", e.add2(mean, epsilon))), scale)


def _axes(m: Match, axis: int) -> list[int]:
    return list(range(axis, 0)) if axis < 0 else list(range(axis, m.rank(0)))


def _old_layer_norm(m: Match) -> list[str]:
    """LayerNormalization as ONNX Runtime's optimiser writes it into models before opset 17."""
    axis = m.attr("axis", -1)
    outputs = 3 if m.wants(1) or m.wants(2) else 1
    return layer_norm(m, m.input(0), axis, m.input(1), m.input(2), outputs)


def _knows_layer_norm(m: Match) -> str | None:
    return "opset 17 has it" if m.graph.opset >= 17 and m.node.domain == "" else None


def _skip_layer_norm(m: Match) -> list[str]:
    """input, skip, gamma, beta, bias -> norm(input + skip + bias), mean, 1/std, the sum."""
    e = m.emit
    total = e.add2(m.input(0), m.input(1))
    if m.input(4):
        total = e.add2(total, m.input(4))
    wants = m.wants(1) or m.wants(2)
    y, *rest = layer_norm(m, total, -1, m.input(2), m.input(3), 3 if wants else 1)
    return [y, *(rest or ["", ""]), total]


def _skip_rms_norm(m: Match) -> list[str]:
    """input, skip, gamma, bias -> rms norm of the sum, -, -, the sum."""
    if m.wants(1) or m.wants(2):
        raise Refuse("mean and inverse deviation are asked for", "remove those outputs")
    e = m.emit
    total = e.add2(m.input(0), m.input(1))
    if m.input(3):
        total = e.add2(total, m.input(3))
    return [rms_norm(m, total, -1, m.input(2)), "", "", total]


def _embed_layer_norm(m: Match) -> list[str]:
    """ids, segments, word, position, segment tables, gamma, beta, mask, position_ids."""
    e = m.emit
    ids, segments, words, positions, table, gamma, beta, mask, position_ids = (m.input(k) for k in range(9))
    total = e.op("Gather", words, ids)
    if position_ids:
        total = e.add2(total, e.op("Gather", positions, position_ids))
    else:
        total = e.add2(total, e.slice(positions, 0, 0, m.dim(0, 1)))
    if segments and table:
        total = e.add2(total, e.op("Gather", table, segments))
    y = e.ops(
        "LayerNormalization",
        total,
        gamma,
        beta,
        outputs=1,
        domain="" if m.graph.opset >= 17 else "com.microsoft",
        axis=-1,
        epsilon=m.attr("epsilon", 1e-12),
    )[0]
    index = ""
    if m.wants(1):
        if mask and m.attr("mask_index_type", 1):
            index = e.op("Cast", e.reduce_sum(mask, [1], keepdims=False), to=TensorProto.INT32)
        else:
            index = e.const([0] * m.dim(0, 0), "no_mask", "int32")
    return [y, index, total]


def _gelu(m: Match, x: str) -> str:
    """0.5 x (1 + erf(x / sqrt 2))"""
    e, elem = m.emit, m.elem(0)
    if m.graph.opset >= 20:
        return e.op("Gelu", x)
    bent = e.op("Erf", e.mul(x, e.like(math.sqrt(0.5), elem, "sqrt_half")))
    return e.mul(e.mul(x, e.like(0.5, elem, "half")), e.add2(bent, e.like(1.0, elem, "one")))


def _fast_gelu(m: Match) -> list[str]:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x³))), x with an optional bias"""
    e, elem = m.emit, m.elem(0)
    x = e.add2(m.input(0), m.input(1)) if m.input(1) else m.input(0)
    if m.graph.opset >= 20:
        return [e.op("Gelu", x, approximate="tanh")]
    root = math.sqrt(2 / math.pi)
    square = e.mul(e.mul(x, x), e.like(0.044715 * root, elem, "cubic"))
    inner = e.mul(x, e.add2(square, e.like(root, elem, "linear")))
    bent = e.add2(e.op("Tanh", inner), e.like(1.0, elem, "one"))
    return [e.mul(e.mul(x, e.like(0.5, elem, "half")), bent)]


def _quick_gelu(m: Match) -> list[str]:
    e = m.emit
    x = m.input(0)
    alpha = e.like(m.attr("alpha", 1.702), m.elem(0), "alpha")
    return [e.mul(x, e.op("Sigmoid", e.mul(x, alpha)))]


def _fused_matmul(m: Match) -> list[str]:
    """transA/transB swap the last two axes; transBatchA/B move the first axis before the last."""
    e = m.emit
    operands = []
    for index, side in ((0, "A"), (1, "B")):
        rank = m.rank(index)
        perm = list(range(rank))
        if m.attr(f"transBatch{side}", 0):
            perm = [*perm[1:-1], perm[0], perm[-1]]
        if m.attr(f"trans{side}", 0) and rank > 1:
            perm[-1], perm[-2] = perm[-2], perm[-1]
        operands.append(e.transpose(m.input(index), perm))
    y = e.matmul(*operands)
    alpha = m.attr("alpha", 1.0)
    return [y if alpha == 1.0 else e.mul(y, e.like(alpha, m.elem(0), "alpha"))]


_CONV = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def _activate(m: Match, x: str) -> str:
    """The `activation` attribute of FusedConv and FusedGemm; Clip takes (min, max)."""
    name = m.attr("activation", "")
    if not name:
        return x
    params = m.attr("activation_params", [])
    if not params:
        params = [m.attr(n) for n in ("activation_alpha", "activation_beta") if m.attr(n)]
    elem = m.elem(0)
    if name == "Clip":
        low, high = params
        return m.emit.clip(x, low, high, elem)
    return activations(m.emit, [name], params[:1], params[1:], elem)[0](x)


def _fused_conv(m: Match) -> list[str]:
    e = m.emit
    y = e.op("Conv", m.input(0), m.input(1), m.input(2), **attrs_of(m, _CONV))
    if m.input(3):
        y = e.add2(y, m.input(3))
    return [_activate(m, y)]


def _fused_gemm(m: Match) -> list[str]:
    attrs = attrs_of(m, ("alpha", "beta", "transA", "transB"))
    return [_activate(m, m.emit.op("Gemm", *(m.input(k) for k in range(3)), **attrs))]


_MS = "com.microsoft:"


def _row(op: str, rewrite: Callable[[Match], list[str]]) -> RewriteRule:
    return RewriteRule(f"expand_{op}", (_MS + op,), rewrite)


RULES = (
    RewriteRule(
        "expand_LayerNormalization",
        ("LayerNormalization", _MS + "LayerNormalization"),
        _old_layer_norm,
        _knows_layer_norm,
    ),
    RewriteRule(
        "expand_SimplifiedLayerNormalization",
        ("SimplifiedLayerNormalization", _MS + "SimplifiedLayerNormalization"),
        lambda m: [rms_norm(m, m.input(0), m.attr("axis", -1), m.input(1))],
    ),
    _row("SkipLayerNormalization", _skip_layer_norm),
    _row("SkipSimplifiedLayerNormalization", _skip_rms_norm),
    _row("EmbedLayerNormalization", _embed_layer_norm),
    _row("Gelu", lambda m: [_gelu(m, m.input(0))]),
    _row("BiasGelu", lambda m: [_gelu(m, m.emit.add2(m.input(0), m.input(1)))]),
    _row("FastGelu", _fast_gelu),
    _row("QuickGelu", _quick_gelu),
    _row("FusedMatMul", _fused_matmul),
    _row("TransposeMatMul", _fused_matmul),
    _row("FusedConv", _fused_conv),
    _row("FusedGemm", _fused_gemm),
)
