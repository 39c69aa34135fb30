"""Cross-layer equalisation: weight ranges of neighbouring convolutions balanced, the function unchanged.

Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, section 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, numpy_helper

from tvmx.quantize.graph import Array, OnnxGraph, attribute

# Between the two layers only what commutes with a positive factor per channel.
_HOMOGENEOUS = frozenset({"Relu", "LeakyRelu", "MaxPool", "AveragePool", "GlobalAveragePool", "Identity"})
_ROUNDS = 20
_LIMIT = 1e3  # of one factor in all: dead channels would otherwise be scaled without end


@dataclass(frozen=True)
class _Pair:
    """Layer `first` (its output channels) feeds layer `second` (its input channels) alone."""

    first: int
    second: int


def equalize(model: ModelProto) -> tuple[ModelProto, int]:
    """The model with equalised weights, and how many pairs of layers there were.

    conv2(relu(conv1(x))) = conv2'(relu(conv1'(x))) with w1' = w1 / s, b1' = b1 / s, w2' = w2 s and
    s = sqrt(r1 / r2), r the range of a channel in each weight. Repeated until it settles.
    """
    graph = OnnxGraph(model)
    pairs = [p for k in range(len(graph.nodes)) if (p := _pair(graph, k)) is not None]
    if not pairs:
        return model, 0
    arrays = {name: np.array(graph.constant(name), np.float64) for p in pairs for name in _weights(graph, p)}
    total = {p: np.ones(_channels(graph, p.first)) for p in pairs}
    for _ in range(_ROUNDS):
        largest = max(_balance(graph, p, arrays, total[p]) for p in pairs)
        if largest < 1e-3:
            break
    result = ModelProto()
    result.CopyFrom(model)
    for tensor in result.graph.initializer:
        if tensor.name in arrays:
            tensor.CopyFrom(numpy_helper.from_array(arrays[tensor.name].astype(np.float32), tensor.name))
    return result, len(pairs)


def _pair(graph: OnnxGraph, first: int) -> _Pair | None:
    """The layer whose only reader, through homogeneous operators, is another layer."""
    if not _own_weights(graph, first):
        return None
    index = first
    while True:
        output = graph.nodes[index].output[0]
        readers = graph.consumers.get(output, [])
        if output in graph.outputs or len(readers) != 1:
            return None
        index = readers[0]
        node = graph.nodes[index]
        if node.input[0] != output or len([o for o in node.output if o]) != 1:
            return None
        if node.op_type == "Conv":
            return _Pair(first, index) if _own_weights(graph, index) else None
        if node.op_type not in _HOMOGENEOUS:
            return None


def _own_weights(graph: OnnxGraph, index: int) -> bool:
    """A Conv, dense or depthwise, whose float constants nobody else reads."""
    node = graph.nodes[index]
    if node.op_type != "Conv" or node.domain not in ("", "ai.onnx"):
        return False
    for name in node.input[1:]:
        if name and not (graph.is_constant(name) and graph.is_float(name) and graph.consumers[name] == [index]):
            return False
    group = attribute(node, "group", 1)
    return group == 1 or _depthwise(graph, index)


def _depthwise(graph: OnnxGraph, index: int) -> bool:
    """One filter a channel: the same axis of the weight is input and output."""
    node = graph.nodes[index]
    shape = graph.shape(node.input[1]) or ()
    return len(shape) > 1 and attribute(node, "group", 1) == shape[0] and shape[1] == 1


def _weights(graph: OnnxGraph, pair: _Pair) -> list[str]:
    return [n for k in (pair.first, pair.second) for n in graph.nodes[k].input[1:] if n]


def _channels(graph: OnnxGraph, index: int) -> int:
    return int((graph.shape(graph.nodes[index].input[1]) or (0,))[0])


def _balance(graph: OnnxGraph, pair: _Pair, arrays: dict[str, Array], total: Array) -> float:
    """Scale both weights of a pair in place; returns the largest change, as |log s|."""
    first, second = graph.nodes[pair.first], graph.nodes[pair.second]
    w1, w2 = arrays[first.input[1]], arrays[second.input[1]]
    axis = 0 if _depthwise(graph, pair.second) else 1
    r1 = np.abs(w1).reshape(len(w1), -1).max(1)
    r2 = np.abs(np.moveaxis(w2, axis, 0)).reshape(len(w1), -1).max(1)
    usable = (r1 > 0) & (r2 > 0)
    scale = np.ones(len(w1))
    scale[usable] = np.sqrt(r1[usable] / r2[usable])
    scale = np.clip(total * scale, 1 / _LIMIT, _LIMIT) / total
    total *= scale
    w1 /= scale.reshape(-1, *[1] * (w1.ndim - 1))
    w2 *= scale.reshape([-1 if k == axis else 1 for k in range(w2.ndim)])
    if len(first.input) > 2 and first.input[2]:
        arrays[first.input[2]] /= scale
    return float(np.abs(np.log(scale)).max())
