"""Kernels whose shapes are bound at run time: one piece of machine code, its launches a function of the dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvmx.cuda.formula import Size, evaluate, formula
from tvmx.cuda.lower import Argument, DeviceProgram, Launch, lowered
from tvmx.errors import InputError


@dataclass(frozen=True)
class SymbolicArgument:
    """As `Argument`, its shape in formulas; `value` is the formula of a scalar argument."""

    index: int
    dtype: str
    shape: tuple[Size, ...] = ()
    value: Size | None = None

    def bind(self, dims: Mapping[str, int]) -> Argument:
        shape = tuple(evaluate(s, dims) for s in self.shape)
        return Argument(self.index, self.dtype, shape, None if self.value is None else evaluate(self.value, dims))


@dataclass(frozen=True)
class SymbolicLaunch:
    """As `Launch`, in formulas."""

    kernel: str
    arguments: tuple[SymbolicArgument, ...]
    grid: tuple[Size, ...]
    block: tuple[Size, ...]
    shared_bytes: Size = 0

    def bind(self, dims: Mapping[str, int]) -> Launch:
        gx, gy, gz = (evaluate(s, dims) for s in self.grid)
        bx, by, bz = (evaluate(s, dims) for s in self.block)
        arguments = tuple(a.bind(dims) for a in self.arguments)
        return Launch(self.kernel, arguments, (gx, gy, gz), (bx, by, bz), evaluate(self.shared_bytes, dims))


@dataclass(frozen=True)
class SymbolicProgram:
    """CUDA source of one PrimFunc with symbolic dims. `bind` gives the program for numbers; the source stays."""

    name: str
    source: str
    launches: tuple[SymbolicLaunch, ...]
    parameters: tuple[SymbolicArgument, ...]

    @property
    def dims(self) -> tuple[str, ...]:
        """The dims that the parameters' shapes name, in order."""
        named = (s for p in self.parameters for s in p.shape if isinstance(s, str) and s.isidentifier())
        return tuple(dict.fromkeys(named))

    def dims_of(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """The dims that the first parameters' shapes say. Raises InputError where they disagree with each other."""
        found: dict[str, int] = {}
        for parameter, shape in zip(self.parameters, shapes):
            for size, extent in zip(parameter.shape, shape):
                if isinstance(size, str) and size.isidentifier() and found.setdefault(size, extent) != extent:
                    raise InputError(f"dim {size!r} is {found[size]} in one tensor and {extent} in another")
        return found

    def bind(self, dims: Mapping[str, int]) -> DeviceProgram:
        """The launches for these dims. Raises CompileError for one that is missing."""
        launches = tuple(l.bind(dims) for l in self.launches)
        return DeviceProgram(self.name, self.source, launches, tuple(p.bind(dims) for p in self.parameters))


def lower_symbolic(func: Any, target: Any, name: str = "main") -> SymbolicProgram:
    """One scheduled PrimFunc with symbolic dims → its CUDA source, and launches in formulas.

    Raises CompileError where it does not lower, or a launch is no arithmetic of the dims.
    """

    def argument(index: int, dtype: str, shape: Sequence[Any], value: Any) -> SymbolicArgument:
        return SymbolicArgument(
            index, dtype, tuple(formula(e) for e in shape), None if value is None else formula(value)
        )

    def launch(kernel: str, arguments: Any, grid: Any, block: Any, shared: Any) -> SymbolicLaunch:
        sizes = (tuple(formula(e) for e in grid), tuple(formula(e) for e in block))
        return SymbolicLaunch(kernel, tuple(arguments), *sizes, formula(shared))

    source, launches, parameters = lowered(func, target, name, argument, launch)
    return SymbolicProgram(name, source, tuple(launches), tuple(parameters))
