"""No-ops removed, Gemm and constant GatherND in plain form, equal initializers merged."""

from __future__ import annotations

import hashlib

import numpy as np
import onnx

from tvmx.frontend.rewrite.context import rename_uses
from tvmx.frontend.rewrite.rule import Match, RewriteRule


def _reject_identity(m: Match) -> str | None:
    if m.node.output[0] in m.graph.outputs:
        return "its result is an output of the model"
    return None


def _reject_dropout(m: Match) -> str | None:
    if m.wants(1) and (m.graph.uses[m.node.output[1]] or m.node.output[1] in m.graph.outputs):
        return "its mask is used"
    if m.input(2):
        training = m.const(2)
        if training is None or training.any():
            return "it is in training mode"
    return None


def remove_dropout(m: Match) -> list[str]:
    """At inference Dropout copies its input."""
    if m.node.output[0] in m.graph.outputs:
        return [m.emit.op("Identity", m.input(0)), ""]
    return [m.input(0), ""]


def _reject_gemm(m: Match) -> str | None:
    weight = m.const(1)
    if weight is None or weight.dtype not in (np.float32, np.float64, np.float16):
        return "B is not a float constant"
    if m.graph.uses[m.input(1)] > 1:
        return "B is shared"
    plain = (
        m.attr("alpha", 1.0) == 1.0
        and (m.attr("beta", 1.0) == 1.0 or not m.input(2))
        and not m.attr("transA", 0)
        and not m.attr("transB", 0)
    )
    return "it is plain" if plain else None


def plain_gemm(m: Match) -> list[str]:
    """alpha A' B' + beta C  →  A (alpha B) + (beta C), the factors and transposes in the constants."""
    e = m.emit
    a = e.transpose(m.input(0), (1, 0)) if m.attr("transA", 0) else m.input(0)
    weight = m.const(1)
    assert weight is not None
    b = weight.T if m.attr("transB", 0) else weight
    b = np.asarray(b, np.float64) * m.attr("alpha", 1.0)
    c = m.input(2)
    beta = m.attr("beta", 1.0)
    if c and beta != 1.0:
        c = e.mul(c, e.like(beta, m.elem(1), "beta")) if beta else ""
    return [e.op("Gemm", a, e.const(np.ascontiguousarray(b), "weight", weight.dtype), c)]


def _reject_gather_nd(m: Match) -> str | None:
    indices = m.const(1)
    if indices is None or m.attr("batch_dims", 0):
        return "its indices are not constants, or it has batch dimensions"
    known = m.graph.type(m.input(0))
    if known is None or known.size is None:
        return "the shape of its data is unknown"
    dims = np.array([d for d in known.shape or () if isinstance(d, int)])[: indices.shape[-1]]
    index = np.asarray(indices, np.int64)
    if indices.ndim < 1 or (index < -dims).any() or (index >= dims).any():
        return "an index is out of range"
    return None


def flat_gather_nd(m: Match) -> list[str]:
    """GatherND with constant indices: a Gather of rows, or only a Reshape when it takes all in order."""
    e = m.emit
    shape, indices = m.shape(0), m.const(1)
    assert indices is not None
    depth = indices.shape[-1]
    index = np.asarray(indices, np.int64)
    index = np.where(index < 0, index + np.array(shape[:depth], np.int64), index)
    rows = np.ravel_multi_index(tuple(np.moveaxis(index, -1, 0)), shape[:depth]) if depth else np.zeros(1)
    count = int(np.prod(shape[:depth]))
    result = [*indices.shape[:-1], *shape[depth:]]
    if np.array_equal(rows.reshape(-1), np.arange(count)):
        return [e.reshape(m.input(0), result)]
    data = e.reshape(m.input(0), (count, *shape[depth:]))
    return [e.reshape(e.op("Gather", data, e.const(rows.reshape(-1), "rows", np.int64), axis=0), result)]


def merge_initializers(model: onnx.ModelProto) -> int:
    """Merge initializers of equal type, shape and bytes, in place; returns how many went.

    Those that are also inputs or outputs of the model stay.
    """
    graph = model.graph
    named = {v.name for v in (*graph.input, *graph.output)}
    first: dict[tuple[int, tuple[int, ...], bytes], str] = {}
    renamed: dict[str, str] = {}
    kept = []
    for tensor in graph.initializer:
        if tensor.name in named or tensor.data_location == onnx.TensorProto.EXTERNAL:
            kept.append(tensor)
            continue
        data = tensor.raw_data or onnx.numpy_helper.to_array(tensor).tobytes()
        key = (tensor.data_type, tuple(tensor.dims), hashlib.blake2b(data, digest_size=16).digest())
        if key in first:
            renamed[tensor.name] = first[key]
        else:
            first[key] = tensor.name
            kept.append(tensor)
    if renamed:
        for node in graph.node:
            rename_uses(node, renamed)
        remaining = [onnx.TensorProto.FromString(t.SerializeToString()) for t in kept]
        del graph.initializer[:]
        graph.initializer.extend(remaining)
    return len(renamed)


RULES = (
    RewriteRule("remove_Identity", ("Identity",), lambda m: [m.input(0)], _reject_identity, required=False),
    RewriteRule("remove_Dropout", ("Dropout",), remove_dropout, _reject_dropout, required=False),
    RewriteRule("flat_GatherND", ("GatherND",), flat_gather_nd, _reject_gather_nd, required=False),
    RewriteRule("plain_Gemm", ("Gemm",), plain_gemm, _reject_gemm, required=False),
)
