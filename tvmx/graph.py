"""The lowered program as data: tensors, kernel calls, constants. No TVM import.

A dimension is an int, or a string: an arithmetic expression over the symbolic dims ("N", "N*4", "(N + 1)//2").
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Dimension = int | str
Shape = tuple[Dimension, ...]
TensorKind = Literal["input", "output", "constant", "intermediate"]


@dataclass(frozen=True)
class Tensor:
    """One value of the program. `alias_of` names the tensor whose storage it views (reshape, flatten, ...)."""

    name: str
    shape: Shape
    dtype: str
    kind: TensorKind
    alias_of: str | None = None


@dataclass(frozen=True)
class Node:
    """One kernel call. Outputs are passed after inputs, as `call_tir` does, then `scalars`.

    `inplace` lists (output index, input index) pairs that may share storage: the kernel reads each element of
    that input before it writes the same element of that output, and at no other time.
    """

    name: str  # unique in the graph
    kernel: str  # symbol in the module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    scalars: tuple[str, ...] = ()  # expressions over symbolic dims
    inplace: tuple[tuple[int, int], ...] = ()
    op: str = ""  # what a person would call it: "conv2d+add+relu"
    flops: int = 0
    rule: str = ""  # schedule rule, or "tuned:<rule>"


@dataclass(frozen=True)
class Graph:
    """A straight line of kernel calls. `inputs` and `outputs` keep the model's own names and order."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: dict[str, Tensor]
    nodes: tuple[Node, ...]
    constants: dict[str, np.ndarray] = field(default_factory=dict)
