"""Models quantised by ONNX Runtime run with integer kernels and agree with the float meaning of their QDQ form."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import tvmx
from tvmx.config import CompileConfig
from tvmx.runtime import GraphExecutor

ort = pytest.importorskip("onnxruntime")
quantization = pytest.importorskip("onnxruntime.quantization")


class _Feeds(quantization.CalibrationDataReader):
    def __init__(self, feeds):
        self._left = iter(feeds)

    def get_next(self):
        return next(self._left, None)


def convnet() -> onnx.ModelProto:
    """Dense, depthwise and 1×1 convolutions, hard-swish, residual, pools, Gemm."""
    rng = np.random.default_rng(0)

    def weight(*shape):
        return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    values = {
        **{"w1": weight(16, 3, 3, 3), "b1": weight(16), "wd": weight(16, 1, 3, 3), "bd": weight(16)},
        **{"w2": weight(32, 16, 1, 1), "b2": weight(32), "w3": weight(32, 32, 3, 3), "b3": weight(32)},
        **{"fc": weight(10, 32), "fb": weight(10)},
    }
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Relu", ["c1"], ["r1"]),
        node("MaxPool", ["r1"], ["mp"], kernel_shape=[2, 2], strides=[1, 1], pads=[0, 0, 1, 1]),
        node("Conv", ["mp", "wd", "bd"], ["d1"], pads=[1, 1, 1, 1], group=16),
        node("HardSigmoid", ["d1"], ["hs"], alpha=1 / 6.0, beta=0.5),
        node("Mul", ["d1", "hs"], ["hw"]),
        node("Conv", ["hw", "w2", "b2"], ["c2"]),
        node("Relu", ["c2"], ["r2"]),
        node("Conv", ["r2", "w3", "b3"], ["c3"], pads=[1, 1, 1, 1]),
        node("Add", ["c3", "r2"], ["a"]),
        node("Relu", ["a"], ["ra"]),
        node("GlobalAveragePool", ["ra"], ["g"]),
        node("Flatten", ["g"], ["f"]),
        node("Gemm", ["f", "fc", "fb"], ["y"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, [1, 3, 20, 20])],
        [helper.make_tensor_value_info("y", 1, [1, 10])],
        [numpy_helper.from_array(v, k) for k, v in values.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    return model


def feeds_of(count: int = 6) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [{"x": rng.standard_normal((1, 3, 20, 20)).astype(np.float32)} for _ in range(count)]


def meaning(path, feed):
    """The float meaning of a QDQ or QOperator model: ONNX Runtime without its own integer fusions."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, feed)[0]


def output_step(path) -> float:
    """The scale of the quantize nearest to the model's output."""
    model = onnx.load(path)
    values = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    return float(values[next(n for n in reversed(model.graph.node) if n.op_type == "DequantizeLinear").input[1]])


_U8, _S8 = quantization.QuantType.QUInt8, quantization.QuantType.QInt8
CASES = {
    "QDQ per channel": dict(quant_format=quantization.QuantFormat.QDQ, per_channel=True),
    "QDQ int8": dict(quant_format=quantization.QuantFormat.QDQ, activation_type=_S8),
    "QDQ uint8 weights": dict(quant_format=quantization.QuantFormat.QDQ, weight_type=_U8),
    "QOperator": dict(quant_format=quantization.QuantFormat.QOperator, per_channel=True),
}


@pytest.mark.parametrize("case", CASES)
def test_static_quantisation(case, tmp_path):
    options = {"activation_type": _U8, "weight_type": _S8, **CASES[case]}
    feeds = feeds_of()
    onnx.save(convnet(), tmp_path / "f.onnx")
    quantization.quantize_static(tmp_path / "f.onnx", tmp_path / "q.onnx", _Feeds(feeds), **options)
    result = tvmx.compile(
        tmp_path / "q.onnx", tmp_path / "q.so", threads=1, config=CompileConfig(use_shipped_logs=False)
    )
    with GraphExecutor(result.path, threads=1) as executor:
        found = next(iter(executor(feeds[0]).values()))
    expected = meaning(tmp_path / "q.onnx", feeds[0])
    assert np.abs(found - expected).max() <= 1.01 * output_step(tmp_path / "q.onnx")
    rules = result.report["rules"]
    assert (rules["cpu.dot_conv"], rules["cpu.dot_matmul"], rules["cpu.depthwise_conv2d"]) == (2, 2, 1)
