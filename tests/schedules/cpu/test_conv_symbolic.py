"""Convolutions whose batch, height or width is symbolic, against ONNX Runtime at several sizes of one library."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import tvmx
from tvmx.runtime import GraphExecutor

CASES = [
    ("Conv", (17, 5, 3, 3), {"pads": [1, 1, 1, 1]}, ("N", 5, "H", "W")),
    ("Conv", (48, 16, 1, 1), {}, ("N", 16, "H", "W")),
    ("Conv", (8, 16, 1, 1), {"strides": [2, 2]}, (1, 16, "H", "W")),
    ("Conv", (6, 3, 5, 3), {"pads": [2, 0, 1, 1], "strides": [2, 1], "dilations": [1, 2]}, (2, 3, "H", "W")),
    ("Conv", (300, 200, 3, 3), {"pads": [1, 1, 1, 1]}, ("N", 200, 9, 9)),  # weights beyond L2
    ("ConvTranspose", (7, 9, 2, 2), {"strides": [2, 2]}, (1, 7, "H", "W")),
    ("ConvTranspose", (4, 1, 3, 4), {"strides": [2, 3], "pads": [1, 0, 0, 2]}, ("N", 4, "H", "W")),
]


@pytest.mark.parametrize(("op", "weight", "attributes", "shape"), CASES)
@pytest.mark.parametrize("threads", [2])
def test_against_onnxruntime(tmp_path, op, weight, attributes, shape, threads):
    import onnxruntime

    rng = np.random.default_rng(0)
    w = (rng.standard_normal(weight) / np.sqrt(np.prod(weight[1:]))).astype("float32")
    value = helper.make_tensor_value_info
    nodes = [helper.make_node(op, ["x", "w"], ["c"], **attributes), helper.make_node("Relu", ["c"], ["y"])]
    inputs, outputs = (
        [value("x", TensorProto.FLOAT, list(shape))],
        [value("y", TensorProto.FLOAT, ["a", "b", "c", "d"])],
    )
    graph = helper.make_graph(nodes, "g", inputs, outputs, [numpy_helper.from_array(w, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()
    result = tvmx.compile(model, tmp_path / "m.so", threads=threads)
    assert "cpu.conv2d_symbolic" in result.report["rules"]
    session = onnxruntime.InferenceSession(model)
    with GraphExecutor(result.path) as ex:
        for n, h, width in ((1, 7, 9), (3, 12, 50), (2, 5, 5)):
            sizes = {"N": n, "H": h, "W": width}
            x = rng.standard_normal([sizes.get(d, d) for d in shape]).astype("float32")
            np.testing.assert_allclose(ex({"x": x})["y"], session.run(None, {"x": x})[0], rtol=1e-4, atol=2e-5)
