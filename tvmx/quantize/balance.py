"""Channels of what a depthwise convolution reads brought to one range, so that one scale serves them all.

x → dwconv(x, w) becomes x → Mul(s) → dwconv(·, w / s), s per channel: the product joins the epilogue of the kernel
before, and a weight with a scale per channel rounds alike whatever its range. It is per-channel quantisation of an
activation for next to nothing. The idea for products: Xiao et al., "SmoothQuant", ICML 2023.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import ModelProto, helper, numpy_helper

from tvmx.quantize.graph import Array, OnnxGraph, attribute

MIN_SPREAD = 4.0  # of the greatest to the least channel; below it one scale serves all well enough
_LIMIT = 64.0  # of one factor: a channel that is quiet on a few samples may not be on others


def balanceable(graph: OnnxGraph) -> dict[str, int]:
    """Tensors that a depthwise convolution alone reads, and its node."""
    found = {}
    for index, node in enumerate(graph.nodes):
        if node.op_type != "Conv" or node.domain not in ("", "ai.onnx"):
            continue
        shape = graph.shape(node.input[1]) or ()
        group = attribute(node, "group", 1)
        if len(shape) != 4 or group < 2 or shape[0] != group or shape[1] != 1:
            continue
        x, weight = node.input[0], node.input[1]
        own = graph.is_constant(weight) and graph.is_float(weight) and graph.consumers[weight] == [index]
        if own and graph.consumers[x] == [index] and x in graph.producer and x not in graph.outputs:
            found[x] = index
    return found


def add_peaks(peaks: dict[str, Array], shown: Mapping[str, Array]) -> None:
    """Take one run's tensors [N, H, W, C] into the greatest magnitude of each channel."""
    for name, values in shown.items():
        peak = np.abs(values).max(axis=(0, 1, 2))
        peak = np.where(np.isfinite(peak), peak, 0)
        peaks[name] = np.maximum(peaks[name], peak) if name in peaks else peak


def balance(graph: OnnxGraph, peaks: Mapping[str, Array]) -> tuple[ModelProto, int]:
    """The model with a factor per channel before its depthwise convolutions, and how many got one.

    `peaks`: tensor of `balanceable` → greatest magnitude of each channel. A channel that was always 0 keeps its own.
    """
    changed: dict[int, tuple[str, Array]] = {}
    for name, index in balanceable(graph).items():
        peak = np.asarray(peaks.get(name, np.zeros(0)), np.float64)
        used = peak > 0
        if not used.any() or peak[used].max() < MIN_SPREAD * peak[used].min():
            continue
        factor = np.where(used, np.minimum(peak[used].max() / np.where(used, peak, 1.0), _LIMIT), 1.0)
        changed[index] = name, factor.astype(np.float32)
    model = ModelProto()
    model.CopyFrom(graph.proto)
    nodes, scaled = [], {}
    for index, node in enumerate(model.graph.node):
        if index in changed:
            name, factor = changed[index]
            shape = (1, -1, 1, 1)
            weight = graph.constant(node.input[1])
            assert weight is not None
            divided = weight / factor.reshape(-1, 1, 1, 1)
            scaled[node.input[1]] = numpy_helper.from_array(divided.astype(np.float32), node.input[1])
            constant, result = f"{name}_balance", f"{name}_balanced"
            model.graph.initializer.append(numpy_helper.from_array(factor.reshape(shape), constant))
            nodes.append(helper.make_node("Mul", [name, constant], [result], result))
            node.input[0] = result
        nodes.append(node)
    kept = [n.SerializeToString() for n in nodes]
    del model.graph.node[:]
    for data in kept:
        model.graph.node.add().ParseFromString(data)
    for tensor in model.graph.initializer:
        if tensor.name in scaled:
            tensor.CopyFrom(scaled[tensor.name])
    return model, len(changed)
