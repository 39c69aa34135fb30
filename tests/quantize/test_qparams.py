"""Scales and zero points against ONNX Runtime and by their definitions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tests.onnx_models import model, reference
from tvmx.quantize.qparams import (
    activation_qparams,
    bias_floor,
    fake_quantize,
    quantize_array,
    quantize_bias,
    quantize_weight,
)

FLOATS = st.floats(-1e6, 1e6, width=32)


@settings(max_examples=200, deadline=None)
@given(FLOATS, FLOATS, st.sampled_from([("uint8", False), ("int8", True), ("uint8", True), ("int8", False)]))
def test_the_range_is_covered_and_zero_is_exact(a, b, kind):
    dtype, symmetric = kind
    low, high = min(a, b, 0.0), max(a, b, 0.0)
    params = activation_qparams(low, high, dtype, symmetric)
    assert params.scale > 0
    assert np.iinfo(dtype).min <= params.zero_point <= np.iinfo(dtype).max
    assert fake_quantize(np.zeros(1), params)[0] == 0
    if high - low > 1e-20:
        assert params.low <= low + params.scale
        assert params.high >= high - params.scale
    if symmetric:
        assert params.zero_point == (0 if dtype == "int8" else 128)


def test_quantising_is_onnx_runtimes():
    params = activation_qparams(-1.3, 2.7, "uint8", False)
    proto = model(
        [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"])],
        {"x": (1000,)},
        {"q": ((1000,), TensorProto.UINT8)},
        {"s": np.float32(params.scale), "z": np.uint8(params.zero_point)},
    )
    x = np.concatenate([np.linspace(-2, 3, 744), (np.arange(256) - 128.5) * params.scale]).astype(np.float32)
    np.testing.assert_array_equal(quantize_array(x, params), reference(proto, {"x": x})["q"])


@pytest.mark.parametrize("limit", [127, 64])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_weights_are_within_half_a_step(axis, limit):
    weight = np.random.default_rng(0).standard_normal((6, 5, 3)).astype(np.float32)
    quantized = quantize_weight(weight, axis, limit)
    assert np.abs(quantized.values).max() == limit
    assert quantized.scale.shape == (() if axis is None else (weight.shape[axis],))
    error = np.abs(weight - quantized.dequantized())
    assert (error <= quantized.scale.max() * 0.5001).all()


def test_reduced_weights_cannot_saturate_16_bit_pairs():
    quantized = quantize_weight(np.full((2, 2), -3.0), None, 64)
    assert 2 * 255 * int(np.abs(quantized.values).max()) < 2**15


def test_a_channel_near_zero_keeps_its_bias():
    """Depthwise after BatchNorm folding: a dead channel's scale must not push its bias out of int32."""
    weight = np.array([[1.0, -0.5], [1e-30, 0.0], [0.0, 0.0]], np.float32)
    bias = np.array([0.5, 3.0, -2.0], np.float32)
    input_scale = 0.02
    quantized = quantize_weight(weight, 0, floor=bias_floor(bias, input_scale))
    values, scale = quantize_bias(bias, input_scale, quantized.scale)
    np.testing.assert_allclose(values * scale, bias, rtol=1e-3, atol=0.02 / 127)
    assert np.isfinite(scale).all()
