"""Symbolic dims: bound from the inputs' shapes, with sizes, offsets and output shapes kept per signature."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmx.errors import InputError
from tvmx.runtime.arena import to_problem
from tvmx.runtime.dims import Bindings, DimFunction, compile_dim, names_in
from tvmx.runtime.manifest import Entry

if TYPE_CHECKING:
    from tvmx.memory import CacheStats, PlanCache, Problem

_KEPT_SIGNATURES = 64


@dataclass(frozen=True)
class Signature:
    """Everything that follows from the dims: `values` is what the host function takes."""

    dims: dict[str, int]
    values: np.ndarray[Any, np.dtype[np.int64]]
    output_shapes: tuple[tuple[int, ...], ...]
    arena_bytes: int
    lower_bound: int
    offsets: dict[str, int]


class InputShapes:
    """Solves the inputs' shapes for the symbolic dims and checks them against the declared bounds."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.axes = [[_Dim(d) for d in i.shape] for i in entry.inputs]
        self.guards = [(_Dim(a), _Dim(b)) for a, b in entry.guards]

    def solve(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
        """Dim → size for these input shapes, in the order of the inputs. Raises InputError."""
        dims: dict[str, int] = {}
        source: dict[str, str] = {}
        for info, shape, expected in zip(self.entry.inputs, shapes, self.axes):
            for axis, (size, dim) in enumerate(zip(shape, expected)):
                if dim.name is None:
                    continue
                if dims.setdefault(dim.name, size) != size:
                    raise InputError(
                        f"input {info.name!r}: axis {axis} ({dim.name}) is {size}, but {source[dim.name]} says "
                        f"{dims[dim.name]}"
                    )
                source.setdefault(dim.name, f"axis {axis} of input {info.name!r}")
        for name, size in dims.items():
            self._check_bounds(name, size, source[name])
        for info, shape, expected in zip(self.entry.inputs, shapes, self.axes):
            for axis, (size, dim) in enumerate(zip(shape, expected)):
                if (want := _evaluate(dim, dims, f"input {info.name!r}: axis {axis}")) != size:
                    raise InputError(
                        f"input {info.name!r}: axis {axis} must be {dim.text} = {want} for {dims}, got {size}"
                    )
        for a, b in self.guards:
            left, right = (_evaluate(d, dims, "the model") for d in (a, b))
            if left != right:
                raise InputError(
                    f"these input shapes do not fit the model: two dims that must be equal, {a.text} and {b.text}, "
                    f"are {left} and {right} for {', '.join(f'{n}={v}' for n, v in dims.items())}"
                )
        return dims

    def _check_bounds(self, name: str, size: int, where: str) -> None:
        low, high = self.entry.dims.get(name, (0, None))
        if size < low or (high is not None and size > high):
            limit = f"{low} to {high}" if high is not None else f"at least {low}"
            raise InputError(
                f"{where} is {size}, but the model was compiled for {name} from {limit}; compile it with a wider Dim"
            )


def _evaluate(dim: _Dim, dims: Bindings, where: str) -> int:
    try:
        return dim.function(dims)
    except KeyError as unknown:
        raise InputError(f"{where} needs the dim {unknown}, which no input gives") from None


class ShapeBinder:
    """Turns input shapes into a Signature; plans memory at the first use of a shape."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self._cache: OrderedDict[tuple[tuple[int, ...], ...], Signature] = OrderedDict()
        self._plans: PlanCache | None = None  # made late: a static program never loads the planner
        self._inputs = InputShapes(entry)
        self._outputs = [[compile_dim(d) for d in o.shape] for o in entry.outputs]
        self._values = [compile_dim(v) for v in entry.values]
        self._sizes: dict[int | str, DimFunction] = {b.size: compile_dim(b.size) for b in entry.arena.buffers}

    def bind(self, shapes: Sequence[tuple[int, ...]]) -> Signature:
        """The signature of these input shapes, in the order of the inputs. Raises InputError."""
        key = tuple(shapes)
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = self._make(self._inputs.solve(key))
            if len(self._cache) > _KEPT_SIGNATURES:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(key)
        return found

    @property
    def arena_bytes(self) -> int:
        """The block that serves every plan held, head-room included."""
        return self._plans.arena_bytes if self._plans is not None else 0

    @property
    def stats(self) -> CacheStats:
        """Hits, misses and bytes of the plan cache."""
        return self._plan_cache().stats

    def trim(self, keep: int) -> None:
        """Forget all shapes but the `keep` used last."""
        while len(self._cache) > keep:
            self._cache.popitem(last=False)
        self._plan_cache().trim(keep)

    def _plan_cache(self) -> PlanCache:
        if self._plans is None:
            from tvmx.memory import PlanCache

            self._plans = PlanCache(self._problem, self._bounds(), limit=_KEPT_SIGNATURES)
        return self._plans

    def _bounds(self) -> dict[str, tuple[int, int | None]]:
        """Bounds of the dims that inputs give; the sizes depend on no other."""
        given = {d.name for axes in self._inputs.axes for d in axes if d.name is not None}
        return {name: bound for name, bound in self.entry.dims.items() if name in given}

    def _problem(self, dims: Bindings) -> Problem:
        sizes = {text: max(0, function(dims)) for text, function in self._sizes.items()}
        return to_problem(self.entry.arena.buffers, sizes.__getitem__)

    def _make(self, dims: dict[str, int]) -> Signature:
        solution = self._plan_cache().plan(dims)
        offsets = [solution.offsets[b.id] for b in self.entry.arena.buffers]
        return Signature(
            dims=dims,
            values=np.array([*(f(dims) for f in self._values), *offsets, 0], np.int64),
            output_shapes=tuple(tuple(f(dims) for f in o) for o in self._outputs),
            arena_bytes=solution.height,
            lower_bound=solution.lower_bound,
            offsets=solution.offsets,
        )


class _Dim:
    """One axis of an input: a plain name is solved for, anything else is checked."""

    def __init__(self, text: int | str) -> None:
        self.text = text
        self.function = compile_dim(text)
        self.name = text if isinstance(text, str) and text.isidentifier() and names_in(text) else None
