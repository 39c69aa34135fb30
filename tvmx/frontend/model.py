"""What the frontend hands on: a Relax program with the exact names of the ONNX model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tvmx.config import Dim


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape (an int, or the name of a symbolic dim) and numpy dtype name of one tensor."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


@dataclass(frozen=True)
class IndexCheck:
    """Model input `input` is used as an index by `node`: valid are low <= value <= high.

    The kernels clamp, so a wrong index never reads astray; the executor uses this to refuse
    the input with an error instead of computing with the clamped one.
    """

    input: str
    low: int
    high: int
    node: str


@dataclass(frozen=True)
class Model:
    """An imported model.

    `mod` has one Relax function `main`: parameters are constants inside, the body is one dataflow
    block, and the result is a flat Tuple in the order of `outputs`. `inputs` is in the order of
    main's parameters. `bounds` holds the symbolic dims by name. `notes` says what the import had
    to decide on its own.
    """

    mod: Any
    name: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    bounds: Mapping[str, Dim] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    checks: tuple[IndexCheck, ...] = ()

    def __str__(self) -> str:
        def side(tensors: tuple[TensorInfo, ...]) -> str:
            return ", ".join(f"{t.name}: {t.dtype}[{','.join(map(str, t.shape))}]" for t in tensors)

        return f"{self.name}({side(self.inputs)}) -> ({side(self.outputs)})"
