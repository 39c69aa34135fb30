"""The lowered program as data: tensors, kernel calls, constants. No TVM import (`from_relax` imports it late).

A dimension is an int, or a string: an arithmetic expression over the symbolic dims ("N", "N*4", "(N + 1)//2"),
in the language of `tvmx.runtime.dims`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Dimension = int | str
Shape = tuple[Dimension, ...]
TensorKind = Literal["input", "output", "constant", "intermediate"]

COPY = "tvmx.copy"
"""The kernel of a node that only copies its input to its output; the executor emits it itself."""


class NotStraightLine(Exception):
    """The program cannot be a straight line of kernel calls; the text is the reason. Callers fall back to the VM."""


@dataclass(frozen=True)
class Tensor:
    """One value of the program.

    `alias_of` names the tensor whose storage it shares, `alias_offset` bytes into it: a view (reshape, slice), or a
    part of a concatenation that is computed where it belongs.
    """

    name: str
    shape: Shape
    dtype: str
    kind: TensorKind
    alias_of: str | None = None
    alias_offset: Dimension = 0


@dataclass(frozen=True)
class Moves:
    """What a kernel does that only moves data: one of the two.

    `slices`: each output is consecutive elements of an input, given as (input index, its first element).
    `joined`: the only output is these inputs (indices, one may come twice) one after the other.
    """

    slices: tuple[tuple[int, int], ...] = ()
    joined: tuple[int, ...] = ()


@dataclass(frozen=True)
class Node:
    """One kernel call. Its parameters are the inputs, the first `leading_scalars` scalars, the outputs, then the
    remaining scalars.

    `inplace` lists (output index, input index) pairs that may share storage: the kernel reads each element of
    that input before it writes the same element of that output, and at no other time.
    """

    name: str  # unique in the graph
    kernel: str  # symbol in the module, or COPY
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    scalars: tuple[str, ...] = ()  # expressions over symbolic dims
    leading_scalars: int = 0
    inplace: tuple[tuple[int, int], ...] = ()
    op: str = ""  # what a person would call it: "conv2d+add+relu"
    flops: int = 0
    rule: str = ""  # schedule rule, or "tuned:<rule>"
    moves: Moves | None = None  # for a kernel that does nothing else


@dataclass(frozen=True)
class Guard:
    """Two dims that the program needs equal, which only the shapes of a run can tell."""

    left: Dimension
    right: Dimension


@dataclass(frozen=True)
class Graph:
    """A straight line of kernel calls. `inputs` and `outputs` keep the model's own names and order.

    Where an output has the name of another tensor (a model may return its input), the tensor gets a name of its
    own and `public_names` maps that to the model's name.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: dict[str, Tensor]
    nodes: tuple[Node, ...]
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    public_names: dict[str, str] = field(default_factory=dict)
    guards: tuple[Guard, ...] = ()

    def storage(self, name: str) -> str:
        """The tensor that owns the bytes of `name`: the end of its alias chain."""
        while (parent := self.tensors[name].alias_of) is not None:
            name = parent
        return name

    def offset(self, name: str) -> Dimension:
        """Bytes from the start of its storage to tensor `name`: an int, or an expression."""
        total, symbolic = 0, []
        tensor = self.tensors[name]
        while tensor.alias_of is not None:
            if isinstance(tensor.alias_offset, int):
                total += tensor.alias_offset
            else:
                symbolic.append(f"({tensor.alias_offset})")
            tensor = self.tensors[tensor.alias_of]
        return total if not symbolic else " + ".join([*symbolic, str(total)])


def from_relax(mod: Any, input_names: Sequence[str], output_names: Sequence[str], name: str = "model") -> Graph:
    """Extract the straight-line program of a fully lowered Relax module's `main`.

    Raises NotStraightLine with the reason when there is none (control flow, data-dependent shapes, packed calls).
    """
    from tvmx.relax_graph import extract

    return extract(mod, input_names, output_names, name)
