"""Balanced channels: the function stays, and a quiet channel before a depthwise convolution survives."""

import numpy as np
from onnx import helper

import tvmx
from tests.onnx_models import model, reference
from tests.quantize.helpers import TARGET, calibration_of, normal_feeds, quantized, sqnr
from tvmx.quantize import Scheme, finish, make_plan, prepare_model
from tvmx.quantize.balance import add_peaks, balance, balanceable
from tvmx.quantize.graph import OnnxGraph

node = helper.make_node


def uneven():
    """A depthwise convolution behind HardSwish; its channels differ 60 times in range, its results do not."""
    rng = np.random.default_rng(0)
    spread = np.logspace(-0.9, 0.9, 8).astype(np.float32)
    return model(
        [
            node("Conv", ["x", "w1"], ["a"], "first"),
            node("HardSwish", ["a"], ["h"]),
            node("Conv", ["h", "w2"], ["y"], "depthwise", group=8, pads=[1, 1, 1, 1]),
        ],
        {"x": (1, 3, 8, 8)},
        {"y": (1, 8, 8, 8)},
        {
            "w1": rng.standard_normal((8, 3, 1, 1)).astype(np.float32) * spread[:, None, None, None],
            "w2": rng.standard_normal((8, 1, 3, 3)).astype(np.float32) / spread[:, None, None, None],
        },
    )


def balanced(proto, data):
    prepared, _ = prepare_model(proto)
    graph = OnnxGraph(prepared)
    assert list(balanceable(graph)) == ["h"]
    shown = model(
        list(prepared.graph.node),
        {"x": (1, 3, 8, 8)},
        {"h": (1, 8, 8, 8)},
        {t.name: np.frombuffer(t.raw_data, np.float32).reshape(t.dims) for t in prepared.graph.initializer},
    )
    peaks = {}
    for feed in data:
        add_peaks(peaks, {"h": reference(shown, feed)["h"].transpose(0, 2, 3, 1)})
    return balance(graph, peaks)


def test_balancing_keeps_the_function_and_the_quiet_channels():
    proto, data = uneven(), normal_feeds(uneven())
    even, count = balanced(proto, data)
    assert count == 1
    for feed in data:
        np.testing.assert_allclose(reference(even, feed)["y"], reference(proto, feed)["y"], rtol=1e-4, atol=1e-4)
    plan = make_plan(even, "even", Scheme(prefer="size").for_target(TARGET), TARGET)
    after = sqnr(proto, finish(plan, calibration_of(plan, data), "minmax").proto, data)
    assert after > sqnr(proto, quantized(proto, data).proto, data) + 6
    assert after > 30


def test_channels_that_were_never_seen_keep_their_own_range():
    graph = OnnxGraph(prepare_model(uneven())[0])
    even, count = balance(graph, {"h": np.array([0, 0, 1, 2, 4, 8, 16, 1e9])})
    assert count == 1
    factors = next(np.frombuffer(t.raw_data, np.float32) for t in even.graph.initializer if t.name == "h_balance")
    assert factors.tolist() == [1, 1, 8, 8, 8, 8, 8, 1]  # half way to 64, the limit
    assert balance(graph, {"h": np.full(8, 3.0)})[1] == 0
    assert balance(graph, {})[1] == 0


def test_a_tensor_with_other_readers_is_left_alone():
    proto = uneven()
    proto.graph.output.append(helper.make_tensor_value_info("h", 1, (1, 8, 8, 8)))
    assert not balanceable(OnnxGraph(prepare_model(proto)[0]))


def test_it_is_on_by_default_and_goes_through_a_calibration_file(tmp_path):
    proto, data = uneven(), normal_feeds(uneven(), 16)
    options = {"scheme": tvmx.Scheme(prefer="size"), "threads": 1}
    direct = tvmx.quantize(proto, data, "minmax", **options)
    tvmx.calibrate(proto, data, threads=1).save(tmp_path / "r.json")
    again = tvmx.quantize(proto, str(tmp_path / "r.json"), "minmax", **options)
    assert sqnr(proto, direct.proto, data) > 30
    assert again.proto.SerializeToString() == direct.proto.SerializeToString()


def test_a_dense_convolution_takes_factors_where_they_pay():
    rng = np.random.default_rng(3)
    spread = np.logspace(-1.2, 1.2, 16).astype(np.float32)
    proto = model(
        [
            node("Conv", ["x", "w1"], ["a"], "first"),
            node("HardSwish", ["a"], ["h"]),
            node("Conv", ["h", "w2"], ["y"], "dense"),
        ],
        {"x": (1, 3, 8, 8)},
        {"y": (1, 8, 8, 8)},
        {
            "w1": rng.standard_normal((16, 3, 1, 1)).astype(np.float32) * spread[:, None, None, None],
            "w2": rng.standard_normal((8, 16, 1, 1)).astype(np.float32) / spread[None, :, None, None],
        },
    )
    even, count = balanced(proto, data := normal_feeds(proto))
    assert count == 1
    for feed in data:
        np.testing.assert_allclose(reference(even, feed)["y"], reference(proto, feed)["y"], rtol=1e-4, atol=1e-4)
    plan = make_plan(even, "even", Scheme(prefer="size").for_target(TARGET), TARGET)
    after = sqnr(proto, finish(plan, calibration_of(plan, data), "minmax").proto, data)
    assert after > sqnr(proto, quantized(proto, data).proto, data) + 4
    flat = OnnxGraph(prepare_model(proto)[0])
    assert balance(flat, {"h": np.full(16, 2.0)})[1] == 0  # nothing to gain
