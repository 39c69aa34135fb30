"""Equalisation and bias correction: the function stays, the error shrinks where it should."""

import numpy as np
import pytest
from onnx import helper

from tests.onnx_models import model, reference
from tests.quantize.helpers import calibration_of, constants, normal_feeds, plan_of, quantized, sqnr
from tvmx.quantize import Scheme, finish, prepare_model
from tvmx.quantize.bias_correction import corrected_biases
from tvmx.quantize.equalize import equalize
from tvmx.quantize.quantizer import draft
from tvmx.quantize.switched import switched_model

node = helper.make_node


def uneven(between="Relu", depthwise=False):
    """Two convolutions whose channels differ 1000 times in range, as MobileNets have it."""
    rng = np.random.default_rng(0)
    spread = np.logspace(-1.5, 1.5, 8).astype(np.float32)
    w1 = rng.standard_normal((8, 3, 3, 3)).astype(np.float32) * spread[:, None, None, None]
    if depthwise:
        w2 = rng.standard_normal((8, 1, 3, 3)).astype(np.float32) / spread[:, None, None, None]
    else:
        w2 = rng.standard_normal((8, 8, 3, 3)).astype(np.float32) / spread[None, :, None, None]
    return model(
        [
            node("Conv", ["x", "w1", "b1"], ["a"], pads=[1, 1, 1, 1]),
            node(between, ["a"], ["r"]),
            node("Conv", ["r", "w2", "b2"], ["y"], pads=[1, 1, 1, 1], group=8 if depthwise else 1),
        ],
        {"x": (1, 3, 10, 10)},
        {"y": (1, 8, 10, 10)},
        {"w1": w1, "b1": spread * 0.1, "w2": w2, "b2": np.zeros(8, np.float32)},
    )


@pytest.mark.parametrize("depthwise", [False, True])
def test_equalising_keeps_the_function_and_helps_per_tensor_scales(depthwise):
    proto, _ = prepare_model(uneven(depthwise=depthwise))
    data = normal_feeds(proto)
    even, pairs = equalize(proto)
    assert pairs == 1
    for feed in data:
        a, b = (reference(m, feed)["y"] for m in (proto, even))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(a).max())
    scheme = Scheme(prefer="size", per_channel=False)
    before, after = (sqnr(proto, quantized(m, data, scheme=scheme).proto, data) for m in (proto, even))
    assert after > before + 6


def test_equalising_leaves_other_activations_and_shared_tensors_alone():
    proto, _ = prepare_model(uneven("HardSwish"))
    assert equalize(proto)[1] == 0
    shared = uneven()
    shared.graph.output.append(helper.make_tensor_value_info("r", 1, (1, 8, 10, 10)))
    prepared, _ = prepare_model(shared)
    assert equalize(prepared)[1] == 0
    assert prepared == prepare_model(shared)[0]


def test_a_dead_channel_is_left_as_it_is():
    proto = uneven()
    weights = constants(proto)
    weights["w1"] = weights["w1"].copy()
    weights["w1"][3] = 0
    for tensor in proto.graph.initializer:
        if tensor.name == "w1":
            tensor.raw_data = weights["w1"].tobytes()
    even, _ = equalize(prepare_model(proto)[0])
    assert all(np.isfinite(a).all() for a in constants(even).values())


def test_bias_correction_takes_the_mean_error_off():
    proto = uneven()
    data = normal_feeds(proto, 6)
    # Seven-bit per-tensor weights make an error with a mean worth correcting.
    plan = plan_of(proto, Scheme(prefer="size", per_channel=False, reduce_range=True))
    calibration = calibration_of(plan, data)
    made = draft(plan, calibration, "minmax")
    switched = switched_model(plan.graph, plan.placement, made.inserted, show=True)
    biases = corrected_biases(lambda f: reference(switched, f), data, plan.graph, plan.placement)
    assert set(biases) == {la.name for la in plan.placement.layers}
    plain, corrected = (finish(plan, calibration, "minmax", biases=b).proto for b in (None, biases))

    def mean_error(other):
        difference = np.stack([reference(proto, f)["y"] - reference(other, f)["y"] for f in data])
        return np.abs(difference.mean(axis=(0, 1, 3, 4))).mean()

    assert mean_error(corrected) < 0.7 * mean_error(plain)
    assert sqnr(proto, corrected, data) > sqnr(proto, plain, data)
