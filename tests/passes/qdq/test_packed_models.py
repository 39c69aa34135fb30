"""Packed 4-bit weights of other tools: they stay packed in the `.so` and multiply as their floats would."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tvmx
from tests.frontend.rewrite.test_nbits import nbits
from tvmx.config import CompileConfig
from tvmx.runtime import GraphExecutor

ort = pytest.importorskip("onnxruntime")


def compiled(model: onnx.ModelProto, feeds: dict[str, np.ndarray], folder):
    """(outputs, the report) of the model through its `.so`."""
    result = tvmx.compile(model, folder / "m.so", threads=1, config=CompileConfig(use_shipped_logs=False))
    with GraphExecutor(result.path, threads=1) as executor:
        return list(executor(feeds).values()), result.report


@pytest.mark.parametrize(("depth", "width", "block", "zero"), [(256, 72, 64, "none"), (333, 65, 32, "packed")])
def test_matmul_nbits(depth, width, block, zero, tmp_path):
    model, feeds = nbits(depth, width, block, zero, bias=True)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3, width]))
    found, report = compiled(model, feeds, tmp_path)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, feeds)[0]
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    assert report["rules"] == {"cpu.weight_only": 1}
    blocks = -(-depth // block)
    assert report["parameter_bytes"] < 0.6 * depth * width + 12 * blocks * (width + 64), "two codes to a byte"


@pytest.mark.parametrize("kind", [TensorProto.INT4, TensorProto.UINT4])
def test_blocked_dequantize_of_int4(kind, tmp_path):
    """Opset 21: DequantizeLinear with block_size over an int4 initialiser of [K, N], 100 rows in blocks of 32."""
    rng = np.random.default_rng(0)
    low, high = (-8, 8) if kind == TensorProto.INT4 else (0, 16)
    codes, zero = rng.integers(low, high, (100, 64)), rng.integers(low, high, (4, 64))
    scale = rng.uniform(0.01, 0.1, (4, 64)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("DequantizeLinear", ["w", "s", "z"], ["d"], axis=0, block_size=32),
            helper.make_node("MatMul", ["x", "d"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", 1, [3, 100])],
        [helper.make_tensor_value_info("y", 1, [3, 64])],
        [
            helper.make_tensor("w", kind, codes.shape, codes.reshape(-1)),
            helper.make_tensor("z", kind, zero.shape, zero.reshape(-1)),
            numpy_helper.from_array(scale, "s"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    x = rng.standard_normal((3, 100)).astype(np.float32)
    found, report = compiled(model, {"x": x}, tmp_path)
    spread = [np.repeat(a, 32, 0)[:100].astype(np.float64) for a in (scale, zero)]
    expected = x @ ((codes - spread[1]) * spread[0])
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert report["rules"] == {"cpu.weight_only": 1}
