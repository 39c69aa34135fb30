"""Put a subgraph's nodes into the graph around it, once or once per iteration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx

from tvmx.frontend.rewrite.context import clean, rename_uses
from tvmx.frontend.rewrite.rule import Match


class Body:
    """A subgraph ready to be inlined any number of times; its constants are shared by all copies."""

    def __init__(
        self,
        m: Match,
        inputs: Iterable[str],
        outputs: Iterable[str],
        nodes: Iterable[onnx.NodeProto],
        initializers: Iterable[onnx.TensorProto] = (),
    ) -> None:
        self.m = m
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self.nodes: list[onnx.NodeProto] = []
        self._shared: dict[str, str] = {}
        for tensor in initializers:
            copy = onnx.TensorProto()
            copy.CopyFrom(tensor)
            copy.name = m.graph.fresh(f"{m.emit.prefix}/{clean(tensor.name)}")
            m.graph.constants[copy.name] = copy
            self._shared[tensor.name] = copy.name
        for node in nodes:
            values = m.graph.fold(node, 0) if node.op_type == "Constant" else None
            if values is None:
                self.nodes.append(node)
            else:
                name = f"{m.emit.prefix}/{clean(node.output[0])}"
                self._shared[node.output[0]] = m.graph.add_constant(values[0], name)

    @classmethod
    def of_graph(cls, m: Match, graph: onnx.GraphProto) -> Body:
        """The body of an If, Loop or Scan."""
        inputs, outputs = ([v.name for v in group] for group in (graph.input, graph.output))
        return cls(m, inputs, outputs, graph.node, graph.initializer)

    def inline(self, actuals: Sequence[str], step: str = "") -> list[str]:
        """Emit a copy with `actuals` as inputs; returns the names of the outputs.

        Constant conditions, counters and shapes fold on the way.
        """
        m = self.m
        names = {**self._shared, **dict(zip(self.inputs, actuals))}
        prefix = f"{m.emit.prefix}/{step}" if step else m.emit.prefix
        for node in self.nodes:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            rename_uses(copy, names)
            for k, name in enumerate(copy.output):
                if name:
                    names[name] = m.graph.fresh(f"{prefix}/{clean(name)}")
                    copy.output[k] = names[name]
            copy.name = f"{prefix}/{clean(node.name)}" if node.name else ""
            m.emit.add(copy)
        # An output may also be a value of the graph around.
        return [names.get(name, name) for name in self.outputs]
