"""Broken and contradictory models end in one clear error; odd but legal ones compute what they should."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

import tvmx
from tests.onnx_models import model
from tests.run_model import run_model
from tvmx.errors import InputError, ModelError
from tvmx.frontend import import_onnx, import_programs
from tvmx.runtime import arena

node = helper.make_node
IMAGE = {"x": (1, 4, 6, 6)}


def one(op, inputs=None, weights=None, outputs=("y",), out=None, **attributes):
    """A model of one node; constant operands follow its inputs. Nothing is checked."""
    inputs = inputs or IMAGE
    weights = weights or {}
    graph = helper.make_graph(
        [node(op, [*inputs, *weights], list(outputs), **attributes)],
        "g",
        [helper.make_tensor_value_info(n, *((s[1], s[0]) if isinstance(s[0], tuple) else (TensorProto.FLOAT, s)))
         for n, s in inputs.items()],
        [helper.make_tensor_value_info(o, out or TensorProto.FLOAT, None) for o in outputs],
        [tvmx_array(v, n) for n, v in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def tvmx_array(value, name):
    from onnx import numpy_helper

    return numpy_helper.from_array(np.asarray(value), name)


WEIGHT = {"w": np.zeros((2, 4, 3, 3), np.float32)}
REFUSED = {
    "stride 0": (one("MaxPool", kernel_shape=[2, 2], strides=[0, 0]), "strides .* must be positive"),
    "negative stride": (one("MaxPool", kernel_shape=[2, 2], strides=[-1, 1]), "strides .* must be positive"),
    "empty window": (one("MaxPool", kernel_shape=[0, 0]), "kernel_shape .* must be positive"),
    "dilation 0": (one("MaxPool", kernel_shape=[2, 2], dilations=[0, 0]), "dilations .* must be positive"),
    "pads of one side": (one("MaxPool", kernel_shape=[2, 2], pads=[1, 1]), "pads .* has 2 entries, not 4"),
    "negative pads": (one("MaxPool", kernel_shape=[2, 2], pads=[-1] * 4), "pads .* must lie in"),
    "a window of padding": (one("MaxPool", kernel_shape=[2, 2], pads=[5] * 4), "pads .* must lie in"),
    "huge window": (one("AveragePool", kernel_shape=[2**31 - 1] * 2), "does not fit into 6 elements"),
    "conv: stride 0": (one("Conv", weights=WEIGHT, strides=[0, 1]), "strides .* must be positive"),
    "conv: group 0": (one("Conv", weights=WEIGHT, group=0), "group=0 must be positive"),
    "conv: larger than its input": (one("Conv", {"x": (1, 4, 2, 2)}, WEIGHT), "a window of 3 does not fit into 2"),
    "conv: another kernel": (one("Conv", weights=WEIGHT, kernel_shape=[5, 5]), "is not that of the weight"),
    "conv: bias": (one("Conv", weights={**WEIGHT, "b": np.zeros(5, np.float32)}), r"a bias of shape \[5\]"),
    "flatten": (one("Flatten", axis=9), "axis 9 is out of range"),
    "split": (one("Split", {"x": (6,)}, {"s": np.array([-2, 8])}, ("y", "z")), "must not be negative"),
    "top k": (one("TopK", {"x": (6,)}, {"k": np.array([-1])}, ("y", "z")), "impossible size -1"),
    "range": (one("Pad", {"x": (2,)}, {"p": np.array([2**40, 0])}), "elements, more than can be held"),
    "broadcast": (one("Add", {"x": (2, 3), "z": (4,)}), "the first input shape at dim 1 is 3 and"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_refused_where_they_stand(case):
    proto, message = REFUSED[case]
    with pytest.raises(ModelError, match=rf"node 'y' \(.*{message}"):
        import_onnx(proto)


@pytest.mark.parametrize("dtype", ["int32", "int64", "int8", "uint8"])
@pytest.mark.parametrize("op", ["Div", "Mod"])
@pytest.mark.parametrize("constant", [True, False])
def test_integer_division_never_ends_the_process(tmp_path, op, dtype, constant):
    """x86 traps on x / 0 and on the smallest integer / -1."""
    info = np.iinfo(dtype)
    x = np.array([info.min, info.max, 7, info.min, 5], dtype)
    z = np.array([-1, 3, -1, 2, 0] if info.min else [1, 3, 2, 2, 0], dtype)
    elem = helper.np_dtype_to_tensor_dtype(x.dtype)
    weights = {"z": z} if constant else {}
    inputs = {"x": (x.shape, elem)} | ({} if constant else {"z": (z.shape, elem)})
    proto = model([node(op, ["x", "z"], ["y"])], inputs, {"y": (x.shape, elem)}, weights)
    got = run_model(proto, {"x": x, "z": z}, tmp_path)["y"]
    wide = x.astype(object)[:-1], z.astype(object)[:-1]
    if op == "Div":
        want = [abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) for a, b in zip(*wide)]
    else:
        want = [a % b for a, b in zip(*wide)]
    wrapped = [(v - info.min) % (int(info.max) - int(info.min) + 1) + info.min for v in want]
    assert got[:-1].tolist() == wrapped


def test_equal_of_bools(tmp_path):
    x, z = (np.random.default_rng(s).random((3, 5)) > 0.5 for s in range(2))
    shapes = {n: ((3, 5), TensorProto.BOOL) for n in "xz"}
    proto = model([node("Equal", ["x", "z"], ["y"])], shapes, {"y": ((3, 5), TensorProto.BOOL)})
    np.testing.assert_array_equal(run_model(proto, {"x": x, "z": z}, tmp_path)["y"], x == z)


@pytest.mark.parametrize("name", ["lambda", "min", "max", "class"])
def test_dims_named_like_python(tmp_path, name):
    proto = model([node("Relu", ["x"], ["y"])], {"x": (name, 2)}, {"y": (name, 2)})
    x = np.ones((3, 2), np.float32)
    np.testing.assert_array_equal(run_model(proto, {"x": x}, tmp_path)["y"], x)
    with pytest.raises(ModelError, match="cannot name a dim"):
        import_onnx(proto, {"x": (name, 2)})


def test_a_shape_that_is_no_tuple():
    with pytest.raises(ModelError, match="give a tuple"):
        import_onnx(one("Relu"), {"x": 6})


def _loop(trips):
    body = helper.make_graph(
        [node("Identity", ["c"], ["co"]), node("Add", ["s", "x"], ["so"])],
        "body",
        [helper.make_tensor_value_info(n, t, s) for n, t, s in
         (("i", TensorProto.INT64, ()), ("c", TensorProto.BOOL, ()), ("s", TensorProto.FLOAT, (2,)))],
        [helper.make_tensor_value_info(n, t, s) for n, t, s in
         (("co", TensorProto.BOOL, ()), ("so", TensorProto.FLOAT, (2,)))],
    )  # fmt: skip
    return model([node("Loop", ["m", "", "x"], ["y"], body=body)], {"x": (2,)}, {"y": (2,)}, {"m": np.array(trips)})


@pytest.mark.parametrize("trips", [-3, 0, 4])
def test_loop_runs_as_often_as_it_says_and_never_less_than_not_at_all(tmp_path, trips):
    x = np.array([1, 2], np.float32)
    got = run_model(_loop(trips), {"x": x}, tmp_path)["y"]
    np.testing.assert_array_equal(got, x * (1 + max(trips, 0)))


def test_a_condition_that_is_no_bool():
    branch = helper.make_graph([node("Relu", ["x"], ["t"])], "b", [], [helper.make_tensor_value_info("t", 1, None)])
    proto = model([node("Relu", ["x"], ["y"])], {"x": (2,), "c": ()}, {"y": (2,)})
    proto.graph.node[0].CopyFrom(node("If", ["c"], ["y"], then_branch=branch, else_branch=branch))
    with pytest.raises(ModelError):
        import_programs(proto)


def test_more_memory_than_there_is():
    with pytest.raises(InputError, match="do not fit into memory"):
        arena.aligned_bytes(2**50)


def test_errors_are_one_family():
    assert issubclass(ModelError, tvmx.TvmxError)
    assert issubclass(InputError, tvmx.TvmxError)
