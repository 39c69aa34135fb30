"""Small ONNX models with seeded weights for tests of the whole path, and ONNX Runtime as the reference."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def model(nodes, inputs, outputs, weights=None, opset=17):
    """ModelProto from nodes; inputs/outputs are {name: shape or (shape, TensorProto type)}."""

    def infos(tensors):
        for name, spec in tensors.items():
            typed = len(spec) == 2 and isinstance(spec[0], (list, tuple))
            shape, kind = spec if typed else (spec, TensorProto.FLOAT)
            yield helper.make_tensor_value_info(name, kind, shape)

    graph = helper.make_graph(
        nodes,
        "test",
        list(infos(inputs)),
        list(infos(outputs)),
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (weights or {}).items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    onnx.checker.check_model(proto)
    return proto


def convnet(batch=1, channels=8, size=12, seed=0):
    """conv-relu-conv with a residual, global pool and a classifier: every kind of epilogue in little."""
    rng = np.random.default_rng(seed)

    def weight(*shape):
        return (rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))).astype(np.float32)

    node = helper.make_node
    return model(
        [
            node("Conv", ["x", "w0", "b0"], ["c0"], pads=[1, 1, 1, 1]),
            node("Relu", ["c0"], ["r0"]),
            node("Conv", ["r0", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1]),
            node("Add", ["c1", "r0"], ["s"]),
            node("HardSwish", ["s"], ["h"]),
            node("GlobalAveragePool", ["h"], ["p"]),
            node("Flatten", ["p"], ["f"]),
            node("Gemm", ["f", "w2", "b2"], ["y"], transB=1),
        ],
        {"x": (batch, 3, size, size)},
        {"y": (batch, 5)},
        {
            "w0": weight(channels, 3, 3, 3),
            "b0": weight(channels, 1)[:, 0],
            "w1": weight(channels, channels, 3, 3),
            "b1": weight(channels, 1)[:, 0],
            "w2": weight(5, channels),
            "b2": weight(5, 1)[:, 0],
        },
    )


def mlp(batch="N", width=16, seed=0):
    """Two layers with GELU; the batch is symbolic by default."""
    rng = np.random.default_rng(seed)
    w0, w1 = (rng.standard_normal((width, width)).astype(np.float32) / 4 for _ in range(2))
    node = helper.make_node
    return model(
        [
            node("MatMul", ["x.in", "w0"], ["m"]),
            node("Gelu", ["m"], ["g"]),
            node("MatMul", ["g", "w1"], ["y:out"]),
        ],
        {"x.in": (batch, width)},
        {"y:out": (batch, width)},
        {"w0": w0, "w1": w1},
        opset=20,
    )


def reference(proto, inputs):
    """Outputs of ONNX Runtime by name."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, inputs), strict=True))


def assert_close(outputs, expected, share=1e-5):
    """Every output within `share` of the expected output's largest magnitude; names and dtypes equal."""
    assert list(outputs) == list(expected)
    for name, want in expected.items():
        got = outputs[name]
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        scale = float(np.abs(want).max()) or 1.0 if want.size else 1.0
        np.testing.assert_allclose(got, want, rtol=0, atol=share * scale)
