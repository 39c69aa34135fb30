"""Graphs as random generators and old exporters make them: constants all the way, no elements, odd signatures."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from tests.onnx_models import assert_close, model, reference
from tests.run_model import run_model

node = helper.make_node
RNG = np.random.default_rng(0)


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def same(proto, inputs, folder):
    assert_close(run_model(proto, inputs, folder), reference(proto, inputs))


# What onnx's reference implementation, which folding uses, computes differently: name → (opset, node, weights).
CONSTANT = {
    "batch_norm": (
        12,
        node("BatchNormalization", ["a", "b", "c", "d", "e"], ["y"]),
        {"a": floats(4, 3, 2, 2, 2), "b": floats(3), "c": floats(3), "d": floats(3), "e": np.abs(floats(3)) + 0.5},
    ),
    "global_max_pool": (17, node("GlobalMaxPool", ["a"], ["y"]), {"a": floats(2, 3, 5)}),
    "softmax": (11, node("Softmax", ["a"], ["y"], axis=1), {"a": floats(2, 3, 4)}),
    "lstm": (
        14,
        node("LSTM", ["a", "w", "r", "", "n"], ["y"], hidden_size=2, direction="reverse"),
        {"a": floats(4, 2, 3), "w": floats(1, 8, 3), "r": floats(1, 8, 2), "n": np.array([2, 4], np.int32)},
    ),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_constant_operands(name, tmp_path):
    opset, made, weights = CONSTANT[name]
    rank = {"lstm": 4}.get(name, weights["a"].ndim)
    proto = model(
        [made, node("Mul", ["y", "x"], ["z"])], {"x": [1]}, {"z": [f"d{i}" for i in range(rank)]}, weights, opset
    )
    same(proto, {"x": np.ones(1, np.float32)}, tmp_path)


EMPTY = {  # name → (nodes, shape of x, rank of y, weights)
    "expand": ([node("Expand", ["x", "s"], ["y"])], (1, 7, 0), 4, {"s": np.array([1, 0, 7, 0])}),
    "conv1d": ([node("Conv", ["x", "w"], ["y"])], (0, 4, 5), 3, {"w": floats(2, 4, 3)}),
    "resize": (
        [node("Resize", ["x", "", "s"], ["y"])], (2, 3, 1, 5), 4, {"s": np.array([1, 1, 0.5, 2], np.float32)},
    ),
    "cumsum": ([node("CumSum", ["x", "a"], ["y"])], (3, 0), 2, {"a": np.array(0)}),
    "squeeze": ([node("Squeeze", ["x", "a"], ["s"]), node("Relu", ["s"], ["y"])], (1, 4, 0), 2, {"a": np.array([0])}),
    "matmul": (
        [node("Transpose", ["x"], ["t"], perm=[0, 2, 1]), node("MatMul", ["x", "t"], ["y"])], (1, 2, 0), 3, {},
    ),
    "batch_norm": (
        [node("BatchNormalization", ["x", "a", "a", "a", "a"], ["y"])], (4, 0, 3), 3, {"a": floats(0)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_no_elements(name, tmp_path):
    nodes, shape, rank, weights = EMPTY[name]
    proto = model(nodes, {"x": shape}, {"y": [f"d{i}" for i in range(rank)]}, weights)
    same(proto, {"x": np.ones(shape, np.float32)}, tmp_path)


@pytest.mark.parametrize("kind", [TensorProto.UINT8, TensorProto.UINT64, TensorProto.INT8])
def test_sign_of_integers(kind, tmp_path):
    x = np.array([0, 1, 200], helper.tensor_dtype_to_np_dtype(kind if kind != TensorProto.INT8 else TensorProto.UINT8))
    x = x.view(np.int8) if kind == TensorProto.INT8 else x
    same(model([node("Sign", ["x"], ["y"])], {"x": ([3], kind)}, {"y": ([3], kind)}), {"x": x}, tmp_path)


def test_an_output_without_shape_that_is_an_input(tmp_path):
    """Folding made one value of the two and kept the output's type, and QLinearMatMul then missed the rank."""
    quantised = {"s": np.float32(0.05), "z": np.int8(3), "w": RNG.integers(-9, 9, (4, 3), np.int8)}
    proto = model(
        [node("QLinearMatMul", ["x", "s", "z", "w", "s", "z", "s", "z"], ["y"])],
        {"x": ([2, 4], TensorProto.INT8)},
        {"x": ([2, 4], TensorProto.INT8), "y": ([2, 3], TensorProto.INT8)},
        quantised,
        21,
    )
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    same(proto, {"x": RNG.integers(-9, 9, (2, 4), np.int8)}, tmp_path)


@pytest.mark.parametrize("op", ["Sinh", "Cosh", "Asin", "Acos", "Atan", "Asinh", "Acosh"])
def test_float16_functions(op, tmp_path):
    x = (np.linspace(1, 3, 37) if op == "Acosh" else np.linspace(-1, 1, 37)).astype(np.float16)
    proto = model(
        [node(op, ["x"], ["y"])], {"x": ([37], TensorProto.FLOAT16)}, {"y": ([37], TensorProto.FLOAT16)}, opset=22
    )
    expected = getattr(np, op.lower().replace("a", "arc", 1) if op[0] == "A" else op.lower())(x.astype(np.float64))
    assert_close(run_model(proto, {"x": x}, tmp_path), {"y": expected.astype(np.float16)}, share=2**-11)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.DOUBLE])
def test_softplus_keeps_its_digits(kind, tmp_path):
    x = np.append(np.linspace(-80, 80, 1603), [np.inf, -np.inf]).astype(helper.tensor_dtype_to_np_dtype(kind))
    proto = model([node("Softplus", ["x"], ["y"])], {"x": ([1605], kind)}, {"y": ([1605], kind)})
    got = run_model(proto, {"x": x}, tmp_path)["y"]
    np.testing.assert_allclose(got, np.logaddexp(0, x.astype(np.float64)), rtol=8 * np.finfo(x.dtype).eps)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.DOUBLE])
def test_decomposed_layer_norm_of_other_floats(kind, tmp_path):
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    proto = model(
        [
            node("ReduceMean", ["x"], ["m"], axes=[-1]),
            node("Sub", ["x", "m"], ["c"]),
            node("Mul", ["c", "c"], ["q"]),
            node("ReduceMean", ["q"], ["v"], axes=[-1]),
            node("Add", ["v", "e"], ["w"]),
            node("Sqrt", ["w"], ["r"]),
            node("Div", ["c", "r"], ["y"]),
        ],
        {"x": ([3, 32], kind)},
        {"y": ([3, 32], kind)},
        {"e": dtype.type(1e-2)},
    )
    x = RNG.standard_normal((3, 32)).astype(dtype)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-2)
    assert_close(run_model(proto, {"x": x}, tmp_path), {"y": expected.astype(dtype)}, share=8 * np.finfo(dtype).eps)
