"""A read-only index over an ONNX graph: who makes a tensor, who reads it, what is constant, what shape it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, numpy_helper

from tvmx.frontend.rewrite.context import TensorType, type_of, used_names
from tvmx.frontend.rewrite.infer import infer_types

Array = NDArray[Any]


class OnnxGraph:
    """Built once per model; nodes are known by their position, tensors by their name."""

    def __init__(self, proto: ModelProto, input_shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
        """`input_shapes` fix the dims that shapes are inferred from, where the model leaves them open."""
        graph = proto.graph
        self.proto = proto
        self.nodes: list[NodeProto] = list(graph.node)
        self.initializers = {i.name: i for i in graph.initializer}
        self.inputs = [i.name for i in graph.input if i.name not in self.initializers]
        self.outputs = [o.name for o in graph.output]
        self.producer: dict[str, int] = {}
        self.consumers: dict[str, list[int]] = {}
        for index, node in enumerate(self.nodes):
            for name in node.output:
                if name:
                    self.producer[name] = index
            for name in dict.fromkeys(used_names(node)):
                self.consumers.setdefault(name, []).append(index)
        opsets = {"" if o.domain == "ai.onnx" else o.domain: o.version for o in proto.opset_import}
        self.opset = opsets.get("", 1)
        self.types: dict[str, TensorType] = infer_types(
            self.nodes, _with_shapes(graph.input, input_shapes or {}), self.initializers, opsets, proto.ir_version
        )
        for value in graph.output:
            if value.name not in self.types and (known := type_of(value.type)) is not None:
                self.types[value.name] = known
        self._arrays: dict[str, Array] = {}

    def constant(self, name: str) -> Array | None:
        """The value of an initialiser; None for anything computed or fed."""
        if name not in self.initializers or name in self.inputs:
            return None
        if name not in self._arrays:
            self._arrays[name] = numpy_helper.to_array(self.initializers[name])
        return self._arrays[name]

    def is_constant(self, name: str) -> bool:
        """Whether `name` is an initialiser."""
        return name in self.initializers

    def is_float(self, name: str) -> bool:
        """Whether a tensor is float32; unknown types are not."""
        known = self.types.get(name)
        return known is not None and known.elem == onnx.TensorProto.FLOAT

    def shape(self, name: str) -> tuple[Any, ...] | None:
        """Dims (int, symbol or None) of a tensor; None when even the rank is unknown."""
        known = self.types.get(name)
        return None if known is None else known.shape

    def size(self, name: str) -> int | None:
        """Number of elements, or None when a dim is not a number."""
        known = self.types.get(name)
        return None if known is None else known.size

    def dynamic_inputs(self, node: NodeProto) -> Iterator[int]:
        """Positions of a node's inputs that are computed at run time."""
        return (k for k, name in enumerate(node.input) if name and not self.is_constant(name))


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """A node's attribute; strings come as str."""
    for attr in node.attribute:
        if attr.name == name:
            value = onnx.helper.get_attribute_value(attr)
            return value.decode() if isinstance(value, bytes) else value
    return default


def node_name(node: NodeProto) -> str:
    """The name a user sees for a node: its own, else that of its first output."""
    return str(node.name or next((o for o in node.output if o), node.op_type))


def _with_shapes(
    inputs: Iterable[onnx.ValueInfoProto], shapes: Mapping[str, tuple[int, ...]]
) -> list[onnx.ValueInfoProto]:
    return [
        onnx.helper.make_tensor_value_info(v.name, v.type.tensor_type.elem_type, shapes[v.name])
        if v.name in shapes
        else v
        for v in inputs
    ]
