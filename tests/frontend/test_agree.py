"""Symbolic dims that must be equal and cannot be proved so: viewed as one, checked when shapes are bound."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import tvmx
from tvmx.errors import InputError
from tvmx.runtime import GraphExecutor


def _model(nodes, inputs, rank, initializers=()):
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [value("y", TensorProto.FLOAT, [f"d{i}" for i in range(rank)])],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in initializers],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()


def _positions():
    """x[N, S, 3] + table[1, :S, 3]: right for S up to 8."""
    table = np.arange(24, dtype=np.float32).reshape(1, 8, 3)
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Slice", ["shape", "one", "two"], ["length"]),
        helper.make_node("Slice", ["table", "zero", "length", "one"], ["rows"]),
        helper.make_node("Add", ["x", "rows"], ["y"]),
    ]
    ints = [(n, np.array([v])) for n, v in (("zero", 0), ("one", 1), ("two", 2))]
    return _model(nodes, {"x": ["N", "S", 3]}, 3, [("table", table), *ints]), table


def test_a_slice_of_a_table_as_long_as_the_input(tmp_path):
    model, table = _positions()
    result = tvmx.compile(model, tmp_path / "m.so")
    assert result.report["vm_reason"] is None
    assert result.graph.guards
    with GraphExecutor(result.path) as ex:
        for n, s in ((2, 5), (1, 8), (3, 1)):
            x = np.random.default_rng(s).standard_normal((n, s, 3)).astype("float32")
            np.testing.assert_array_equal(ex({"x": x})["y"], x + table[:, :s])
        with pytest.raises(InputError, match=r"must be equal.*are 8 and 9 for N=1, S=9|are 9 and 8 for N=1, S=9"):
            ex({"x": np.zeros((1, 9, 3), "float32")})


def test_a_bound_makes_the_check_needless(tmp_path):
    model, _ = _positions()
    shapes = {"x": (tvmx.Dim("N", 1, 4), tvmx.Dim("S", 1, 8), 3)}
    assert not tvmx.compile(model, tmp_path / "m.so", shapes=shapes).graph.guards


def test_branches_of_convolutions_meet_without_transposes(tmp_path):
    """Halved and doubled meets the input where H and W are even; the view keeps the channels-last storage."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((4, 4, 3, 3)).astype("float32")
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("MaxPool", ["a"], ["half"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Resize", ["half", "", "scales"], ["up"], mode="nearest"),
        helper.make_node("Add", ["a", "up"], ["y"]),
    ]
    scales = ("scales", np.array([1, 1, 2, 2], np.float32))
    model = _model(nodes, {"x": [1, 4, "H", "W"]}, 4, [("w", w), scales])
    result = tvmx.compile(model, tmp_path / "m.so")
    assert sum("transpose" in n.op for n in result.graph.nodes) <= 2  # the input's and the output's
    import onnxruntime

    session = onnxruntime.InferenceSession(model)
    with GraphExecutor(result.path) as ex:
        for h, width in ((6, 8), (2, 2), (10, 4)):
            x = rng.standard_normal((1, 4, h, width)).astype("float32")
            np.testing.assert_allclose(ex({"x": x})["y"], session.run(None, {"x": x})[0], rtol=1e-4, atol=1e-5)
        with pytest.raises(InputError, match="must be equal"):
            ex({"x": np.zeros((1, 4, 5, 8), "float32")})


@pytest.mark.parametrize("width", [17, 33, 214])
def test_vectors_with_a_tail_under_a_symbolic_dim(tmp_path, width):
    """A tail of one lane, or of several: TVM's LoopPartition fails on both when left alone."""
    model = _model([helper.make_node("Softmax", ["x"], ["y"])], {"x": ["N", width]}, 2)
    path = tvmx.compile(model, tmp_path / "m.so").path
    x = np.random.default_rng(0).standard_normal((5, width)).astype("float32")
    e = np.exp(x - x.max(-1, keepdims=True))
    with GraphExecutor(path) as ex:
        np.testing.assert_allclose(ex({"x": x})["y"], e / e.sum(-1, keepdims=True), rtol=1e-5, atol=1e-7)
