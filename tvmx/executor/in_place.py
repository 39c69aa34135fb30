"""Kernels that run in place: the overwritten input becomes the output buffer itself.

LLVM is told that no two parameters overlap (`tirx.noalias`); without that it stores the accumulators of a convolution
or a product at every step, three times slower. A kernel whose output lies on its input would break the promise, so
its body is rewritten to read the output's parameter, and the input's is no longer used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvmx.graph import Node

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class InPlace:
    """Which inputs a kernel overwrites: (output, input) pairs as in `tvmx.graph.Node.inplace`."""

    n_inputs: int
    pairs: Pairs


def kernels_in_place(
    nodes: Sequence[Node], over: Mapping[str, str], storage: Callable[[str], str]
) -> dict[str, InPlace | None]:
    """The kernels that overwrite an input; None for one that does so at some of its calls only.

    `over` maps an output's storage to the input storage that it takes over, `storage` a tensor's name to its storage.
    """
    uses: dict[str, set[Pairs]] = {}
    inputs: dict[str, int] = {}
    for node in nodes:
        pairs = tuple((o, i) for o, i in node.inplace if over.get(storage(node.outputs[o])) == storage(node.inputs[i]))
        uses.setdefault(node.kernel, set()).add(pairs)
        inputs[node.kernel] = len(node.inputs)
    found: dict[str, InPlace | None] = {}
    for kernel, seen in uses.items():
        if seen != {()}:
            found[kernel] = InPlace(inputs[kernel], next(iter(seen))) if len(seen) == 1 else None
    return found


def read_from_outputs(func: Any, n_inputs: int, pairs: Pairs) -> Any | None:
    """The kernel with every use of an overwritten input replaced by its output; None where their types differ."""
    from tvm_ffi import structural_equal

    from tvmx.schedule.tir import substitute

    buffers = [p for p in func.params if hasattr(p.ty, "shape")]
    mapping = [(buffers[i], buffers[n_inputs + o]) for o, i in pairs]
    if not all(structural_equal(a.ty, b.ty) for a, b in mapping):
        return None
    return func.with_body(substitute(func.body, mapping))
