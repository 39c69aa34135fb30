"""Float tensors on the way from one integer kernel to another, read off the compiled program.

A kernel is an integer one if its products are. A float tensor is *between* two of them if an integer kernel made it, or
a float kernel that read such a tensor, and likewise in the other direction. Each is listed with the operators that keep
it in float: in its readers and writer or, through float kernels, in their neighbours. What has none is a gap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tvmx.precision.kinds import SENSITIVE

FLOATS = ("float16", "bfloat16", "float32", "float64")
CODES = ("int8", "uint8")
PRODUCTS = ("conv2d", "conv3d", "matmul", "conv1d")
# Names of kernels where they differ from the operator's.
KERNEL_NAMES = ("softmax", "log_softmax", "layer_norm", "rms_norm", "instance_norm", "group_norm", "gelu", "gelu_tanh")
GATES = {"sigmoid", "tanh"}  # an LSTM or GRU is unrolled: its gates are known by these


@dataclass(frozen=True)
class FloatTensor:
    """`kept_by`: the operators that need floats there, by kind; empty for none, which is a gap."""

    name: str
    type: str  # "float32 [1, 128, 384]"
    writer: str
    readers: tuple[str, ...]
    kept_by: tuple[str, ...]


def is_integer(node: Any) -> bool:
    """Does this kernel multiply integers?"""
    return "_int8" in node.kernel


def floats_between(graph: Any) -> tuple[FloatTensor, ...]:
    """All float tensors between two integer kernels of a lowered graph, in program order."""
    after = _reached(graph, graph.nodes, forward=True)
    before = _reached(graph, tuple(reversed(graph.nodes)), forward=False)
    found: list[FloatTensor] = []
    kernels: list[set[str]] = []  # float kernels at each of them
    for node in graph.nodes:
        for output in node.outputs:
            name = graph.storage(output)
            if name in after and name in before:
                readers = [n for n in graph.nodes if name in {graph.storage(i) for i in n.inputs}]
                tensor = graph.tensors[output]
                kind = f"{tensor.dtype} [{', '.join(map(str, tensor.shape))}]"
                names = tuple(n.op or n.kernel for n in readers)
                found.append(FloatTensor(output, kind, node.op or node.kernel, names, _kept_by(node, readers)))
                kernels.append({n.name for n in (node, *readers) if not is_integer(n)})
    return _spread(found, kernels)


def _spread(found: list[FloatTensor], kernels: list[set[str]]) -> tuple[FloatTensor, ...]:
    """What lies between an integer kernel and an operator that needs floats, or two of them, is kept by those."""
    for _ in found:
        unknown = [k for k, t in enumerate(found) if not t.kept_by]
        changed = False
        for k in unknown:
            near = [t.kept_by for t, at in zip(found, kernels) if at & kernels[k] and t.kept_by]
            if near:
                found[k] = dataclasses.replace(
                    found[k], kept_by=tuple(dict.fromkeys(n for names in near for n in names))
                )
                changed = True
        if not changed:
            break
    return tuple(found)


def _reached(graph: Any, nodes: Iterable[Any], forward: bool) -> set[str]:
    """Float tensors that come after an integer kernel (`forward`), or before one, through float tensors alone."""
    found: set[str] = set()
    for node in nodes:
        sources, targets = (node.inputs, node.outputs) if forward else (node.outputs, node.inputs)
        if is_integer(node) or any(graph.storage(s) in found for s in sources) or _rounds(graph, node, forward):
            found.update(graph.storage(t) for t in targets if _is_float(graph, t))
    return found


def _rounds(graph: Any, node: Any, forward: bool) -> bool:
    """A kernel that reads codes (forward) or writes them: an integer kernel stands at their other end."""
    names = node.inputs if forward else node.outputs
    return any(graph.tensors[n].dtype in CODES and graph.tensors[n].kind != "constant" for n in names)


def _is_float(graph: Any, name: str) -> bool:
    return graph.tensors[name].dtype in FLOATS and graph.tensors[graph.storage(name)].kind in ("intermediate", "output")


def _kept_by(writer: Any, readers: Iterable[Any]) -> tuple[str, ...]:
    """Operators in the kernels around a tensor that compute in float on purpose."""
    found: list[str] = []
    for node in (writer, *readers):
        parts = (node.op or node.kernel).split("+")
        found += [p for p in parts if p in KERNEL_NAMES or p in _SENSITIVE_NAMES]
        if GATES <= set(parts):
            found.append("gates of a recurrent cell")
        if not is_integer(node):
            found += [f"float {p}" for p in parts if p.startswith(PRODUCTS) or "conv2d" in p]
    return tuple(dict.fromkeys(found))


# Extrema of codes are taken on the codes: those of floats are the ranges that a model quantises by at run time.
_SENSITIVE_NAMES = frozenset(kind.removeprefix("nn.") for kind in SENSITIVE) | {"max", "min"}
