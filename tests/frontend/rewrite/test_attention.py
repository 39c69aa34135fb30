"""Attention, QAttention and QEmbedLayerNormalization written out, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from tests.frontend.rewrite.check import assert_same, one_node, ort_run
from tvmx.errors import ModelError
from tvmx.frontend.rewrite import rewrite_all

RNG = np.random.default_rng(3)
MS = "com.microsoft"
MASKS = {
    "none": None,
    "lengths": np.array([5, 3], np.int32),
    "raw": np.array([[1, 1, 1, 1, 1], [1, 1, 0, 1, 0]], np.int32),
    "full": np.tril(np.ones((2, 5, 5), np.int32)),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("unidirectional", [0, 1])
def test_attention(mask, unidirectional):
    inputs = {
        "x": RNG.standard_normal((2, 5, 8)).astype(np.float32),
        "w": RNG.standard_normal((8, 24)).astype(np.float32) / 3,
        "b": RNG.standard_normal(24).astype(np.float32),
        "m": MASKS[mask],
    }
    fixed = {k: v for k, v in inputs.items() if k in "wbm" and v is not None}
    model = one_node("Attention", inputs, constants=fixed, domain=MS, num_heads=2, unidirectional=unidirectional)
    assert_same(model, {"x": inputs["x"]}, ["Attention"], atol=1e-5)


@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize("mask", ["none", "raw"])
def test_quantized_attention(mask, per_column):
    """Small codes: ONNX Runtime's own products saturate on some machines."""
    inputs = {
        "x": RNG.integers(100, 150, (2, 5, 8)).astype(np.uint8),
        "w": RNG.integers(-60, 60, (8, 24)).astype(np.int8),
        "b": RNG.standard_normal(24).astype(np.float32),
        "xs": np.float32(0.05),
        "ws": RNG.uniform(0.005, 0.02, 24).astype(np.float32) if per_column else np.float32(0.01),
        "m": MASKS[mask],
        "xz": np.uint8(128),
        "wz": np.zeros(24, np.int8) if per_column else np.int8(0),
    }
    inputs = {k: None if v is None else np.asarray(v) for k, v in inputs.items()}
    fixed = {k: v for k, v in inputs.items() if k != "x" and v is not None}
    model = one_node("QAttention", inputs, constants=fixed, domain=MS, num_heads=2)
    assert_same(model, {"x": inputs["x"]}, ["QAttention"], atol=1e-5)


def test_a_past_state_is_refused():
    inputs = {
        "x": np.zeros((1, 2, 8), np.float32),
        "w": np.zeros((8, 24), np.float32),
        "b": np.zeros(24, np.float32),
        "m": None,
        "past": np.zeros((2, 1, 2, 3, 4), np.float32),
    }
    model = one_node("Attention", inputs, domain=MS, num_heads=2)
    with pytest.raises(ModelError, match="past state"):
        rewrite_all(model)


def test_quantized_embedding():
    scales = {f"s{k}": np.float32(RNG.uniform(0.01, 0.02)) for k in range(5)}
    zeros = {f"z{k}": np.uint8(RNG.integers(100, 150)) for k in range(5)}
    tables = {
        "word": RNG.integers(0, 256, (30, 16)).astype(np.uint8),
        "position": RNG.integers(0, 256, (8, 16)).astype(np.uint8),
        "segment": RNG.integers(0, 256, (2, 16)).astype(np.uint8),
        "gamma": RNG.integers(0, 256, 16).astype(np.uint8),
        "beta": RNG.integers(0, 256, 16).astype(np.uint8),
    }
    ids = {"ids": RNG.integers(0, 30, (2, 6)).astype(np.int32), "segments": RNG.integers(0, 2, (2, 6)).astype(np.int32)}
    mask = {"mask": np.array([[1] * 6, [1] * 4 + [0] * 2], np.int32)}
    inputs = {k: np.asarray(v) for k, v in {**ids, **tables, **mask, **scales, **zeros}.items()}
    fixed = {k: v for k, v in inputs.items() if k not in ids and k != "mask"}
    model = one_node("QEmbedLayerNormalization", inputs, ["y", "index"], fixed, domain=MS, epsilon=1e-6)
    model.graph.output[1].CopyFrom(helper.make_tensor_value_info("index", TensorProto.INT32, None))
    feeds = {k: inputs[k] for k in (*ids, "mask")}
    assert_same(model, feeds, ["QEmbedLayerNormalization"], atol=1e-5)
    assert len(ort_run(model, feeds)) == 2
