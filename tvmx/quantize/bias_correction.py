"""Bias correction: the mean error that quantising makes in each channel of a layer, taken off its bias.

Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, section 4.2,
with means measured on calibration data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tvmx.quantize.data import Feed
from tvmx.quantize.graph import Array, OnnxGraph
from tvmx.quantize.placement import Layer, Placement
from tvmx.quantize.switched import FLAGS, flags_for, switchable


def correctable(placement: Placement) -> tuple[Layer, ...]:
    """Layers with a bias of their own that is quantised with them."""
    return tuple(la for la in switchable(placement) if la.bias is not None)


def corrected_biases(
    run: Callable[[Feed], Mapping[str, Array]],
    samples: Sequence[Feed],
    graph: OnnxGraph,
    placement: Placement,
) -> dict[str, Array]:
    """Layer → bias, from runs of the switched program that shows every layer's result.

    In each channel it is the mean of (quantised - float) over samples and positions, with this layer alone
    quantised, so that no layer corrects what an earlier one has corrected already.
    """
    layers = correctable(placement)
    sums = {la.name: np.zeros(1) for la in layers}
    everything = {la.name for la in placement.layers}
    for sample in samples:
        made = run({**sample, FLAGS: flags_for(placement, everything)})
        exact = {la.name: _channel_mean(made[graph.nodes[la.node].output[0]], la.op) for la in layers}
        for la in layers:
            made = run({**sample, FLAGS: flags_for(placement, everything - {la.name})})
            own = _channel_mean(made[graph.nodes[la.node].output[0]], la.op)
            sums[la.name] = sums[la.name] + (own - exact[la.name])
    biases = {}
    for la in layers:
        assert la.bias is not None
        value = graph.constant(graph.nodes[la.node].input[la.bias])
        assert value is not None
        biases[la.name] = (value.astype(np.float64) - sums[la.name] / len(samples)).astype(np.float32)
    return biases


def _channel_mean(result: Array, op: str) -> Array:
    """Mean of a layer's result in each channel: axis 1 of images, the last of products."""
    axis = 1 if op in ("Conv", "ConvTranspose") else result.ndim - 1
    return np.asarray(result.astype(np.float64).mean(axis=tuple(k for k in range(result.ndim) if k != axis)))
