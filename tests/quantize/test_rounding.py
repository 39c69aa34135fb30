"""Adaptive rounding: the columns that a layer reads, the mean error they make, and integers whose errors cancel."""

import dataclasses

import numpy as np
import pytest
from onnx import helper

from tests.onnx_models import model, reference
from tests.quantize.helpers import TARGET, calibration_of, normal_feeds, plan_of, sqnr
from tvmx.errors import ConfigError
from tvmx.quantize import Scheme, finish, make_plan, prepare_model
from tvmx.quantize.graph import OnnxGraph
from tvmx.quantize.moments import Columns, MomentCollector, Moments
from tvmx.quantize.qparams import quantize_weight
from tvmx.quantize.rounding import mean_error, round_to_data

node = helper.make_node

LAYERS = {
    "plain": ("Conv", (1, 4, 6, 5), (6, 4, 3, 3), {}),
    "pads_strides": ("Conv", (2, 4, 7, 6), (6, 4, 3, 2), {"pads": [2, 0, 1, 1], "strides": [2, 1]}),
    "dilated_groups": ("Conv", (1, 4, 9, 8), (6, 2, 3, 3), {"group": 2, "dilations": [2, 1]}),
    "depthwise": ("Conv", (1, 4, 6, 5), (4, 1, 3, 3), {"group": 4, "pads": [1, 1, 1, 1]}),
    "same_upper": ("Conv", (1, 4, 6, 5), (6, 4, 4, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "one_axis": ("Conv", (1, 4, 9), (6, 4, 3), {"pads": [1, 0]}),
    "product": ("MatMul", (3, 5, 4), (4, 6), {}),
    "gemm": ("Gemm", (5, 4), (6, 4), {"transB": 1}),
    "gemm_rows": ("Gemm", (5, 4), (4, 6), {}),
}


def _layer(op, x_shape, w_shape, attributes, weight):
    return model(
        [node(op, ["x", "w"], ["y"], "layer", **attributes)],
        {"x": x_shape},
        {"y": [None] * len(x_shape)},
        {"w": weight},
    )


@pytest.mark.parametrize("name", LAYERS)
def test_mean_error_is_that_of_the_results(name):
    op, x_shape, w_shape, attributes = LAYERS[name]
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(w_shape).astype(np.float32)
    x = (rng.standard_normal(x_shape) + 1).astype(np.float32)
    proto = _layer(op, x_shape, w_shape, attributes, weight)
    graph = OnnxGraph(prepare_model(proto)[0])
    scheme = Scheme(prefer="size", keep_first=False, overrides=()).for_target(TARGET)
    plan = make_plan(graph.proto, name, scheme, TARGET)
    (layer,) = plan.placement.layers
    collector = MomentCollector.of(plan.graph, plan.placement.layers)
    collector.update("x", x, channels_last=False)
    value = plan.graph.constant(plan.graph.nodes[layer.node].input[1])
    quantized = quantize_weight(value, layer.weight_axis, limit=7)  # coarse, so that the error is large
    dequantized = quantized.dequantized()
    dequantized = dequantized if dequantized.shape == weight.shape else dequantized.T
    coarse = _layer(op, x_shape, w_shape, attributes, dequantized)
    difference = reference(coarse, {"x": x})["y"].astype(np.float64) - reference(proto, {"x": x})["y"]
    axis = 1 if op == "Conv" else difference.ndim - 1
    expected = difference.mean(axis=tuple(k for k in range(difference.ndim) if k != axis))
    np.testing.assert_allclose(
        mean_error(value, quantized, collector.finish()[layer.name]), expected, rtol=1e-4, atol=1e-5
    )


def _correlated(length, rows=6, count=2000):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((count, 3)) @ rng.standard_normal((3, length)) + 0.1 * rng.standard_normal((count, length))
    columns = Columns(1, 1, length, rows_first=True)
    moments = Moments(columns, count, x.sum(0)[None], (x.T @ x)[None])
    return rng.standard_normal((rows, length)).astype(np.float32), x, moments


def test_rounding_to_data_makes_less_noise_than_to_nearest():
    weight, x, moments = _correlated(24)
    nearest = quantize_weight(weight, 0)
    chosen = round_to_data(weight, nearest, 127, moments, centred=False)
    noise = [np.square(x @ (w.dequantized() - weight).T).sum(0) for w in (nearest, chosen)]
    assert (noise[1] <= noise[0] * 1.001).all()
    assert noise[1].sum() < noise[0].sum() / 4
    assert np.abs(chosen.values.astype(int)).max() <= 127
    np.testing.assert_array_equal(chosen.scale, nearest.scale)


def test_blocks_of_a_long_column_are_put_back_in_place():
    columns = Columns(groups=2, blocks=3, length=4, rows_first=True)
    weight = np.arange(2 * 5 * 12).reshape(10, 3, 4)
    np.testing.assert_array_equal(columns.join(columns.split(weight), weight.shape), weight)
    turned = Columns(groups=1, blocks=3, length=4, rows_first=False)
    matrix = np.arange(12 * 5).reshape(12, 5)
    np.testing.assert_array_equal(turned.join(turned.split(matrix), matrix.shape), matrix)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_values_out_of_reach_are_left_out(bad):
    proto = model(
        [node("Conv", ["x", "w"], ["y"], "layer")],
        {"x": (1, 2, 4, 4)},
        {"y": (1, 3, 4, 4)},
        {"w": np.ones((3, 2, 1, 1), np.float32)},
    )
    scheme = Scheme(prefer="size", keep_first=False).for_target(TARGET)
    plan = make_plan(prepare_model(proto)[0], "m", scheme, TARGET)
    collector = MomentCollector.of(plan.graph, plan.placement.layers)
    collector.update("x", np.full((1, 2, 4, 4), bad, np.float32), channels_last=False)
    assert not collector.finish()


def test_a_channel_that_was_always_zero_keeps_its_nearest_integers():
    weight, x, _ = _correlated(8)
    x[:, 3] = 0
    moments = Moments(Columns(1, 1, 8, True), len(x), x.sum(0)[None], (x.T @ x)[None])
    nearest = quantize_weight(weight, 0)
    chosen = round_to_data(weight, nearest, 127, moments, centred=False)
    np.testing.assert_array_equal(chosen.values[:, 3], nearest.values[:, 3])


def test_the_whole_gains_by_it():
    """A constant background makes the errors of a depthwise weight add up; rounding by data cancels them."""
    rng = np.random.default_rng(2)
    edges = rng.standard_normal((8, 1, 3, 3))
    edges -= edges.mean((2, 3), keepdims=True)
    proto = model(
        [
            node("Conv", ["x", "w1"], ["a"], "first"),
            node("Conv", ["a", "w2", "b2"], ["y"], "depthwise", group=8),
        ],
        {"x": (1, 3, 8, 8)},
        {"y": (1, 8, 6, 6)},
        {
            "w1": np.abs(rng.standard_normal((8, 3, 1, 1))).astype(np.float32),
            "w2": edges.astype(np.float32),
            "b2": np.zeros(8, np.float32),
        },
    )
    data = [{"x": 5 + 0.1 * f["x"]} for f in normal_feeds(proto, 24)]
    plan = plan_of(proto)
    adaptive = calibration_of(plan, data, adaptive=True)
    nearest = dataclasses.replace(adaptive, moments={})
    found = [sqnr(proto, finish(plan, c, "minmax").proto, data) for c in (nearest, adaptive)]
    assert found[1] > found[0] + 3


def test_an_unknown_rounding_is_refused():
    with pytest.raises(ConfigError, match="adaptive or nearest"):
        Scheme(rounding="up")
