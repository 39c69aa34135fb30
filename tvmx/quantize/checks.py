"""Warnings about calibration data and tensors whose ranges look wrong."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import NodeProto

from tvmx.quantize.calibrate import Calibration
from tvmx.quantize.graph import OnnxGraph, node_name
from tvmx.quantize.placement import Placement
from tvmx.quantize.stats import TensorStats

FEW_SAMPLES = 16
LARGE_RESULT = 100.0  # rms that a first layer's result has only when its input is not what the weights expect
SATURATED = 0.95  # share of an activation function's results at its two ends
_BOUNDS = {"Sigmoid": (0.0, 1.0), "HardSigmoid": (0.0, 1.0), "Tanh": (-1.0, 1.0)}


def data_warnings(graph: OnnxGraph, placement: Placement, calibration: Calibration) -> Iterator[str]:
    """One sentence for each thing a user should look at; none is fatal."""
    if calibration.samples < FEW_SAMPLES:
        yield (
            f"calibrated with {calibration.samples} samples; ranges from fewer than {FEW_SAMPLES} may miss values "
            "that occur in use"
        )
    for root in placement.roots:
        yield from _tensor(root, calibration.of(root))
    yield from _inputs(graph, calibration)
    yield from _saturation(graph, calibration)


def _tensor(name: str, stats: TensorStats) -> Iterator[str]:
    if stats.empty:
        yield f"tensor {name!r} was never finite in calibration; it gets the scale 1"
        return
    if stats.not_finite:
        yield f"tensor {name!r} held {stats.not_finite} NaN or infinite values in calibration; they were left out"
    if stats.constant:
        what = "always 0" if stats.low == 0 else f"always {stats.low:g}"
        scale = "it gets the scale 1" if stats.low == 0 else "its scale is made for that value"
        yield f"tensor {name!r} was {what} in calibration; {scale}"


def _rms(stats: TensorStats) -> float:
    counts = stats.histogram.counts
    return float(np.sqrt(np.average(stats.histogram.centers() ** 2, weights=counts))) if counts.any() else 0.0


def _inputs(graph: OnnxGraph, calibration: Calibration) -> Iterator[str]:
    """Inputs of the model far larger than its first weights suggest, as pictures that were not normalised are."""
    for name in graph.inputs:
        stats = calibration.stats.get(name)
        if stats is None or stats.empty or max(abs(stats.low), abs(stats.high)) <= 20:
            continue
        for index in graph.consumers.get(name, ()):
            node = graph.nodes[index]
            weight = graph.constant(node.input[1]) if node.op_type == "Conv" else None
            if weight is None:
                continue
            gain = float(np.sqrt(np.mean(np.sum(np.square(weight, dtype=np.float64).reshape(len(weight), -1), 1))))
            if gain * _rms(stats) > LARGE_RESULT:
                yield (
                    f"input {name!r} ranges over [{stats.low:.4g}, {stats.high:.4g}], far more than the weights of "
                    f"{node_name(node)!r} suggest; is the calibration data normalised as the model expects?"
                )


def _saturation(graph: OnnxGraph, calibration: Calibration) -> Iterator[str]:
    """Activation functions at their ends: one gate may well be open always, most of them may not."""
    shares = {}
    for node in graph.nodes:
        bounds = _bounds(graph, node)
        stats = calibration.stats.get(node.output[0]) if bounds else None
        if bounds is None or stats is None or stats.empty or stats.constant:
            continue
        margin = 0.01 * (bounds[1] - bounds[0])
        x, counts = stats.histogram.centers(), stats.histogram.counts
        at_ends = counts[(x < bounds[0] + margin) | (x > bounds[1] - margin)].sum()
        shares[node_name(node), node.op_type] = float(at_ends / counts.sum())
    saturated = {key: share for key, share in shares.items() if share > SATURATED}
    if len(saturated) > len(shares) / 2:
        (name, op), share = next(iter(saturated.items()))
        yield (
            f"{100 * share:.0f} % of the results of {name!r} ({op}) lie at its ends, and so do those of "
            f"{len(saturated) - 1} others; is the calibration data what the model expects?"
        )


def _bounds(graph: OnnxGraph, node: NodeProto) -> tuple[float, float] | None:
    """The least and the greatest result of an activation function."""
    if node.op_type != "Clip":
        return _BOUNDS.get(node.op_type)
    ends = [graph.constant(i) if i else None for i in (*node.input[1:3], "", "")[:2]]
    if any(e is None for e in ends):
        return None
    low, high = (float(e.reshape(-1)[0]) for e in ends if e is not None)
    return low, high
