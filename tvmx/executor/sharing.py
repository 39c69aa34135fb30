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
    """The graph after taking out those of the named nodes that can be.

    Later results first: where one holds the parts of an earlier one, as in a DenseNet, the earlier is a view of it.
    """
    editor = _Editor(graph)
    chosen = set(movers)
    gone = set()
    for index, node in enumerate(graph.nodes):
        if node.name in chosen and node.moves is not None and node.moves.slices and editor.slices(index, node):
            gone.add(index)
    for index, node in reversed(list(enumerate(graph.nodes))):
        if node.name in chosen and node.moves is not None and node.moves.joined and editor.joined(index, node):
            gone.add(index)
    nodes: list[Node] = []
    for index, node in enumerate(graph.nodes):
        nodes.extend(c.node for c in editor.copies if c.before == index)
        if index not in gone:
            nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(nodes), tensors=editor.graph.tensors)


@dataclasses.dataclass
class _PartCopy:
    """A copy that takes the place of a kernel, to be run before node number `before` of the original program."""

    before: int
    node: Node


class _Editor:
    """Changes aliases of a graph of its own. `copies` are the nodes that this needs."""

    def __init__(self, graph: Graph) -> None:
        self.graph = dataclasses.replace(graph, tensors=dict(graph.tensors))
        self.tensors = self.graph.tensors
        self.copies: list[_PartCopy] = []
        self._copies_of: dict[str, list[_PartCopy]] = {}  # by what is copied

    def slices(self, index: int, node: Node) -> bool:
        """Make the outputs views of the inputs; whether the node can go."""
        assert node.moves is not None
        starts: list[tuple[Tensor, str, int]] = []
        for out, (source, first) in zip(node.outputs, node.moves.slices):
            tensor = self.tensors[out]
            if tensor.kind != "intermediate" or tensor.alias_of is not None:
                return False  # computed into a model's output
            starts.append((tensor, node.inputs[source], first * dtype_bytes(tensor.dtype)))
        views = [start % ALIGNMENT == 0 for _, _, start in starts]
        if not _worth_it([t for t, _, _ in starts], views):
            return False
        for (tensor, parent, start), view in zip(starts, views):
            if view:
                self.tensors[tensor.name] = dataclasses.replace(tensor, alias_of=parent, alias_offset=start)
            elif tensor_bytes(tensor) != 0:
                self._copy(index, node, self._fresh(f"{tensor.name}.source", tensor, parent, start), tensor.name)
        return True

    def joined(self, index: int, node: Node) -> bool:
        """Let the parts be computed in the result; whether the node can go."""
        assert node.moves is not None
        out = node.outputs[0]
        parts = [self.tensors[node.inputs[i]] for i in node.moves.joined]
        if self._lies_together(index, parts, out):
            return True
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
            return False
        for part, (offset, _), fits in zip(parts, offsets, placed):
            if not fits and tensor_bytes(part) != 0:
                self._copy(index, node, part.name, self._fresh(f"{out}.part", part, out, offset))
        return True

    def _lies_together(self, index: int, parts: Sequence[Tensor], out: str) -> bool:
        """Make the result a view where its parts, or copies of them, lie one after the other already."""
        result = self.tensors[out]
        if result.kind != "intermediate" or result.alias_of is not None:
            return False
        for home, start in self._places(parts[0]):
            at, used = start, list[_PartCopy]()
            for part in parts:
                size = tensor_bytes(part)
                if isinstance(size, str):
                    return False
                here = [c for c in self._copies_of.get(part.name, ()) if self._place(c.node.outputs[0]) == (home, at)]
                if not here and self._place(part.name) != (home, at):
                    break
                used.extend(here[:1])
                at += size
            else:
                if start % ALIGNMENT or home == out:
                    return False
                for copy in used:
                    copy.before = min(copy.before, index)
                self.tensors[out] = dataclasses.replace(result, alias_of=home, alias_offset=start)
                return True
        return False

    def _places(self, part: Tensor) -> list[tuple[str, int]]:
        """Where a tensor and its copies lie: storage and byte."""
        names = [part.name, *(c.node.outputs[0] for c in self._copies_of.get(part.name, ()))]
        return [p for p in map(self._place, names) if p is not None]

    def _place(self, name: str) -> tuple[str, int] | None:
        at = self.graph.offset(name)
        return (self.graph.storage(name), at) if isinstance(at, int) else None

    def _copy(self, index: int, node: Node, source: str, out: str) -> None:
        count = sum(c.node.name.startswith(f"{node.name}.") for c in self.copies)
        copy = _PartCopy(index, Node(f"{node.name}.{count}", COPY, (source,), (out,), op="copy"))
        self.copies.append(copy)
        self._copies_of.setdefault(source, []).append(copy)

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
