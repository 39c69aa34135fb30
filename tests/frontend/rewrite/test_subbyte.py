"""4-bit constants and blocked quantisation, against ONNX Runtime and onnx.reference."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.frontend.rewrite.check import assert_same, backend_cases, check_backend_case, one_node, run_anywhere
from tvmx.errors import ModelError
from tvmx.frontend.rewrite import rewrite_all

RNG = np.random.default_rng(9)
NARROW = {"int4": (ml_dtypes.int4, -8, 8), "uint4": (ml_dtypes.uint4, 0, 16)}


def narrow(kind, *shape):
    dtype, low, high = NARROW[kind]
    return RNG.integers(low, high, shape).astype(dtype)


def weight_model(w, scale, zero, **attrs):
    """y = x + dequantize(w)"""
    x = RNG.standard_normal(w.shape).astype(np.float32)
    node = [
        helper.make_node("DequantizeLinear", ["w", "s", *(["z"] if zero is not None else [])], ["d"], "dq", **attrs),
        helper.make_node("Add", ["x", "d"], ["y"], "add"),
    ]
    constants = {"w": w, "s": scale, **({"z": zero} if zero is not None else {})}
    graph = helper.make_graph(
        node,
        "weights",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return model, {"x": x}


@pytest.mark.parametrize("kind", sorted(NARROW))
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("zero", [True, False])
def test_weights_of_4_bits_become_int8(kind, axis, zero):
    w = narrow(kind, 6, 8)
    count = () if axis is None else (w.shape[axis],)
    scale = RNG.uniform(0.1, 1, count).astype(np.float32)
    attrs = {} if axis is None else {"axis": axis}
    model, feeds = weight_model(w, scale, narrow(kind, *count) if zero else None, **attrs)
    rewritten = assert_same(model, feeds, run=run_anywhere)
    types = {t.data_type for t in rewritten.graph.initializer}
    assert types <= {TensorProto.FLOAT, TensorProto.INT8, TensorProto.UINT8}
    assert "DequantizeLinear" in {n.op_type for n in rewritten.graph.node}


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("zero", [True, False])
def test_blocked_weights(kind, axis, zero):
    def draw(*shape):
        return narrow("int4", *shape) if kind == "int4" else RNG.integers(-128, 128, shape).astype(np.int8)

    w = draw(20, 18)  # more than what folds as a small constant
    shape = list(w.shape)
    shape[axis] //= 2
    scale = RNG.uniform(0.1, 1, shape).astype(np.float32)
    model, feeds = weight_model(w, scale, draw(*shape) if zero else None, axis=axis, block_size=2)
    rewritten = assert_same(model, feeds, ["DequantizeLinear"], run=run_anywhere)
    assert any(t.data_type == TensorProto.INT8 and t.dims for t in rewritten.graph.initializer)


def test_quantising_to_4_bits_and_back_is_done_in_float():
    x = RNG.uniform(-3, 3, (4, 6)).astype(np.float32)
    zero = np.array(1).astype(ml_dtypes.int4)
    scale = np.float32(0.25)
    model = one_node("QuantizeLinear", {"x": x, "s": scale, "z": zero}, ["q"], {"s": scale, "z": zero}, version=21)
    model.graph.node.append(helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], "dq"))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, None))
    model.ir_version = 10
    assert_same(model, {"x": x}, ["QuantizeLinear", "DequantizeLinear"], run=run_anywhere)


def test_a_4_bit_result_is_refused():
    x = np.zeros((2, 2), np.float32)
    fixed = {"s": np.float32(1), "z": np.array(0).astype(ml_dtypes.int4)}
    model = one_node("QuantizeLinear", {"x": x, **fixed}, constants=fixed, version=21, out_elem=TensorProto.INT4)
    with pytest.raises(ModelError, match=r"\(QuantizeLinear\): a 4-bit result"):
        rewrite_all(model)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("zero", [True, False])
def test_a_last_block_may_be_short(axis, zero):
    w = RNG.integers(-128, 128, (20, 18)).astype(np.int8)
    shape = [20, 18]
    shape[axis] = -(-shape[axis] // 8)
    scale = RNG.uniform(0.1, 1, shape).astype(np.float32)
    offset = RNG.integers(-9, 9, shape).astype(np.int8) if zero else None
    model, feeds = weight_model(w, scale, offset, axis=axis, block_size=8)
    rewritten = assert_same(model, feeds, ["DequantizeLinear"], run=run_anywhere)
    assert any(t.data_type == TensorProto.INT8 and list(t.dims) == [20, 18] for t in rewritten.graph.initializer)


def test_blocks_that_do_not_fit_the_axis_are_refused():
    model, _ = weight_model(np.zeros((5, 4), np.int8), np.ones((4, 4), np.float32), None, axis=0, block_size=2)
    with pytest.raises(ModelError, match="give 3 scales along axis 0"):
        rewrite_all(model)


@pytest.mark.parametrize("case", backend_cases("dequantizelinear_blocked", "quantizelinear_blocked"))
def test_onnx_node_tests(case):
    check_backend_case(case)
