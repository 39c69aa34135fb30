"""Graph → the buffers of the arena: who is alive when, and what is computed in place."""

from __future__ import annotations

from tvmx.graph import Graph, Node, Tensor
from tvmx.memory.blocks import lower_bound, merge
from tvmx.runtime.arena import ArenaBuffer, to_problem


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element ("bool" and sub-byte types take a byte)."""
    bits = int("".join(c for c in dtype.partition("_")[0] if c.isdigit()) or 8)
    # float8_e4m3fn and its like: the first number is the width
    return max(1, bits // 8)


def tensor_bytes(tensor: Tensor) -> int | str:
    """Bytes of a tensor: an int, or an expression when a dimension is symbolic."""
    count, symbolic = dtype_bytes(tensor.dtype), []
    for d in tensor.shape:
        if isinstance(d, int):
            count *= d
        else:
            symbolic.append(f"({d})")
    return count if not symbolic or count == 0 else " * ".join([*symbolic, str(count)])


def overlap(graph: Graph, a: str, b: str) -> bool:
    """Whether two tensors of one storage may share bytes; sizes that only the run tells may."""
    place = [(graph.offset(n), tensor_bytes(graph.tensors[n])) for n in (a, b)]
    (at, size), (other, length) = place
    if isinstance(at, str) or isinstance(size, str) or isinstance(other, str) or isinstance(length, str):
        return True
    return at < other + length and other < at + size


def arena_bound(graph: Graph) -> int:
    """Bytes that no plan of the program can go under. Only for a program without symbolic sizes."""
    return lower_bound(merge(to_problem(arena_buffers(graph), int)))


def arena_buffers(graph: Graph) -> list[ArenaBuffer]:
    """Every intermediate that owns storage, with half-open lifetimes in nodes; views count as uses of their owner."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for step, node in enumerate(graph.nodes):
        for name in (*node.inputs, *node.outputs):
            owner = graph.storage(name)
            if graph.tensors[owner].kind == "intermediate":
                first.setdefault(owner, step)
                last[owner] = step
    over = _in_place(graph, first, last)
    return [
        ArenaBuffer(name, first[name], last[name] + 1, tensor_bytes(graph.tensors[name]), over.get(name))
        for name in first
    ]


def in_place_nodes(graph: Graph) -> dict[str, str]:
    """Output storage → the input storage that it overwrites, as `arena_buffers` decides."""
    return {b.id: b.over for b in arena_buffers(graph) if b.over is not None}


def _in_place(graph: Graph, first: dict[str, int], last: dict[str, int]) -> dict[str, str]:
    over: dict[str, str] = {}
    for step, node in enumerate(graph.nodes):
        taken: set[str] = set()
        for out_index, in_index in node.inplace:
            out, source = node.outputs[out_index], node.inputs[in_index]
            owner, dying = graph.storage(out), graph.storage(source)
            if (
                owner not in over
                and dying not in taken
                and dying in last
                and last[dying] == step
                and first.get(owner) == step
                and owner != dying
                and _uses(graph, node, dying) == 1
                and tensor_bytes(graph.tensors[owner]) == tensor_bytes(graph.tensors[dying])
                and _is_whole(graph, owner, out)
            ):
                over[owner] = dying
                taken.add(dying)
    return over


def _uses(graph: Graph, node: Node, owner: str) -> int:
    return sum(graph.storage(name) == owner for name in node.inputs)


def _is_whole(graph: Graph, owner: str, view: str) -> bool:
    """The output fills its storage: no other view of it is written by another node."""
    return tensor_bytes(graph.tensors[owner]) == tensor_bytes(graph.tensors[view])
