"""Small numeric operators: group and mean-variance norms, LpNormalization, CumProd, Det, rotary embedding."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from tvmx.frontend.rewrite.context import Refuse
from tvmx.frontend.rewrite.emit import Emitter
from tvmx.frontend.rewrite.rule import Match, RewriteRule


def lp_normalization(m: Match) -> list[str]:
    """x / norm(x) along an axis; a zero vector stays zero."""
    e = m.emit
    op = {1: "ReduceL1", 2: "ReduceL2"}.get(m.attr("p", 2))
    if op is None:
        raise Refuse(f"p = {m.attr('p')}", "use 1 or 2")
    norm = e.axes_op(op, m.input(0), [m.attr("axis", -1)], 18, keepdims=1)
    zero, one = (e.like(v, m.elem(0)) for v in (0.0, 1.0))
    return [e.div(m.input(0), e.op("Where", e.op("Equal", norm, zero), one, norm))]


def group_normalization(m: Match) -> list[str]:
    """Mean and variance over [N, groups, -1], in two passes; scale per group (opset 18) or channel.

    ONNX's own function body takes E[x²] - E[x]², which cancels for data far from zero.
    """
    e = m.emit
    groups, channels, rank = m.attr("num_groups"), m.dim(0, 1), m.rank(0)
    per_group = m.graph.opset < 21
    if m.dim(1, 0) != (groups if per_group else channels):
        raise Refuse(f"a scale of {m.dim(1, 0)} for {groups} groups, {channels} channels", "repair the model")
    stash = m.attr("stash_type", TensorProto.FLOAT) if not per_group else m.elem(0)
    x = e.cast(e.reshape(m.input(0), (0, groups, -1)), stash)
    centred = e.sub(x, e.reduce_mean(x, [2]))
    variance = e.reduce_mean(e.mul(centred, centred), [2])
    epsilon = e.like(m.attr("epsilon", 1e-5), stash, "epsilon")
    y = e.cast(e.div(centred, e.op("Sqrt", e.add2(variance, epsilon))), m.elem(0))
    per = groups if per_group else channels
    y = e.reshape(y, (0, per, -1))
    y = e.add2(e.mul(y, e.reshape(m.input(1), (1, per, 1))), e.reshape(m.input(2), (1, per, 1)))
    return [y if rank == 3 and not per_group else e.reshape(y, m.shape(0))]


def mean_variance_normalization(m: Match) -> list[str]:
    """(x - mean) / (deviation + 1e-9) over `axes`, in two passes."""
    e = m.emit
    axes = m.attr("axes", [0, 2, 3])
    centred = e.sub(m.input(0), e.reduce_mean(m.input(0), axes))
    deviation = e.op("Sqrt", e.reduce_mean(e.mul(centred, centred), axes))
    return [e.div(centred, e.add2(deviation, e.like(1e-9, m.elem(0), "epsilon")))]


def cum_prod(m: Match) -> list[str]:
    """Inclusive or exclusive running product, in log2(n) products of shifted copies."""
    e = m.emit
    axis = int(m.need_const(1, "the axis").reshape(-1)[0]) % m.rank(0)
    shape = list(m.shape(0))
    length, backwards = shape[axis], bool(m.attr("reverse", 0))
    dtype = helper.tensor_dtype_to_np_dtype(m.elem(0))

    def shifted(x: str, by: int) -> str:
        ones = e.const(np.ones([*shape[:axis], by, *shape[axis + 1 :]], dtype), "ones")
        if backwards:
            return e.concat([e.slice(x, axis, by, length), ones], axis)
        return e.concat([ones, e.slice(x, axis, 0, length - by)], axis)

    y = m.input(0)
    if m.attr("exclusive", 0) and length:
        y = shifted(y, 1)
    by = 1
    while by < length:
        y = e.mul(y, shifted(y, by))
        by *= 2
    return [y if y != m.input(0) else e.op("Identity", y)]


def det(m: Match) -> list[str]:
    """Determinant of [..., n, n] with n up to 4, by the first row."""
    e = m.emit
    rank = m.rank(0)
    n = m.dim(0, rank - 1)
    if not 1 <= n <= 4 or m.dim(0, rank - 2) != n:
        raise Refuse(f"a determinant of {m.dim(0, rank - 2)} by {n}", "use square matrices of 1 to 4")
    rows = [e.select(m.input(0), rank - 2, i) for i in range(n)]
    entries = [[e.select(row, rank - 2, j) for j in range(n)] for row in rows]
    return [_minor(e, entries)]


def _minor(e: Emitter, rows: list[list[str]]) -> str:
    if len(rows) == 1:
        return rows[0][0]
    total = ""
    for j, value in enumerate(rows[0]):
        term = e.mul(value, _minor(e, [[*row[:j], *row[j + 1 :]] for row in rows[1:]]))
        total = term if not total else (e.sub if j % 2 else e.add2)(total, term)
    return total


def rotary_embedding(m: Match) -> list[str]:
    """com.microsoft RotaryEmbedding: x [B, S, N*D] or [B, N, S, D], positions, cos and sin tables."""
    e = m.emit
    half = m.dim(2, 1)
    rotary = m.attr("rotary_embedding_dim", 0) or 2 * half
    if rotary != 2 * half or m.attr("is_packed_batching", 0):
        raise Refuse("packed batches or tables of another width", "export without them")
    four = m.rank(0) == 4
    if four:
        x = e.transpose(m.input(0), (0, 2, 1, 3))
        batch, heads, steps, size = m.shape(0)
    else:
        batch, steps, width = m.shape(0)
        heads = m.attr("num_heads", 0) or width // rotary
        size = width // heads
        x = e.reshape(m.input(0), (batch, steps, heads, size))
    positions = m.input(1)
    if m.type(positions).size == 1 and steps * batch != 1:
        positions = e.add2(e.reshape(positions, (1, 1)), e.const(np.arange(steps)[None], "steps", np.int64))
    cos, sin = (e.unsqueeze(e.op("Gather", m.input(k), positions), 2) for k in (2, 3))  # [B, S, 1, D/2]
    turned, rest = x, ""
    if rotary < size:
        turned, rest = e.slice(x, 3, 0, rotary), e.slice(x, 3, rotary, size)
    if m.attr("interleaved", 0):
        a, b = (e.slice(turned, 3, k, rotary, 2) for k in (0, 1))
    else:
        a, b = e.slice(turned, 3, 0, half), e.slice(turned, 3, half, rotary)
    real = e.sub(e.mul(a, cos), e.mul(b, sin))
    imag = e.add2(e.mul(a, sin), e.mul(b, cos))
    if m.attr("interleaved", 0):
        pairs = e.concat([e.unsqueeze(real, 4), e.unsqueeze(imag, 4)], 4)
        y = e.reshape(pairs, (batch, steps, heads, rotary))
    else:
        y = e.concat([real, imag], 3)
    if rest:
        y = e.concat([y, rest], 3)
    return [e.transpose(y, (0, 2, 1, 3)) if four else e.reshape(y, (batch, steps, heads * size))]


RULES = (
    RewriteRule("center_GroupNormalization", ("GroupNormalization",), group_normalization),
    RewriteRule("center_MeanVariance", ("MeanVarianceNormalization",), mean_variance_normalization),
    RewriteRule("divide_LpNormalization", ("LpNormalization",), lp_normalization),
    RewriteRule("shift_CumProd", ("CumProd",), cum_prod),
    RewriteRule("minors_Det", ("Det",), det),
    RewriteRule("rotate_RotaryEmbedding", ("com.microsoft:RotaryEmbedding",), rotary_embedding),
)
