"""A rewrite is a row in a table: the operators it takes, why it refuses, what it emits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from tvmx.frontend.rewrite.context import Array, GraphContext, Refuse, TensorType
from tvmx.frontend.rewrite.emit import Emitter

GIVE_SHAPES = "give every input a fixed shape (--shape name=1,3,224,224)"


def op_key(node: onnx.NodeProto) -> str:
    """`LSTM`, or `com.microsoft:QGemm` outside the standard domain."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    return f"{domain}:{node.op_type}" if domain else node.op_type


class Match:
    """One node a rule looks at, with the questions a rule asks and the emitter it answers with."""

    def __init__(self, node: onnx.NodeProto, graph: GraphContext) -> None:
        self.node = node
        self.graph = graph
        self.emit = Emitter(graph, node.name or next((o for o in node.output if o), node.op_type))
        self._attrs = {a.name: a for a in node.attribute}

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute's value; strings come as str."""
        if name not in self._attrs:
            return default
        value = onnx.helper.get_attribute_value(self._attrs[name])
        if isinstance(value, bytes):
            return value.decode()
        if isinstance(value, list) and value and isinstance(value[0], bytes):
            return [v.decode() for v in value]
        return value

    def input(self, index: int) -> str:
        """The name of an input, "" when it is absent."""
        return self.node.input[index] if index < len(self.node.input) else ""

    def wants(self, index: int) -> bool:
        """Whether the node has this output and somebody may read it."""
        return index < len(self.node.output) and bool(self.node.output[index])

    def const(self, index: int) -> Array | None:
        """The constant value of an input; None when absent or computed."""
        name = self.input(index)
        return self.graph.constant(name) if name else None

    def need_const(self, index: int, what: str) -> Array:
        """The constant value of an input, or Refuse."""
        value = self.const(index)
        if value is None:
            raise Refuse(
                f"{what} ({self.input(index)!r}) is not a constant",
                "bind the input it comes from with constants={name: array}",
            )
        return value

    def type(self, name: str) -> TensorType:
        """Type of a value with known rank, or Refuse."""
        known = self.graph.type(name)
        if known is None or known.shape is None:
            raise Refuse(f"the rank of {name!r} is unknown", GIVE_SHAPES)
        return known

    def rank(self, index: int) -> int:
        """Rank of an input."""
        shape = self.type(self.input(index)).shape
        assert shape is not None
        return len(shape)

    def dim(self, index: int, axis: int) -> int:
        """One dim of an input as a number, or Refuse."""
        shape = self.type(self.input(index)).shape
        assert shape is not None
        if not -len(shape) <= axis < len(shape):
            raise Refuse(
                f"input {self.input(index)!r} has rank {len(shape)} but needs an axis {axis}",
                "repair the model",
            )
        dim = shape[axis]
        if not isinstance(dim, int):
            raise Refuse(f"dimension {axis} of {self.input(index)!r} is unknown", GIVE_SHAPES)
        return dim

    def shape(self, index: int) -> tuple[int, ...]:
        """All dims of an input as numbers, or Refuse."""
        return tuple(self.dim(index, axis) for axis in range(self.rank(index)))

    def elem(self, index: int) -> int:
        """ONNX element type of an input, or Refuse."""
        known = self.graph.type(self.input(index))
        if known is None:
            raise Refuse(f"the type of {self.input(index)!r} is unknown", GIVE_SHAPES)
        return known.elem

    def producer(self, index: int) -> onnx.NodeProto | None:
        """The node that makes an input, or None for graph inputs and constants."""
        return self.graph.producers.get(self.input(index))

    def used_once(self, name: str) -> bool:
        """Whether exactly one node reads `name` and it is no graph output."""
        return self.graph.uses[name] == 1 and name not in self.graph.outputs


def always(_: Match) -> str | None:
    """No reason to refuse."""
    return None


@dataclass(frozen=True)
class RewriteRule:
    """`rewrite` returns the values that take the place of the node's outputs ("" for one unused).

    With `required` a node that still refuses when nothing else changes is a ModelError;
    without, it stays as it is.
    """

    name: str
    ops: tuple[str, ...]
    rewrite: Callable[[Match], Sequence[str]]
    reject: Callable[[Match], str | None] = always
    required: bool = True
