"""Build the nodes that replace one node. Constant operands fold as they are emitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from tvmx.frontend.rewrite.context import Array, GraphContext, clean
from tvmx.frontend.rewrite.infer import infer_node

# Emitted arithmetic on weights (a transposed W, a folded bias) is done now, whatever its size.
_FOLD_LIMIT = 1 << 28


class Emitter:
    """Collects nodes in order; every method returns the name of the value it made.

    Version differences of the standard operators (axes as attribute or input, ...) live here.
    """

    def __init__(self, graph: GraphContext, prefix: str) -> None:
        self.graph = graph
        self.prefix = clean(prefix)
        self.nodes: list[onnx.NodeProto] = []

    def const(self, value: Any, hint: str = "const", dtype: Any = None) -> str:
        """A new initializer."""
        return self.graph.add_constant(np.asarray(value, dtype), f"{self.prefix}/{hint}")

    def ints(self, values: Sequence[int], hint: str = "ints") -> str:
        """A new int64 vector."""
        return self.const(list(values), hint, np.int64)

    def like(self, value: float, elem: int, hint: str = "const") -> str:
        """A new scalar of ONNX element type `elem`."""
        return self.const(value, hint, helper.tensor_dtype_to_np_dtype(elem))

    def op(self, op_type: str, *inputs: str, domain: str = "", **attrs: Any) -> str:
        """One operator with one output. Empty input names are absent inputs."""
        return self.ops(op_type, *inputs, outputs=1, domain=domain, **attrs)[0]

    def ops(self, op_type: str, *inputs: str, outputs: int, domain: str = "", **attrs: Any) -> list[str]:
        """One operator with several outputs."""
        names = [self.graph.fresh(f"{self.prefix}/{op_type}") for _ in range(outputs)]
        operands = list(inputs)
        while operands and not operands[-1]:
            operands.pop()
        given = {k: v for k, v in attrs.items() if v is not None}
        node = helper.make_node(op_type, operands, names, names[0], domain=domain, **given)
        self.add(node, _FOLD_LIMIT)
        return names

    def add(self, node: onnx.NodeProto, fold_limit: int = 1024) -> None:
        """Append a ready node, or the constants it amounts to."""
        values = self.graph.fold(node, fold_limit)
        if values is None:
            self.graph.count([node])
            self.nodes.append(node)
            self._infer(node)
            self.graph.producers.update((name, node) for name in node.output if name)
            return
        for name, value in zip(node.output, values):
            if name:
                self.graph.set_constant(name, value)

    def _infer(self, node: onnx.NodeProto) -> None:
        graph = self.graph
        types = {n: t for n in node.input if n and (t := graph.type(n)) is not None}
        data = {n: graph.constant(n) for n in types if graph.constant_is_small(n, 64)}
        graph.types.update(infer_node(node, types, data, graph.opsets))

    # Helpers, by meaning.

    def value(self, name: str) -> Array | None:
        """The constant behind a name, or None."""
        return self.graph.constant(name)

    def matmul(self, a: str, b: str) -> str:
        """Matrix product."""
        return self.op("MatMul", a, b)

    def add2(self, a: str, b: str) -> str:
        """Sum."""
        return self.op("Add", a, b)

    def sub(self, a: str, b: str) -> str:
        """Difference."""
        return self.op("Sub", a, b)

    def mul(self, a: str, b: str) -> str:
        """Product."""
        return self.op("Mul", a, b)

    def div(self, a: str, b: str) -> str:
        """Quotient."""
        return self.op("Div", a, b)

    def cast(self, x: str, elem: int) -> str:
        """Cast, left out where the type is known to be right."""
        known = self.graph.type(x)
        return x if known and known.elem == elem else self.op("Cast", x, to=elem)

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        """Reshape; -1 and 0 as ONNX means them."""
        return self.op("Reshape", x, self.ints(shape, "shape"))

    def transpose(self, x: str, perm: Sequence[int]) -> str:
        """Transpose, left out where it changes nothing."""
        return x if list(perm) == sorted(perm) else self.op("Transpose", x, perm=list(perm))

    def concat(self, parts: Sequence[str], axis: int) -> str:
        """Concat, left out for one part."""
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=axis)

    def slice(self, x: str, axis: int, start: int, end: int, step: int = 1) -> str:
        """x[..., start:end:step, ...] along one axis."""
        if self.graph.opset < 10:
            assert step == 1
            return self.op("Slice", x, starts=[start], ends=[end], axes=[axis])
        steps = self.ints([step], "steps") if step != 1 else ""
        return self.op(
            "Slice",
            x,
            self.ints([start], "starts"),
            self.ints([end], "ends"),
            self.ints([axis], "axes"),
            steps,
        )

    def axes_op(self, op_type: str, x: str, axes: Sequence[int], since: int, **attrs: Any) -> str:
        """An operator whose axes became an input with opset `since`."""
        if self.graph.opset < since:
            return self.op(op_type, x, axes=list(axes), **attrs)
        return self.op(op_type, x, self.ints(axes, "axes"), **attrs)

    def unsqueeze(self, x: str, *axes: int) -> str:
        """Insert axes of length one."""
        return self.axes_op("Unsqueeze", x, axes, 13)

    def squeeze(self, x: str, *axes: int) -> str:
        """Remove axes of length one."""
        return self.axes_op("Squeeze", x, axes, 13)

    def select(self, x: str, axis: int, index: int) -> str:
        """x[..., index, ...]: one entry of an axis, the axis removed."""
        return self.squeeze(self.slice(x, axis, index, index + 1), axis)

    def reduce_sum(self, x: str, axes: Sequence[int], keepdims: bool = True) -> str:
        """Sum over axes."""
        return self.axes_op("ReduceSum", x, axes, 13, keepdims=int(keepdims))

    def reduce_mean(self, x: str, axes: Sequence[int], keepdims: bool = True) -> str:
        """Mean over axes."""
        return self.axes_op("ReduceMean", x, axes, 18, keepdims=int(keepdims))

    def reduce_max(self, x: str, axes: Sequence[int], keepdims: bool = True) -> str:
        """Maximum over axes."""
        return self.axes_op("ReduceMax", x, axes, 18, keepdims=int(keepdims))

    def reduce_min(self, x: str, axes: Sequence[int], keepdims: bool = True) -> str:
        """Minimum over axes."""
        return self.axes_op("ReduceMin", x, axes, 18, keepdims=int(keepdims))

    def clip(self, x: str, low: float | None, high: float | None, elem: int) -> str:
        """Clip to [low, high]; None is no bound."""
        if self.graph.opset < 11:
            return self.op("Clip", x, min=low, max=high)
        bounds = ["" if v is None else self.like(v, elem, "bound") for v in (low, high)]
        return self.op("Clip", x, *bounds)

    def dequantize(self, x: str, scale: str, zero: str = "", axis: int | None = None) -> str:
        """DequantizeLinear. Before opset 13 it has no axis: then scale and zero must broadcast."""
        if axis is None:
            return self.op("DequantizeLinear", x, scale, zero)
        if self.graph.opset >= 13:
            return self.op("DequantizeLinear", x, scale, zero, axis=axis)
        known = self.graph.type(x)
        rank = len(known.shape) if known and known.shape is not None else 0
        shape = [1] * rank
        shape[axis] = -1
        value = self.op("Cast", x, to=TensorProto.FLOAT)
        if zero:
            offset = self.op("Cast", zero, to=TensorProto.FLOAT)
            value = self.sub(value, self.reshape(offset, shape))
        return self.mul(value, self.reshape(scale, shape))

    def quantize(self, x: str, scale: str, zero: str = "") -> str:
        """QuantizeLinear, per tensor."""
        return self.op("QuantizeLinear", x, scale, zero)
