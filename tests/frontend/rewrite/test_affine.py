"""BatchNormalization and per-channel arithmetic folded into weights: where it fires, where it must not."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.frontend.rewrite.check import assert_same, ops_of
from tvmx.frontend.rewrite import rewrite_all

RNG = np.random.default_rng(6)
C = 6


def f32(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


NORM = {"gamma": f32(C), "beta": f32(C), "mean": f32(C), "var": RNG.random(C).astype(np.float32) + 0.1}
MAKERS = {
    "conv": ("Conv", f32(1, 4, 5, 5), {"w": f32(C, 4, 3, 3)}, {"pads": [1, 1, 1, 1]}),
    "conv-bias": ("Conv", f32(1, 4, 5, 5), {"w": f32(C, 4, 3, 3), "b": f32(C)}, {}),
    "conv-grouped": ("Conv", f32(1, 4, 5, 5), {"w": f32(C, 2, 3, 3)}, {"group": 2}),
    "conv-1d": ("Conv", f32(2, 4, 9), {"w": f32(C, 4, 3)}, {}),
    "transpose": ("ConvTranspose", f32(1, 4, 5, 5), {"w": f32(4, C, 3, 3), "b": f32(C)}, {"strides": [2, 2]}),
    "transpose-grouped": ("ConvTranspose", f32(1, 4, 5, 5), {"w": f32(4, 3, 3, 3)}, {"group": 2}),
    "gemm": ("Gemm", f32(3, 4), {"w": f32(4, C), "b": f32(C)}, {}),
    "gemm-options": ("Gemm", f32(3, 4), {"w": f32(C, 4), "b": f32(3, 1)}, {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    "matmul": ("MatMul", f32(2, 3, 4), {"w": f32(4, C)}, {}),
}


def chain(maker, tail, extra_output=False):
    """x → maker → v → tail → y; `tail` is nodes from "v" to "y" and their constants."""
    op, x, constants, attrs = MAKERS[maker]
    nodes, more = tail
    constants = {**constants, **more}
    first = helper.make_node(op, ["x", *(k for k in ("w", "b") if k in constants)], ["v"], "maker", **attrs)
    outputs = ["y", "v"] if extra_output else ["y"]
    graph = helper.make_graph(
        [first, *nodes],
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), {"x": x}


def norm():
    return [helper.make_node("BatchNormalization", ["v", *NORM], ["y"], "bn", epsilon=1e-3)], NORM


def binary(op, constant, swapped=False):
    inputs = ["k", "v"] if swapped else ["v", "k"]
    return [helper.make_node(op, inputs, ["y"], "tail")], {"k": np.asarray(constant, np.float32)}


def channels(maker, op):
    """A constant with one value per channel of what `maker` makes."""
    kind, x, *_ = MAKERS[maker]
    spatial = [1] * (x.ndim - 2) if kind.startswith("Conv") else []
    values = f32(C, *spatial)
    return np.sign(values) * (np.abs(values) + 0.1) if op == "Div" else values


@pytest.mark.parametrize("maker", sorted(set(MAKERS) - {"matmul"}))
def test_batch_norm_goes_into_the_weight(maker):
    model, feeds = chain(maker, norm())
    rewritten = assert_same(model, feeds, ["BatchNormalization"], rtol=1e-4, atol=1e-5)
    assert ops_of(rewritten) == {MAKERS[maker][0]}


@pytest.mark.parametrize("maker", sorted(MAKERS))
@pytest.mark.parametrize("op", ["Mul", "Div", "Add", "Sub"])
@pytest.mark.parametrize("scalar", [False, True])
def test_arithmetic_goes_into_the_weight(maker, op, scalar):
    constant = np.float32(0.7) if scalar else channels(maker, op)
    model, feeds = chain(maker, binary(op, constant))
    rewritten = assert_same(model, feeds, rtol=1e-4, atol=1e-5)
    stays = maker == "matmul" and op in ("Add", "Sub")  # a MatMul has no bias
    assert ops_of(rewritten) == {MAKERS[maker][0], *([op] if stays else [])}


def test_constant_minus_a_convolution():
    model, feeds = chain("conv-bias", binary("Sub", channels("conv", "Sub"), swapped=True))
    assert ops_of(assert_same(model, feeds, rtol=1e-4, atol=1e-5)) == {"Conv"}


def test_a_whole_chain_folds():
    nodes = [
        helper.make_node("BatchNormalization", ["v", *NORM], ["a"], "bn"),
        helper.make_node("Mul", ["a", "k"], ["b"], "mul"),
        helper.make_node("Add", ["k", "b"], ["y"], "add"),
    ]
    model, feeds = chain("conv", (nodes, {**NORM, "k": f32(1, C, 1, 1)}))
    assert [n.op_type for n in assert_same(model, feeds, rtol=1e-4, atol=1e-5).graph.node] == ["Conv"]


@pytest.mark.parametrize(
    "tail",
    [
        binary("Mul", f32(3)),  # along the width
        binary("Add", f32(1, 1, 3, 3)),
        binary("Mul", f32(2, C, 3, 3)),  # widens the batch
        binary("Div", np.float32(2), swapped=True),
        binary("Pow", np.float32(2)),
    ],
)
def test_other_arithmetic_stays(tail):
    model, feeds = chain("conv-bias", tail)
    assert len(assert_same(model, feeds).graph.node) == 2


def test_a_result_that_is_used_twice_stays():
    model, feeds = chain("conv", norm(), extra_output=True)
    assert ops_of(assert_same(model, feeds)) == {"Conv", "Mul", "Add"}  # spread, not folded


def test_a_shared_weight_stays():
    model, feeds = chain("conv", norm())
    model.graph.node.append(helper.make_node("Conv", ["x", "w"], ["z"], "second"))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    assert len(assert_same(model, feeds).graph.node) == 4


def test_batch_norm_alone_is_a_product_and_a_sum():
    x = f32(2, C, 4)
    node = helper.make_node("BatchNormalization", ["x", *NORM], ["y"], "bn")
    graph = helper.make_graph(
        [node],
        "bn",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v, k) for k, v in NORM.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)
    assert ops_of(assert_same(model, {"x": x}, ["BatchNormalization"])) == {"Mul", "Add"}


def test_batch_norm_with_computed_statistics_stays():
    model, feeds = chain("conv", norm())
    for name in NORM:
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [C]))
    kept = [t for t in model.graph.initializer if t.name not in NORM]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    rewritten = assert_same(model, {**feeds, **NORM})
    assert "BatchNormalization" in ops_of(rewritten)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("op", ["Mul", "Div"])
def test_a_scaled_input_goes_into_the_weight(group, op):
    x, k = f32(1, 4, 5, 5), np.abs(f32(1, 4, 1, 1)) + 0.5
    nodes = [
        helper.make_node(op, ["x", "k"], ["s"], "scale"),
        helper.make_node("Conv", ["s", "w", "b"], ["y"], "conv", pads=[1, 1, 1, 1], group=group),
    ]
    graph = helper.make_graph(
        nodes,
        "scaled",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v, n) for n, v in {"k": k, "w": f32(C, 4 // group, 3, 3), "b": f32(C)}.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert ops_of(assert_same(model, {"x": x}, rtol=1e-4, atol=1e-5)) == {"Conv"}


def test_the_given_model_is_not_touched():
    model, _ = chain("conv", norm())
    before = model.SerializeToString(deterministic=True)
    rewrite_all(model)
    assert model.SerializeToString(deterministic=True) == before
    assert isinstance(model, onnx.ModelProto)
