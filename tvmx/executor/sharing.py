"""Slices and concatenations of the outermost axis that move no byte.

A slice becomes a view into its source. The parts of a concatenation are computed where they belong in its result; a
part that cannot be (it comes twice, is an input, a constant, a view, or lies in another result, or would begin between
multiples of the alignment that kernels rely on) is copied there alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tvmx.executor.lifetimes import arena_bound, dtype_bytes, tensor_bytes
from tvmx.graph import COPY, Dimension, Graph, Node, Tensor
from tvmx.runtime.arena import ALIGNMENT

# One by one with a bound each: a program with more such nodes that need more memory together keeps the others' kernels.
_MAX_TRIED = 64


def shared(graph: Graph) -> Graph:
    """`graph` without the kernels that only move bytes, where that needs no more memory at the peak.

    A view keeps all of its source alive, and a result is alive from its first part on; where that raises the peak, the
    kernel stays. A program with symbolic sizes has no peak yet: there every such kernel goes.
    """
    movers = [n.name for n in graph.nodes if n.moves is not None]
    if not movers:
        return graph
    everything = _without(graph, movers)
    if any(isinstance(tensor_bytes(t), str) for t in graph.tensors.values()):
        return everything
    limit = arena_bound(graph)
    if arena_bound(everything) <= limit:
        return everything
    kept: list[str] = []
    found = graph
    for name in movers[:_MAX_TRIED]:
        attempt = _without(graph, [*kept, name])
        if attempt is not found and arena_bound(attempt) <= limit:
            kept.append(name)
            found = attempt
    return found


def _without(graph: Graph, movers: Sequence[str]) -> Graph:
    """The graph after taking out those of the named nodes that can be."""
    editor = _Editor(graph)
    chosen = set(movers)
    nodes: list[Node] = []
    for node in graph.nodes:
        instead = editor.replaced(node) if node.name in chosen else None
        nodes.extend([node] if instead is None else instead)
    return dataclasses.replace(graph, nodes=tuple(nodes), tensors=editor.graph.tensors)


class _Editor:
    """Changes aliases of a graph of its own, node by node in order."""

    def __init__(self, graph: Graph) -> None:
        self.graph = dataclasses.replace(graph, tensors=dict(graph.tensors))
        self.tensors = self.graph.tensors

    def replaced(self, node: Node) -> list[Node] | None:
        """The copies that are left of the node; None where it stays as it is."""
        assert node.moves is not None
        return self._slices(node) if node.moves.slices else self._joined(node)

    def _slices(self, node: Node) -> list[Node] | None:
        assert node.moves is not None
        starts: list[tuple[Tensor, str, int]] = []
        for out, (index, first) in zip(node.outputs, node.moves.slices):
            tensor = self.tensors[out]
            if tensor.kind != "intermediate" or tensor.alias_of is not None:
                return None  # computed into a model's output
            starts.append((tensor, node.inputs[index], first * dtype_bytes(tensor.dtype)))
        views = [start % ALIGNMENT == 0 for _, _, start in starts]
        if not _worth_it([t for t, _, _ in starts], views):
            return None
        copies: list[Node] = []
        for (tensor, source, start), view in zip(starts, views):
            if view:
                self.tensors[tensor.name] = dataclasses.replace(tensor, alias_of=source, alias_offset=start)
            elif tensor_bytes(tensor) != 0:
                place = self._fresh(f"{tensor.name}.source", tensor, source, start)
                copies.append(_copy(node, len(copies), place, tensor.name))
        return copies

    def _joined(self, node: Node) -> list[Node] | None:
        assert node.moves is not None
        out = node.outputs[0]
        parts = [self.tensors[node.inputs[i]] for i in node.moves.joined]
        before = dict(self.tensors)
        offsets = _offsets(parts)
        placed: list[bool] = []
        for part, (offset, aligned) in zip(parts, offsets):
            fits = aligned and self._can_move(part.name, out)
            if fits:
                root = self.tensors[self.graph.storage(part.name)]
                self.tensors[root.name] = dataclasses.replace(root, alias_of=out, alias_offset=offset)
            placed.append(fits)
        if not _worth_it(parts, placed):
            self.tensors.clear()
            self.tensors.update(before)
            return None
        copies: list[Node] = []
        for part, (offset, _), fits in zip(parts, offsets, placed):
            if not fits and tensor_bytes(part) != 0:
                place = self._fresh(f"{out}.part", part, out, offset)
                copies.append(_copy(node, len(copies), part.name, place))
        return copies

    def _can_move(self, name: str, out: str) -> bool:
        """The tensor is all of a storage in the arena that is nobody's part yet, and so can lie elsewhere."""
        root = self.tensors[self.graph.storage(name)]
        return (
            root.kind == "intermediate"
            and self.graph.offset(name) == 0
            and tensor_bytes(root) == tensor_bytes(self.tensors[name])
            and root.name != self.graph.storage(out)
        )

    def _fresh(self, wanted: str, like: Tensor, parent: str, offset: Dimension) -> str:
        name, count = wanted, 1
        while name in self.tensors:
            name, count = f"{wanted}{count}", count + 1
        self.tensors[name] = Tensor(name, like.shape, like.dtype, "intermediate", parent, offset)
        return name


def _copy(node: Node, index: int, source: str, out: str) -> Node:
    return Node(f"{node.name}.{index}", COPY, (source,), (out,), op="copy")


def _worth_it(tensors: Sequence[Tensor], shared: Sequence[bool]) -> bool:
    """At least half of the bytes stay where they are: a copy is done by one thread, the kernel by all.

    Symbolic sizes count alike.
    """
    sizes = [tensor_bytes(t) for t in tensors]
    known = [s for s in sizes if isinstance(s, int)]
    weights = known if len(known) == len(sizes) else [1] * len(sizes)
    return any(shared) and 2 * sum(w for w, s in zip(weights, shared) if s) >= sum(weights)


def _offsets(parts: Sequence[Tensor]) -> list[tuple[Dimension, bool]]:
    """(byte where each part begins, whether that is a multiple of the alignment for all sizes)."""
    found: list[tuple[Dimension, bool]] = []
    total, symbolic, aligned = 0, list[str](), True
    for part in parts:
        offset: Dimension = total if not symbolic else " + ".join([*symbolic, str(total)])
        found.append((offset, aligned and total % ALIGNMENT == 0))
        size = tensor_bytes(part)
        if isinstance(size, int):
            total += size
        else:
            symbolic.append(f"({size})")
            static = dtype_bytes(part.dtype) * math.prod(d for d in part.shape if isinstance(d, int))
            aligned = aligned and static % ALIGNMENT == 0
    return found
