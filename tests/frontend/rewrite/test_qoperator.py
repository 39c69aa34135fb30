"""QOperator → QDQ: within one quantisation step of ONNX Runtime, int8 weights kept."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from tests.frontend.rewrite.check import backend_cases, check_backend_case, one_node, ops_of, ort_run
from tvmx.frontend.rewrite import rewrite_all

RNG = np.random.default_rng(11)
S = lambda v: np.float32(v)  # noqa: E731  a scale
Z = lambda v: np.uint8(v)  # noqa: E731  a zero point


def u8(*shape):
    return RNG.integers(0, 256, shape).astype(np.uint8)


def s8(*shape):
    return RNG.integers(-128, 128, shape).astype(np.int8)


X = u8(2, 4, 6, 6)
QX = {"x": X, "xs": S(0.0513), "xz": Z(120)}
QY = {"ys": S(0.0971), "yz": Z(130)}
CONV = {**QX, "w": s8(6, 4, 3, 3), "ws": S(0.01), "wz": np.int8(0), **QY, "b": np.arange(6, dtype=np.int32) * 100}
CHANNEL = {
    **CONV,
    "ws": RNG.uniform(0.001, 0.02, 6).astype(np.float32),
    "wz": np.zeros(6, np.int8),
}
GEMM = {"a": u8(3, 5), "as": S(0.0513), "az": Z(120), "b": s8(5, 4), "bs": S(0.0237), "bz": np.int8(2)}
MS = "com.microsoft"

CASES = {
    "conv": ("QLinearConv", "", CONV, {}),
    "conv-strided": ("QLinearConv", "", CONV, {"strides": [2, 2], "pads": [1, 0, 1, 2]}),
    "conv-per-channel": ("QLinearConv", "", CHANNEL, {"dilations": [2, 2]}),
    "conv-no-bias": ("QLinearConv", "", {k: v for k, v in CHANNEL.items() if k != "b"}, {}),
    "conv-grouped": ("QLinearConv", "", {**CHANNEL, "w": s8(6, 2, 3, 3)}, {"group": 2}),
    "conv-u8-weights": ("QLinearConv", "", {**CONV, "w": u8(6, 4, 3, 3), "wz": Z(7)}, {}),
    "matmul": ("QLinearMatMul", "", {**GEMM, **QY}, {}),
    "matmul-column": (
        "QLinearMatMul",
        "",
        {**GEMM, "bs": np.float32([0.01, 0.02, 0.03, 0.04]), "bz": np.zeros(4, np.int8), **QY},
        {},
    ),
    "add": ("QLinearAdd", MS, {**QX, "b": u8(1, 4, 1, 1), "bs": S(0.0237), "bz": Z(3), **QY}, {}),
    "mul": ("QLinearMul", MS, {**QX, "b": u8(2, 4, 6, 6), "bs": S(0.0237), "bz": Z(3), **QY}, {}),
    "sigmoid": ("QLinearSigmoid", MS, {**QX, "ys": S(1 / 256), "yz": Z(0)}, {}),
    "leaky": ("QLinearLeakyRelu", MS, {**QX, **QY}, {"alpha": 0.2}),
    "softmax": ("QLinearSoftmax", MS, {**QX, "ys": S(1 / 256), "yz": Z(0)}, {"axis": -1, "opset": 13}),
    "global-pool": ("QLinearGlobalAveragePool", MS, {**QX, **QY}, {}),
    "global-pool-last": ("QLinearGlobalAveragePool", MS, {**QX, **QY}, {"channels_last": 1}),
    "pool": ("QLinearAveragePool", MS, {**QX, **QY}, {"kernel_shape": [2, 3], "strides": [2, 1]}),
    "concat": (
        "QLinearConcat",
        MS,
        {**QY, **QX, "b": u8(2, 3, 6, 6), "bs": S(0.0237), "bz": Z(3)},
        {"axis": 1},
    ),
    "where": (
        "QLinearWhere",
        MS,
        {"c": RNG.random((2, 4, 6, 6)) > 0.5, **QX, "b": u8(1, 4, 6, 6), "bs": S(0.0237), "bz": Z(3), **QY},
        {},
    ),
    "gemm": ("QGemm", MS, {**GEMM, "c": np.arange(4, dtype=np.int32) * 50, **QY}, {"alpha": 0.5}),
    "gemm-trans": ("QGemm", MS, {**GEMM, "a": u8(5, 3), "b": s8(4, 5), "c": None, **QY}, {"transA": 1, "transB": 1}),
}


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("vectors", [False, True], ids=["scalar", "vector1"])
def test_within_one_step_of_onnxruntime(name, vectors):
    op, domain, inputs, attrs = CASES[name]
    inputs = {k: None if v is None else np.asarray(v) for k, v in inputs.items()}
    if vectors and domain == "":
        inputs = {k: v.reshape(1) if v is not None and v.ndim == 0 else v for k, v in inputs.items()}
    fixed = {k: v for k, v in inputs.items() if k not in ("x", "a", "c") and v is not None}
    model = one_node(op, inputs, constants=fixed, domain=domain, out_elem=TensorProto.UINT8, **attrs)
    rewritten = rewrite_all(model)
    assert op not in ops_of(rewritten)
    feeds = {k: v for k, v in inputs.items() if v is not None}
    want, got = ort_run(model, feeds)[0], ort_run(rewritten, feeds)[0]
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    gap = np.abs(got.astype(int) - want.astype(int))
    assert gap.max() <= 1
    assert (gap > 0).sum() <= max(1, gap.size // 50)
    assert len(np.unique(want)) > 3, "the case saturates and tests nothing"


@pytest.mark.parametrize("case", backend_cases("qlinearconv", "qlinearmatmul"))
def test_onnx_node_tests(case):
    check_backend_case(case, ["QLinearConv", "QLinearMatMul"], atol=1)


def test_weights_stay_int8_behind_dequantize():
    fixed = {k: np.asarray(v) for k, v in CHANNEL.items() if k != "x"}
    model = one_node("QLinearConv", {k: np.asarray(v) for k, v in CHANNEL.items()}, constants=fixed)
    graph = rewrite_all(model).graph
    conv = next(n for n in graph.node if n.op_type == "Conv")
    weight = next(n for n in graph.node if n.output[0] == conv.input[1])
    assert weight.op_type == "DequantizeLinear"
    assert next(a.i for a in weight.attribute if a.name == "axis") == 0
    data = next(t for t in graph.initializer if t.name == weight.input[0])
    assert data.data_type == TensorProto.INT8


def test_scale_of_one_element_becomes_a_scalar():
    x = np.zeros((2, 3), np.uint8)
    inputs = {"x": x, "s": np.float32([0.5]), "z": np.uint8([1])}
    model = one_node("DequantizeLinear", inputs, constants={k: inputs[k] for k in "sz"})
    graph = rewrite_all(model).graph
    assert {tuple(t.dims) for t in graph.initializer} == {()}


def test_reduce_mean_against_numpy():
    """ONNX Runtime declares QLinearReduceMean but has no kernel for it."""
    inputs = {k: np.asarray(v) for k, v in {**QX, **QY}.items()}
    model = one_node("QLinearReduceMean", inputs, domain=MS, out_elem=TensorProto.UINT8, axes=[2, 3], keepdims=0)
    got = ort_run(rewrite_all(model), inputs)[0]
    mean = ((X.astype(np.float64) - 120) * 0.0513).mean((2, 3))
    want = np.clip(np.round(mean / 0.0971) + 130, 0, 255)
    assert np.abs(got - want).max() <= 1
