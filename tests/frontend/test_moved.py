"""Tile and SpaceToDepth against numpy, on this machine's own vector instructions."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import tvmx
from tvmx.runtime import GraphExecutor


def _run(tmp_path, node, x, rank, opset=17, initializers=()):
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "g",
        [value("x", TensorProto.FLOAT, x.shape)],
        [value("y", TensorProto.FLOAT, [f"d{i}" for i in range(rank)])],
        [numpy_helper.from_array(a, n) for n, a in initializers],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    path = tvmx.compile(model.SerializeToString(), tmp_path / "m.so").path
    with GraphExecutor(path) as ex:
        return ex({"x": x})["y"]


@pytest.mark.parametrize(("shape", "repeats"), [((2, 3, 4, 5), (7, 6, 4, 2)), ((1, 3), (4, 1)), ((5,), (16,))])
def test_tile(tmp_path, shape, repeats):
    """Indices modulo the sizes were miscompiled for AVX-512 (stray reads)."""
    x = np.random.default_rng(0).standard_normal(shape).astype("float32")
    got = _run(tmp_path, helper.make_node("Tile", ["x", "r"], ["y"]), x, len(shape), 17, [("r", np.array(repeats))])
    np.testing.assert_array_equal(got, np.tile(x, repeats))


def test_space_to_depth(tmp_path):
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 6)).astype("float32")
    got = _run(tmp_path, helper.make_node("SpaceToDepth", ["x"], ["y"], blocksize=2), x, 4)
    wide = x.reshape(2, 3, 2, 2, 3, 2)
    np.testing.assert_array_equal(got, wide.transpose(0, 3, 5, 1, 2, 4).reshape(2, 12, 2, 3))
