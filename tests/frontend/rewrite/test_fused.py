"""com.microsoft fusions taken apart: equal to ONNX Runtime's fused kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from tests.frontend.rewrite.check import assert_same, one_node, ops_of
from tvmx.frontend.rewrite import rewrite_all

RNG = np.random.default_rng(5)
MS = "com.microsoft"


def f32(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


X, SKIP, GAMMA, BETA, BIAS = f32(2, 3, 8), f32(2, 3, 8), f32(8), f32(8), f32(8)
NORM = {"x": X, "skip": SKIP, "gamma": GAMMA, "beta": BETA}
IMAGE = {"x": f32(1, 3, 6, 6), "w": f32(4, 3, 3, 3), "b": f32(4)}

CASES: dict[str, tuple[str, str, dict[str, Any], list[str], dict[str, Any]]] = {
    "gelu": ("Gelu", MS, {"x": X}, ["y"], {}),
    "bias-gelu": ("BiasGelu", MS, {"x": X, "b": BIAS}, ["y"], {}),
    "fast-gelu": ("FastGelu", MS, {"x": X, "b": BIAS}, ["y"], {}),
    "fast-gelu-no-bias": ("FastGelu", MS, {"x": X}, ["y"], {}),
    "quick-gelu": ("QuickGelu", MS, {"x": X}, ["y"], {"alpha": 1.5}),
    "skip-norm": ("SkipLayerNormalization", MS, {**NORM, "bias": BIAS}, ["y", "", "", "sum"], {}),
    "skip-norm-plain": ("SkipLayerNormalization", MS, NORM, ["y"], {"epsilon": 1e-3}),
    "skip-rms": (
        "SkipSimplifiedLayerNormalization",
        MS,
        {"x": X, "skip": SKIP, "gamma": GAMMA},
        ["y", "", "", "sum"],
        {},
    ),
    "rms": ("SimplifiedLayerNormalization", "", {"x": X, "gamma": GAMMA}, ["y"], {"axis": -1}),
    "matmul": ("FusedMatMul", MS, {"a": f32(2, 5, 3), "b": f32(2, 5, 4)}, ["y"], {"transA": 1, "alpha": 0.5}),
    "matmul-b": ("FusedMatMul", MS, {"a": f32(2, 3, 5), "b": f32(4, 5)}, ["y"], {"transB": 1}),
    "matmul-batch": (
        "FusedMatMul",
        MS,
        {"a": f32(3, 2, 5), "b": f32(2, 5, 4)},
        ["y"],
        {"transBatchA": 1},
    ),
    "conv-relu": ("FusedConv", MS, IMAGE, ["y"], {"activation": "Relu", "pads": [1, 1, 1, 1]}),
    "conv-clip": ("FusedConv", MS, IMAGE, ["y"], {"activation": "Clip", "activation_params": [-0.5, 0.5]}),
    "conv-add": ("FusedConv", MS, {**IMAGE, "z": f32(1, 4, 4, 4)}, ["y"], {"activation": "Relu"}),
    "gemm-leaky": (
        "FusedGemm",
        MS,
        {"a": f32(3, 5), "b": f32(5, 4), "c": f32(4)},
        ["y"],
        {"activation": "LeakyRelu", "activation_alpha": 0.2},
    ),
}


@pytest.mark.parametrize("version", [12, 17, 20])
@pytest.mark.parametrize("name", sorted(CASES))
def test_agrees_with_onnxruntime(name, version):
    op, domain, inputs, outputs, attrs = CASES[name]
    model = one_node(op, inputs, outputs, version=version, domain=domain, **attrs)
    gone = [] if op == "Gelu" else [op]
    rewritten = assert_same(model, inputs, gone, rtol=1e-4, atol=1e-5)
    assert all(n.domain == "" for n in rewritten.graph.node)


@pytest.mark.parametrize("axis", [-1, 1])
def test_layer_norm_before_opset_17(axis):
    inputs = {"x": X, "gamma": f32(3, 8) if axis == 1 else GAMMA, "beta": f32(8)}
    model = one_node("LayerNormalization", inputs, version=14, axis=axis)
    assert_same(model, inputs, ["LayerNormalization"], rtol=1e-4, atol=1e-5)


def test_layer_norm_of_opset_17_stays():
    model = one_node("LayerNormalization", {"x": X, "gamma": GAMMA}, version=17)
    assert ops_of(rewrite_all(model)) == {"LayerNormalization"}


@pytest.mark.parametrize("version", [12, 17])
@pytest.mark.parametrize("segments", [True, False])
def test_embed_layer_norm(version, segments):
    ids = RNG.integers(0, 10, (2, 4)).astype(np.int32)
    inputs = {
        "ids": ids,
        "segments": np.array([[0, 1, 1, 0]] * 2, np.int32) if segments else None,
        "words": f32(10, 8),
        "positions": f32(6, 8),
        "table": f32(2, 8) if segments else None,
        "gamma": GAMMA,
        "beta": BETA,
        "mask": np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32),
    }
    fixed = {k: v for k, v in inputs.items() if k not in ("ids", "segments", "mask") and v is not None}
    model = one_node("EmbedLayerNormalization", inputs, ["y", "index"], fixed, version=version, domain=MS)
    model.graph.output[1].type.tensor_type.elem_type = TensorProto.INT32
    feeds = {k: v for k, v in inputs.items() if v is not None}
    assert_same(model, feeds, ["EmbedLayerNormalization"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_dynamic_quantize_lstm(direction, per_column, dtype):
    """Within the noise of a dynamic 8-bit product of ONNX Runtime's own kernel."""
    d, hidden, features, steps, batch = (2 if direction == "bidirectional" else 1), 6, 5, 4, 2
    info = np.iinfo(dtype)

    def weight(rows: int) -> Any:
        return RNG.integers(info.min, info.max + 1, (d, rows, 4 * hidden)).astype(dtype)

    shape = (d, 4 * hidden) if per_column else (d,)
    zero = np.full(shape, 0 if dtype == np.int8 else 128, dtype)
    scale = RNG.uniform(0.002, 0.006, shape).astype(np.float32)
    inputs = {
        "X": f32(steps, batch, features),
        "W": weight(features),
        "R": weight(hidden),
        "B": f32(d, 8 * hidden),
        "lens": None,
        "h0": f32(d, batch, hidden),
        "c0": f32(d, batch, hidden),
        "P": None,
        "ws": scale,
        "wz": zero,
        "rs": scale,
        "rz": zero,
    }
    fixed = {k: v for k, v in inputs.items() if k not in ("X", "h0", "c0") and v is not None}
    model = one_node(
        "DynamicQuantizeLSTM",
        inputs,
        ["Y", "Y_h", "Y_c"],
        fixed,
        domain=MS,
        direction=direction,
        hidden_size=hidden,
    )
    feeds = {k: inputs[k] for k in ("X", "h0", "c0")}
    assert_same(model, feeds, ["DynamicQuantizeLSTM"], rtol=0, atol=2e-3)
