"""ConvInteger and MatMulInteger: equal to numpy in int64, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tests.frontend.rewrite.check import (
    assert_same,
    backend_cases,
    check_backend_case,
    one_node,
    ops_of,
    ort_run,
)
from tvmx.frontend.rewrite import apply_rules, integer, rewrite_all

U8, S8 = np.uint8, np.int8


def draw(rng, dtype, *shape):
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max + 1, shape).astype(dtype)


def matmul_reference(a, b, za, zb):
    za, zb = np.asarray(za, np.int64), np.asarray(zb, np.int64)
    za = za[:, None] if za.ndim == 1 else za
    return ((a.astype(np.int64) - za) @ (b.astype(np.int64) - zb)).astype(np.int32)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 99),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 300), st.integers(1, 5)),
    batch=st.sampled_from([(), (2,), (2, 1)]),
    kinds=st.tuples(st.sampled_from([U8, S8]), st.sampled_from([U8, S8])),
    za=st.sampled_from(["none", "scalar", "row"]),
    zb=st.sampled_from(["none", "scalar", "column"]),
    const=st.booleans(),
)
def test_matmul_integer_is_exact(seed, sizes, batch, kinds, za, zb, const):
    rng = np.random.default_rng(seed)
    (m, k, n), (ka, kb) = sizes, kinds
    a, b = draw(rng, ka, *batch, m, k), draw(rng, kb, k, n)
    row = {"none": None, "scalar": draw(rng, ka), "row": draw(rng, ka, m)}[za]
    col = {"none": None, "scalar": draw(rng, kb, 1), "column": draw(rng, kb, n)}[zb]
    fixed = {"b": b, **({"zb": col} if col is not None else {})} if const else {}
    inputs = {"a": a, "b": b, "za": row, "zb": col}
    model = one_node("MatMulInteger", inputs, constants=fixed, out_elem=TensorProto.INT32)
    rewritten = rewrite_all(model)
    for node in rewritten.graph.node:
        assert node.op_type != "MatMulInteger" or len(node.input) == 2
    got = ort_run(rewritten, {k: v for k, v in inputs.items() if v is not None})[0]
    want = matmul_reference(a, b, 0 if row is None else row, 0 if col is None else col)
    np.testing.assert_array_equal(got, want)


def test_matmul_integer_without_zero_points_stays():
    a = np.zeros((2, 3), U8)
    model = one_node("MatMulInteger", {"a": a, "b": a.T}, out_elem=TensorProto.INT32)
    assert [n.op_type for n in rewrite_all(model).graph.node] == ["MatMulInteger"]


def conv_reference(x, w, zx, zw, group=1):
    """int64 convolution, no padding, stride 1."""
    x = x.astype(np.int64) - int(zx)
    w = w.astype(np.int64) - np.asarray(zw, np.int64).reshape(-1, 1, 1, 1)
    n, _, height, width = x.shape
    m, per_group, kh, kw = w.shape
    y = np.zeros((n, m, height - kh + 1, width - kw + 1), np.int64)
    for o in range(m):
        first = o // (m // group) * per_group
        for i in range(kh):
            for j in range(kw):
                window = x[:, first : first + per_group, i : i + y.shape[2], j : j + y.shape[3]]
                y[:, o] += np.einsum("nchw,c->nhw", window, w[o, :, i, j])
    return y.astype(np.int32)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 99),
    channels=st.sampled_from([1, 3, 40]),
    kernel=st.sampled_from([1, 3, 5]),
    kinds=st.tuples(st.sampled_from([U8, S8]), st.sampled_from([U8, S8])),
    zx=st.booleans(),
    zw=st.sampled_from(["none", "scalar", "channel"]),
    const=st.booleans(),
    group=st.sampled_from([1, 2]),
)
def test_conv_integer_is_exact(seed, channels, kernel, kinds, zx, zw, const, group):
    """Extreme values and 40 channels of 5 × 5: the sums pass 2^24 and need chunks."""
    rng = np.random.default_rng(seed)
    kx, kw = kinds
    info = np.iinfo(kx)
    x = rng.choice([info.min, info.max, info.max - 1], (1, channels * group, 6, 6)).astype(kx)
    w = rng.choice([np.iinfo(kw).min, np.iinfo(kw).max], (4, channels, kernel, kernel)).astype(kw)
    zero_x = kx(info.min) if zx else None
    zero_w = {"none": None, "scalar": kw(3), "channel": draw(rng, kw, 4)}[zw]
    inputs = {"x": x, "w": w, "zx": zero_x, "zw": zero_w}
    inputs = {k: None if v is None else np.asarray(v) for k, v in inputs.items()}
    fixed = {"w": w} | ({"zw": inputs["zw"]} if zero_w is not None else {}) if const else {}
    model = one_node("ConvInteger", inputs, constants=fixed, out_elem=TensorProto.INT32, group=group)
    rewritten = rewrite_all(model)
    assert "ConvInteger" not in ops_of(rewritten)
    got = ort_run(rewritten, {k: v for k, v in inputs.items() if v is not None})[0]
    want = conv_reference(x, w, 0 if zero_x is None else zero_x, 0 if zero_w is None else zero_w, group)
    np.testing.assert_array_equal(got, want)


def test_conv_integer_keeps_int8_weights_and_drops_the_casts():
    """ConvInteger → Cast(float) is one float Conv on dequantised int8; no Cast is left."""
    w = np.full((2, 3, 3, 3), -7, S8)
    x = np.arange(75, dtype=U8).reshape(1, 3, 5, 5)
    model = one_node("ConvInteger", {"x": x, "w": w}, ["i"], {"w": w})
    model.graph.node.append(helper.make_node("Cast", ["i"], ["y"], "c", to=TensorProto.FLOAT))
    model.graph.output[0].name = "y"
    rewritten = assert_same(model, {"x": x}, ["ConvInteger", "Cast"])
    assert {t.data_type for t in rewritten.graph.initializer if len(t.dims) == 4} == {TensorProto.INT8}


def test_a_cast_with_a_fraction_below_it_stays():
    x = np.array([0.5, 1.5], np.float32)
    model = one_node("Cast", {"x": x}, ["i"], to=TensorProto.INT32)
    model.graph.node.append(helper.make_node("Cast", ["i"], ["y"], "c", to=TensorProto.FLOAT))
    model.graph.output[0].name = "y"
    rewritten, report = apply_rules(model, integer.RULES)
    assert len(rewritten.graph.node) == 2
    assert report.counts == {}


@pytest.mark.parametrize("case", backend_cases("convinteger", "matmulinteger", "dynamicquantizelinear"))
def test_onnx_node_tests(case):
    check_backend_case(case, ["ConvInteger", "DynamicQuantizeLinear"])


@pytest.mark.parametrize("version", [11, 13, 18])
@pytest.mark.parametrize("x", [[-1.0, 0.5, 3], [1, 2, 3], [-3, -2, -2.5], [0, 0, 0]])
def test_dynamic_quantize_linear_even_of_zeros(x, version):
    x = np.array([x, x], np.float32)
    model = one_node("DynamicQuantizeLinear", {"x": x}, ["y", "s", "z"], version=version)
    for k in (0, 2):
        model.graph.output[k].type.tensor_type.elem_type = TensorProto.UINT8
    assert_same(model, {"x": x}, ["DynamicQuantizeLinear"])


@pytest.mark.parametrize("zero", [None, np.uint8(100), np.arange(4, dtype=np.uint8)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("op", ["MatMulIntegerToFloat", "DynamicQuantizeMatMul"])
def test_contrib_products(op, bias, zero):
    rng = np.random.default_rng(3)
    a = rng.standard_normal((3, 8)).astype(np.float32)
    b = draw(rng, np.uint8, 8, 4)
    scale = np.float32(0.02) if zero is None or zero.ndim == 0 else np.float32([0.1, 0.2, 0.3, 0.4])
    last = {
        "b_scale": np.atleast_1d(scale),
        "b_zero": None if zero is None else np.atleast_1d(zero),
        "bias": rng.standard_normal(4).astype(np.float32) if bias else None,
    }
    if op == "DynamicQuantizeMatMul":
        inputs = {"a": a, "b": b, **last}
    else:
        inputs = {"a": draw(rng, np.uint8, 3, 8), "b": b, "a_scale": np.float32([0.5])}
        inputs |= {"b_scale": last["b_scale"], "a_zero": np.uint8([7]), **last}
        order = ["a", "b", "a_scale", "b_scale", "a_zero", "b_zero", "bias"]
        inputs = {k: inputs[k] for k in order}
    fixed = {k: v for k, v in inputs.items() if k not in ("a", "a_scale", "a_zero") and v is not None}
    model = one_node(op, inputs, constants=fixed, domain="com.microsoft")
    feeds = {k: v for k, v in inputs.items() if v is not None}
    assert_same(model, feeds, [op], rtol=1e-4, atol=1e-4)
