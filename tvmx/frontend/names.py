"""Which nodes of the user's model each converted node stands for.

Folding and rewriting rename, merge and replace nodes, but keep the names of most tensors. A node of the model whose
output no longer exists was merged into the first one downstream whose output does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onnx import NodeProto


@dataclass(frozen=True)
class NodeName:
    """One node as a user knows it; an unnamed one goes by its first output."""

    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, node: NodeProto) -> NodeName:
        outputs = tuple(o for o in node.output if o)
        return cls(node.name or (outputs[0] if outputs else ""), node.op_type, tuple(node.input), outputs)


def names_of(nodes: Iterable[NodeProto]) -> tuple[NodeName, ...]:
    return tuple(NodeName.of(n) for n in nodes)


def node_table(nodes: Sequence[NodeProto], original: Sequence[NodeName]) -> list[list[object]]:
    """Per converted node: [name, operator, positions of its consumers, [[name, operator] of the original nodes]]."""
    current = names_of(nodes)
    makers = {out: i for i, node in enumerate(current) for out in node.outputs}
    readers = _readers(current)
    own: list[list[list[str]]] = [[] for _ in current]
    next_of = _readers(original)
    for position, node in enumerate(original):
        home = _home(position, original, next_of, makers)
        if home is not None and node.name != current[home].name:
            own[home].append([node.name, node.op_type])
    return [
        [node.name, node.op_type, sorted({r for out in node.outputs for r in readers.get(out, ())}), own[i]]
        for i, node in enumerate(current)
    ]


def _readers(nodes: Sequence[NodeName]) -> dict[str, list[int]]:
    readers: dict[str, list[int]] = {}
    for i, node in enumerate(nodes):
        for name in node.inputs:
            readers.setdefault(name, []).append(i)
    return readers


def _home(
    start: int, nodes: Sequence[NodeName], readers: Mapping[str, Sequence[int]], makers: Mapping[str, int]
) -> int | None:
    seen, queue = {start}, deque([start])
    while queue:
        node = nodes[queue.popleft()]
        for out in node.outputs:
            if out in makers:
                return makers[out]
        for reader in (r for out in node.outputs for r in readers.get(out, ())):
            if reader not in seen:
                seen.add(reader)
                queue.append(reader)
    return None
