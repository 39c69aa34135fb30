"""What a rewrite may ask about the graph it works on: constants, types, producers, fresh names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from tvmx.frontend.rewrite.evaluate import evaluate

Array = NDArray[np.generic]
Dim = int | str | None

_BYTES = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE, onnx.TensorProto.BFLOAT16)

# An unrolled LSTM step is about 20 nodes; past this a compile takes minutes.
MAX_NODES = 60_000


class Refuse(Exception):
    """A rewrite cannot be done with what is known now. At the end it becomes a ModelError."""

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.advice = advice


@dataclass(frozen=True)
class TensorType:
    """ONNX element type and dims (int, symbol or unknown). Shape None: unknown rank."""

    elem: int
    shape: tuple[Dim, ...] | None

    @property
    def size(self) -> int | None:
        """Number of elements, or None when a dim is not a number."""
        if self.shape is None:
            return None
        total = 1
        for dim in self.shape:
            if not isinstance(dim, int):
                return None
            total *= dim
        return total


def type_of(proto: onnx.TypeProto) -> TensorType | None:
    """The tensor type of a TypeProto; None for sequences, optionals and absent types."""
    if not proto.HasField("tensor_type") or not proto.tensor_type.elem_type:
        return None
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return TensorType(tensor.elem_type, None)
    dims: list[Dim] = []
    for dim in tensor.shape.dim:
        if dim.HasField("dim_value"):
            dims.append(dim.dim_value)
        else:
            dims.append(dim.dim_param or None)
    return TensorType(tensor.elem_type, tuple(dims))


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs held directly by a node's attributes."""
    for attr in node.attribute:
        if attr.type == onnx.AttributeProto.GRAPH:
            yield attr.g
        elif attr.type == onnx.AttributeProto.GRAPHS:
            yield from attr.graphs


def used_names(node: onnx.NodeProto) -> Iterator[str]:
    """Every value a node reads, those that its subgraphs capture included, repeats kept."""
    yield from (name for name in node.input if name)
    for graph in subgraphs(node):
        yield from captured_names(graph)


def captured_names(graph: onnx.GraphProto) -> Iterator[str]:
    """Values that a subgraph reads from the graphs around it."""
    own = {i.name for i in graph.input} | {i.name for i in graph.initializer}
    for node in graph.node:
        yield from (name for name in used_names(node) if name not in own)
        own.update(node.output)
    yield from (o.name for o in graph.output if o.name not in own)


def rename_uses(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Replace, in place, the values that `node` and its subgraphs read."""
    for i, name in enumerate(node.input):
        if name in names:
            node.input[i] = names[name]
    for graph in subgraphs(node):
        for inner in graph.node:
            rename_uses(inner, names)
        for output in graph.output:
            output.name = names.get(output.name, output.name)


@dataclass
class GraphContext:
    """The graph under rewriting. One per call; rules reach it through their Match."""

    opsets: dict[str, int]
    outputs: frozenset[str]
    names: set[str]
    constants: dict[str, onnx.TensorProto | Array] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)
    producers: dict[str, onnx.NodeProto] = field(default_factory=dict)
    uses: Counter[str] = field(default_factory=Counter)
    node_count: int = 0
    integral: set[str] = field(default_factory=set)  # float values that hold integers exactly
    _counters: Counter[str] = field(default_factory=Counter)

    @property
    def opset(self) -> int:
        """Version of the ai.onnx operator set."""
        return self.opsets.get("", 1)

    def fresh(self, hint: str) -> str:
        """A readable name nobody has: `hint`, or `hint_2`, `hint_3`, ..."""
        name = hint
        while name in self.names:
            self._counters[hint] += 1
            name = f"{hint}_{self._counters[hint] + 1}"
        self.names.add(name)
        return name

    def constant(self, name: str) -> Array | None:
        """The value of a constant, or None when `name` is computed at run time."""
        value = self.constants.get(name)
        if value is None:
            return None
        if isinstance(value, onnx.TensorProto):
            if value.data_location == onnx.TensorProto.EXTERNAL:
                raise Refuse(
                    f"the data of initializer {name!r} is not loaded",
                    "load the model together with its external data",
                )
            value = numpy_helper.to_array(value)
            self.constants[name] = value
        return value

    def add_constant(self, value: Array, hint: str) -> str:
        """Add an initializer and return its name."""
        name = self.fresh(hint)
        self.set_constant(name, value)
        return name

    def set_constant(self, name: str, value: Array) -> None:
        """Make `name` a constant of the graph."""
        array = np.asarray(value)
        self.constants[name] = array
        self.types[name] = TensorType(onnx.helper.np_dtype_to_tensor_dtype(array.dtype), tuple(array.shape))

    def type(self, name: str) -> TensorType | None:
        """The type of a value; that of a constant is read off its data."""
        known = self.types.get(name)
        if known is None and (value := self.constants.get(name)) is not None:
            if isinstance(value, onnx.TensorProto):
                known = TensorType(value.data_type, tuple(value.dims))
            else:
                elem = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
                known = TensorType(elem, tuple(value.shape))
            self.types[name] = known
        return known

    def constant_is_small(self, name: str, limit: int) -> bool:
        """Whether `name` is a constant of at most `limit` elements (without decoding it)."""
        if name not in self.constants:
            return False
        known = self.type(name)
        size = known.size if known else None
        return size is not None and size <= limit

    def fold(self, node: onnx.NodeProto, limit: int) -> list[Array] | None:
        """The outputs of `node` if all it reads are constants of up to `limit` elements."""
        if node.op_type in ("Shape", "Size") and node.domain == "":
            return self._fold_shape(node)
        if not all(self.constant_is_small(name, limit) for name in node.input if name):
            return None
        if any(True for _ in subgraphs(node)) or self._unpacks_a_weight(node):
            return None
        arrays = [self.constant(name) if name else None for name in node.input]
        return evaluate(node, arrays, self.opsets, max_output=max(limit, 4096))

    def _unpacks_a_weight(self, node: onnx.NodeProto) -> bool:
        """Whether folding would store an 8-bit weight as floats of four times the size."""
        if node.op_type != "Cast" or self.constant_is_small(node.input[0], 256):
            return False
        known = self.type(node.input[0])
        to = next(a.i for a in node.attribute if a.name == "to")
        return known is not None and known.elem in _BYTES and to in _FLOATS

    def _fold_shape(self, node: onnx.NodeProto) -> list[Array] | None:
        known = self.type(node.input[0])
        if known is None or known.shape is None:
            return None
        if node.op_type == "Size":
            return None if known.size is None else [np.asarray(known.size, np.int64)]
        attrs = {a.name: a.i for a in node.attribute}
        # ONNX clamps start and end to the rank, which is what a Python slice does.
        dims = known.shape[attrs.get("start", 0) : attrs.get("end", len(known.shape))]
        if not all(isinstance(dim, int) for dim in dims):
            return None
        return [np.asarray(dims, np.int64)]

    def count(self, nodes: Iterable[onnx.NodeProto]) -> None:
        """Account for new nodes. Raises Refuse past the limit."""
        self.node_count += sum(1 for _ in nodes)
        if self.node_count > MAX_NODES:
            raise Refuse(
                f"the unrolled graph would pass {MAX_NODES} nodes",
                "use a shorter sequence or fewer iterations",
            )


def clean(hint: str) -> str:
    """A readable prefix for new names: no leading or doubled slashes, no spaces."""
    return re.sub(r"/+", "/", hint.replace(" ", "_").replace(":", "_")).strip("/") or "node"
