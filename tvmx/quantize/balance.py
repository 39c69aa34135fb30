"""Channels of what a convolution reads brought nearer to one range, so that one scale serves them all.

x → conv(x, w) becomes x → Mul(s) → conv(·, w / s), s per channel: the product joins the epilogue of the kernel before.
For a depthwise convolution, whose weight has a scale per channel, it is per-channel quantisation of an activation for
next to nothing. In a dense one the weight has to take the factors up beside each other, so they go only part of the
way, and only where a model of both noises says that it pays. The idea for products: Xiao et al., "SmoothQuant", ICML
2023.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import ModelProto, helper, numpy_helper

from tvmx.quantize.graph import Array, OnnxGraph, attribute
from tvmx.quantize.placement import BINARY, UNARY

MIN_SPREAD = 4.0  # of the greatest to the least channel; below it one scale serves all well enough
MIN_GAIN = 2.0  # in noise power, by the model, that a product per element has to be worth
_STRENGTHS = (0.125, 0.25, 0.375, 0.5)  # exponents of the factors of a dense convolution
_HALF = 0.5  # that of a depthwise one: half way keeps room for what the samples did not show, and costs next to nothing
_WEIGHT_NOISE = 0.2  # of weights rounded to the data, against each to its nearest step
_LIMIT = 64.0  # of the ratio of two channels: one that is quiet on a few samples may not be on others


def balanceable(graph: OnnxGraph) -> dict[str, int]:
    """Tensors that one convolution alone reads, and its node."""
    found = {}
    for index, node in enumerate(graph.nodes):
        if node.op_type != "Conv" or node.domain not in ("", "ai.onnx"):
            continue
        shape = graph.shape(node.input[1]) or ()
        if len(shape) != 4 or not (_depthwise(graph, index) or attribute(node, "group", 1) == 1):
            continue
        x, weight = node.input[0], node.input[1]
        own = graph.is_constant(weight) and graph.is_float(weight) and graph.consumers[weight] == [index]
        if own and graph.consumers[x] == [index] and x not in graph.outputs and _fuses(graph, x):
            found[x] = index
    return found


def _depthwise(graph: OnnxGraph, index: int) -> bool:
    node = graph.nodes[index]
    shape = graph.shape(node.input[1]) or (0, 0)
    group = attribute(node, "group", 1)
    return bool(group > 1 and shape[0] == group and shape[1] == 1)


def _fuses(graph: OnnxGraph, name: str) -> bool:
    """Whether a kernel makes the tensor that a product can join."""
    maker = graph.producer.get(name)
    return maker is not None and graph.nodes[maker].op_type in {"Conv", *UNARY, *BINARY}


def add_peaks(peaks: dict[str, Array], shown: Mapping[str, Array]) -> None:
    """Take one run's tensors [N, H, W, C] into the greatest magnitude of each channel."""
    for name, values in shown.items():
        peak = np.abs(values).max(axis=(0, 1, 2))
        peak = np.where(np.isfinite(peak), peak, 0)
        peaks[name] = np.maximum(peaks[name], peak) if name in peaks else peak


def balance(graph: OnnxGraph, peaks: Mapping[str, Array]) -> tuple[ModelProto, int]:
    """The model with a factor per channel before its convolutions, and how many got one.

    `peaks`: tensor of `balanceable` → greatest magnitude of each channel. A channel that was always 0 keeps its own.
    """
    changed: dict[int, tuple[str, Array]] = {}
    for name, index in balanceable(graph).items():
        peak = np.asarray(peaks.get(name, np.zeros(0)), np.float64)
        weight = graph.constant(graph.nodes[index].input[1])
        assert weight is not None
        full = _even(peak)
        if full is None:
            continue
        factor = full**_HALF if _depthwise(graph, index) else _eased(full, peak, weight.astype(np.float64))
        if factor is not None:
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
            divided = weight / factor.reshape((-1, 1, 1, 1) if _depthwise(graph, index) else (1, -1, 1, 1))
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


def _even(peak: Array) -> Array | None:
    """Factors that bring every channel to the greatest range; None where they differ little."""
    used = peak > 0
    if not used.any() or peak[used].max() < MIN_SPREAD * peak[used].min():
        return None
    return np.where(used, np.minimum(peak[used].max() / np.where(used, peak, 1.0), _LIMIT), 1.0)


def _eased(full: Array, peak: Array, weight: Array) -> Array | None:
    """Factors for a dense weight [O, C, ...] that make the noise of input and weight together least, or None."""
    if len(full) != weight.shape[1]:
        return None
    rows = np.abs(weight).max(axis=tuple(range(2, weight.ndim)))  # [O, C]
    power = np.square(weight).sum(axis=(0, *range(2, weight.ndim)))  # [C]

    def noise(factor: Array) -> float:
        read = (peak * factor).max() ** 2 / 255**2 * (power / factor**2).sum()
        steps = np.square((rows / factor).max(1) / 127).sum()
        return float(read + _WEIGHT_NOISE * steps * np.square(peak * factor / 4).sum())

    before = noise(np.ones_like(full))
    best = min((full**strength for strength in _STRENGTHS), key=noise)
    return best if noise(best) * MIN_GAIN < before else None
