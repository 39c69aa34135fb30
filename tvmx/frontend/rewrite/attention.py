"""com.microsoft Attention and QAttention: the projections, heads, mask and softmax written out."""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from tvmx.frontend.rewrite.context import Refuse
from tvmx.frontend.rewrite.qparams import scalar
from tvmx.frontend.rewrite.rule import Match, RewriteRule

MASKED = -10000.0  # what ONNX Runtime adds to the score of a masked position by default


def attention(m: Match) -> list[str]:
    """input [B, S, I], weights [I, 3H], bias [3H], mask → [B, S, H]. Past, relative bias and rotary are refused."""
    for index, what in ((4, "a past state"), (5, "an attention bias"), (6, "a past length")):
        if m.input(index):
            raise Refuse(f"it has {what}", "export the model without it")
    y = m.emit.matmul(m.input(0), m.input(1))
    return _heads(m, m.emit.add2(y, m.input(2)) if m.input(2) else y, m.dim(1, 1), m.elem(0), 3)


def quantized_attention(m: Match) -> list[str]:
    """QAttention: input, weight, bias, input_scale, weight_scale, mask, input_zero, weight_zero, past."""
    e = m.emit
    if m.input(8):
        raise Refuse("it has a past state", "export the model without it")
    y = e.op("MatMulInteger", m.input(0), m.input(1), m.input(6), m.input(7))
    scale = e.mul(scalar(m, m.input(3)), scalar(m, m.input(4)))
    y = e.mul(e.op("Cast", y, to=TensorProto.FLOAT), scale)
    return _heads(m, e.add2(y, m.input(2)), m.dim(1, 1), TensorProto.FLOAT, 5)


def _heads(m: Match, joint: str, width: int, elem: int, mask: int) -> list[str]:
    """softmax(Q Kᵀ / √d + mask) V of a joint projection [B, S, 3H]."""
    e = m.emit
    if m.wants(1) or m.attr("do_rotary", 0) or m.attr("past_present_share_buffer", 0):
        raise Refuse("it keeps a present state or turns its heads", "export the model without them")
    heads = int(m.attr("num_heads"))
    sizes = m.attr("qkv_hidden_sizes") or [width // 3] * 3
    batch, length = m.dim(0, 0), m.dim(0, 1)
    parts, start = [], 0
    for size in sizes:
        part = e.slice(joint, 2, start, start + size)
        parts.append(e.transpose(e.reshape(part, (batch, length, heads, size // heads)), (0, 2, 1, 3)))
        start += size
    query, key, value = parts
    root = m.attr("scale", 0.0) or 1 / math.sqrt(sizes[0] // heads)
    scores = e.mul(e.matmul(query, e.transpose(key, (0, 1, 3, 2))), e.like(root, elem, "scale"))
    for bias in (_mask(m, mask, batch, length, elem), _causal(m, length, elem)):
        scores = e.add2(scores, bias) if bias else scores
    mixed = e.matmul(e.op("Softmax", scores, axis=-1), value)
    return [e.reshape(e.transpose(mixed, (0, 2, 1, 3)), (batch, length, sizes[2]))]


def _mask(m: Match, index: int, batch: int, length: int, elem: int) -> str:
    """What is added to the scores [B, heads, S, T]: a raw mask [B, T] or [B, S, T], or the lengths [B]."""
    e = m.emit
    if not m.input(index):
        return ""
    mask, rank = m.input(index), m.rank(index)
    if rank == 1:
        if m.dim(index, 0) != batch:
            raise Refuse("its mask holds starts and ends", "export it with a mask [batch, length]")
        places = e.reshape(e.const(np.arange(length), "places", np.int32), (1, length))
        mask = e.op("Cast", e.op("Less", places, e.reshape(mask, (batch, 1))), to=TensorProto.INT32)
    shape = (batch, 1, 1, length) if rank in (1, 2) else (batch, 1, length, length) if rank == 3 else None
    if shape is None:
        raise Refuse(f"a mask of rank {rank}", "export it with a mask [batch, length]")
    hidden = e.sub(e.like(1.0, elem, "one"), e.cast(e.reshape(mask, shape), elem))
    return e.mul(hidden, e.like(m.attr("mask_filter_value", MASKED), elem, "masked"))


def _causal(m: Match, length: int, elem: int) -> str:
    """Later positions are hidden where the attention is unidirectional."""
    if not m.attr("unidirectional", 0):
        return ""
    later = np.triu(np.full((length, length), m.attr("mask_filter_value", MASKED)), 1)
    return m.emit.cast(m.emit.const(later.astype(np.float32), "causal"), elem)


def quantized_embedding(m: Match) -> list[str]:
    """QEmbedLayerNormalization: EmbedLayerNormalization over dequantised tables and parameters."""
    e = m.emit
    tables = [e.dequantize(m.input(i), scalar(m, m.input(s)), scalar(m, m.input(z))) if m.input(i) else ""
              for i, s, z in ((2, 8, 13), (3, 9, 14), (4, 10, 15), (5, 11, 16), (6, 12, 17))]  # fmt: skip
    outputs = 2 if m.wants(1) else 1
    y = e.ops(
        "EmbedLayerNormalization", m.input(0), m.input(1), *tables, m.input(7),
        outputs=outputs, domain="com.microsoft", epsilon=m.attr("epsilon", 1e-12),
    )  # fmt: skip
    return [*y, ""][:2]


_MS = "com.microsoft:"
RULES = (
    RewriteRule("expand_Attention", (_MS + "Attention",), attention),
    RewriteRule("expand_QAttention", (_MS + "QAttention",), quantized_attention),
    RewriteRule("expand_QEmbedLayerNormalization", (_MS + "QEmbedLayerNormalization",), quantized_embedding),
)
