"""ResNet-50-like and BERT-like ONNX models with random weights, in float32 or quantised to int8 (QDQ)."""

from __future__ import annotations

from typing import Any

import numpy as np


class Net:
    """Nodes and initialisers as they are added; every method returns the name of its output.

    `quantized` puts a QuantizeLinear → DequantizeLinear pair before each product, with one fixed scale, and stores
    weights as int8 codes: what matters here is which kernels come of it, not accuracy.
    """

    def __init__(self, quantized: bool = False, seed: int = 0) -> None:
        self.quantized = quantized
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._rng = np.random.default_rng(seed)
        self._count = 0

    def constant(self, array: np.ndarray) -> str:
        from onnx import numpy_helper

        name = self._name("c")
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        from onnx import helper

        out = self._name(op)
        self.nodes.append(helper.make_node(op, list(inputs), [out], name=out, **attributes))
        return out

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}_{self._count}"

    def activation(self, x: str) -> str:
        """`x` through a quantise → dequantise pair, if this net is quantised."""
        if not self.quantized:
            return x
        scale, zero = self.constant(np.array(0.05, "float32")), self.constant(np.array(0, "int8"))
        return self.node("DequantizeLinear", self.node("QuantizeLinear", x, scale, zero), scale, zero)

    def weight(self, shape: tuple[int, ...], axis: int) -> str:
        if not self.quantized:
            spread = 1 / np.sqrt(np.prod(shape) / shape[axis])
            return self.constant((self._rng.standard_normal(shape) * spread).astype("float32"))
        codes = self.constant(self._rng.integers(-127, 128, shape).astype("int8"))
        scale = self.constant(np.full(shape[axis], 1e-3, "float32"))
        return self.node("DequantizeLinear", codes, scale, self.constant(np.zeros(shape[axis], "int8")), axis=axis)

    def conv(self, x: str, depth: int, out: int, kernel: int, stride: int = 1, relu: bool = True) -> str:
        bias = self.constant(np.zeros(out, "float32"))
        y = self.node(
            "Conv", self.activation(x), self.weight((out, depth, kernel, kernel), 0), bias,
            kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[kernel // 2] * 4,
        )  # fmt: skip
        return self.node("Relu", y) if relu else y

    def dense(self, x: str, depth: int, out: int) -> str:
        y = self.node("MatMul", self.activation(x), self.weight((depth, out), 1))
        return self.node("Add", y, self.constant(np.zeros(out, "float32")))

    def norm(self, x: str, width: int) -> str:
        scale, bias = self.constant(np.ones(width, "float32")), self.constant(np.zeros(width, "float32"))
        return self.node("LayerNormalization", x, scale, bias, axis=-1)

    def model(self, inputs: dict[str, list[int]], output: str, shape: list[int]) -> Any:
        from onnx import TensorProto, helper

        ins = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()]
        outs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)]
        graph = helper.make_graph(self.nodes, "net", ins, outs, self.initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def resnet50(
    batch: int = 1, size: int = 224, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, quantized: bool = False
) -> Any:
    """Bottleneck blocks as in ResNet-50 (v1.5: stride in the 3×3), batch norms folded. `width` 64 is the original."""
    net = Net(quantized)
    x = net.conv("x", 3, width, 7, 2)
    x = net.node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    depth = width
    for stage, blocks in enumerate(depths):
        narrow = width << stage
        for block in range(blocks):
            stride = 2 if stage and block == 0 else 1
            y = net.conv(x, depth, narrow, 1)
            y = net.conv(y, narrow, narrow, 3, stride)
            y = net.conv(y, narrow, 4 * narrow, 1, relu=False)
            if block == 0:
                x = net.conv(x, depth, 4 * narrow, 1, stride, relu=False)
            x = net.node("Relu", net.node("Add", y, x))
            depth = 4 * narrow
    x = net.node("Flatten", net.node("GlobalAveragePool", x))
    return net.model({"x": [batch, 3, size, size]}, net.dense(x, depth, 1000), [batch, 1000])


def bert(
    batch: int = 1, length: int = 128, layers: int = 12, width: int = 768, heads: int = 12, quantized: bool = False
) -> Any:
    """Encoder layers as in BERT-base over embedded input; attention's own products stay in floating point."""
    net = Net(quantized)
    x = "x"
    shape = net.constant(np.array([batch, length, heads, width // heads]))
    flat = net.constant(np.array([batch, length, width]))
    scale = net.constant(np.array(1 / np.sqrt(width // heads), "float32"))
    for _ in range(layers):
        q, k, v = (net.node("Reshape", net.dense(x, width, width), shape) for _ in range(3))
        q, v = (net.node("Transpose", t, perm=[0, 2, 1, 3]) for t in (q, v))
        k = net.node("Transpose", k, perm=[0, 2, 3, 1])
        scores = net.node("Softmax", net.node("Mul", net.node("MatMul", q, k), scale), axis=-1)
        mixed = net.node("Transpose", net.node("MatMul", scores, v), perm=[0, 2, 1, 3])
        x = net.norm(net.node("Add", net.dense(net.node("Reshape", mixed, flat), width, width), x), width)
        y = net.dense(x, width, 4 * width)
        root = net.constant(np.array(np.sqrt(2), "float32"))
        half, one = net.constant(np.array(0.5, "float32")), net.constant(np.array(1, "float32"))
        erf = net.node("Add", net.node("Erf", net.node("Div", y, root)), one)
        y = net.node("Mul", net.node("Mul", y, erf), half)
        x = net.norm(net.node("Add", net.dense(y, 4 * width, width), x), width)
    return net.model({"x": [batch, length, width]}, x, [batch, length, width])
