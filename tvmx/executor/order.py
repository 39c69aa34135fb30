"""Graph → the same graph with its nodes in the order that needs the least memory; names and numbers of nodes stay."""

from __future__ import annotations

import dataclasses

from tvmx.executor.lifetimes import arena_bound, overlap, tensor_bytes
from tvmx.graph import Graph, Node
from tvmx.memory.order import Program, least_peak_order
from tvmx.runtime.arena import ALIGNMENT


def reordered(graph: Graph) -> Graph:
    """`graph` with a lower peak, or `graph` itself: where no order found is lower, or sizes are symbolic.

    Only data decide what may change places: nodes have no other effect, indices from the user's data are checked when
    inputs are bound, and a node keeps its name, so that errors, profiles and dumps speak of the same nodes.
    """
    program = program_of(graph)
    if program is None:
        return graph
    found = least_peak_order(program)
    if found.peak >= found.original_peak:
        return graph
    changed = dataclasses.replace(graph, nodes=tuple(graph.nodes[i] for i in found.steps))
    return changed if arena_bound(changed) < arena_bound(graph) else graph


def program_of(graph: Graph) -> Program | None:
    """What the search for an order must know; None when sizes are symbolic."""
    index: dict[str, int] = {}
    sizes: list[int] = []
    for name, tensor in graph.tensors.items():
        if tensor.alias_of is not None:
            continue
        size = tensor_bytes(tensor) if tensor.kind == "intermediate" else 0
        if isinstance(size, str):
            return None
        index[name] = len(sizes)
        sizes.append(-(-size // ALIGNMENT) * ALIGNMENT)
    return Program(
        size=tuple(sizes),
        touches=tuple(tuple(index[graph.storage(t)] for t in (*n.inputs, *n.outputs)) for n in graph.nodes),
        after=dependencies(graph),
        over=tuple(_over(graph, n, index) for n in graph.nodes),
    )


def _over(graph: Graph, node: Node, index: dict[str, int]) -> tuple[tuple[int, int], ...]:
    pairs = []
    for out, source in ((node.outputs[o], node.inputs[i]) for o, i in node.inplace):
        owner = graph.storage(out)
        whole = tensor_bytes(graph.tensors[owner]) == tensor_bytes(graph.tensors[out])
        once = sum(graph.storage(n) == graph.storage(source) for n in node.inputs) == 1
        if whole and once:
            pairs.append((index[owner], index[graph.storage(source)]))
    return tuple(pairs)


def dependencies(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Per node the earlier ones that write bytes it reads."""
    writers: dict[str, list[tuple[int, str]]] = {}
    found = []
    for step, node in enumerate(graph.nodes):
        before = {
            writer
            for name in node.inputs
            for writer, written in writers.get(graph.storage(name), ())
            if overlap(graph, name, written)
        }
        found.append(tuple(sorted(before)))
        for name in node.outputs:
            writers.setdefault(graph.storage(name), []).append((step, name))
    return tuple(found)
