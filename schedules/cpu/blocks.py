"""What schedules ask of a block: its loops, its loads and their strides, and what one iteration costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvmx.schedule.tir import walk

SPATIAL, REDUCTION = 0, 2  # tvm.tirx.IterVar.DataPar, CommReduce

# Cost of one call in units of one vector add; anything not named costs 1.
_CALL_COST = {
    **dict.fromkeys(("exp", "exp2", "exp10", "tanh", "sigmoid", "log", "log2", "log10", "log1p", "erf"), 16),
    **dict.fromkeys(("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"), 40),
    **dict.fromkeys(("pow", "atan2", "fmod", "hypot"), 40),
    **dict.fromkeys(("sqrt", "rsqrt"), 4),
}


@dataclass(frozen=True)
class Load:
    """One syntactic load in a block's body."""

    buffer: Any
    indices: tuple[Any, ...]


@dataclass(frozen=True)
class Info:
    """One leaf block as it stands in the schedule; `loads` leave out the accumulator's own."""

    rv: Any
    block: Any
    loads: tuple[Load, ...]
    store: Load | None  # None unless the body is exactly one store
    cost: int

    @property
    def name(self) -> str:
        return str(self.block.name_hint)

    @property
    def iter_kinds(self) -> list[int]:
        return [int(v.iter_type) for v in self.block.iter_vars]

    @property
    def extents(self) -> list[int | None]:
        return [as_int(v.dom.extent) for v in self.block.iter_vars]

    @property
    def iterations(self) -> int:
        """Iterations in all; a symbolic extent counts as 256."""
        return math.prod(256 if e is None else e for e in self.extents)

    @property
    def is_reduction(self) -> bool:
        return REDUCTION in self.iter_kinds

    @property
    def is_plain(self) -> bool:
        """Spatial and reduction iterators only, one store: what the loop transformations understand."""
        return self.store is not None and all(k in (SPATIAL, REDUCTION) for k in self.iter_kinds)

    @property
    def output(self) -> Any:
        return self.block.writes[0].source if self.block.writes else None

    @property
    def op(self) -> str | None:
        note = self.block.annotations.get("tvmx.op")
        return None if note is None else str(note)


def as_int(expr: Any) -> int | None:
    """The value of a constant extent, None for a symbolic one."""
    from tvm.tirx import IntImm

    if isinstance(expr, int):
        return expr
    return int(expr) if isinstance(expr, IntImm) else None


def inspect(sch: Any, block: Any) -> Info:
    """Read one leaf block."""
    from tvm.ir.expr import TensorLoad
    from tvm.tirx import BufferStore

    node = sch.get(block)
    outputs = [w.source for w in node.writes]
    loads: list[Load] = []

    def on_load(load: Any) -> None:
        if not any(load.source.same_as(out) for out in outputs):
            loads.append(Load(load.source, tuple(load.indices)))

    walk(node.body, TensorLoad, on_load)
    body = node.body
    store = Load(body.buffer, tuple(body.indices)) if isinstance(body, BufferStore) else None
    return Info(block, node, tuple(loads), store, _cost(node.body))


def leaves(sch: Any) -> list[Info]:
    """The blocks below the root in program order."""
    return [inspect(sch, b) for b in sch.get_child_blocks(sch.get_sblock("root"))]


def _cost(body: Any) -> int:
    import tvm.ir.prim.expr as prim
    from tvm.ir.expr import Call

    cost = 0

    def count(amount: int) -> Any:
        def add(node: Any) -> None:
            nonlocal cost
            if not _is_index(node):
                cost += amount

        return add

    def on_call(call: Any) -> None:
        nonlocal cost
        name = str(getattr(call.op, "name", "")).rpartition(".")[2]
        cost += _CALL_COST.get(name, 1)

    for kind in (prim.Add, prim.Sub, prim.Mul, prim.Max, prim.Min, prim.Select):
        walk(body, kind, count(1))
    for kind in (prim.Div, prim.Mod, prim.FloorDiv, prim.FloorMod):
        walk(body, kind, count(4))
    walk(body, Call, on_call)
    return max(1, cost)


def _is_index(node: Any) -> bool:
    return not str(node.ty).startswith(("float", "bfloat"))


def uses(expr: Any, var: Any) -> bool:
    """Does `expr` mention `var`?"""
    from tvm.ir import Var

    found = False

    def visit(v: Any) -> None:
        nonlocal found
        found = found or v.same_as(var)

    walk(expr, Var, visit)
    return found


def coefficient(expr: Any, var: Any) -> int | None:
    """d expr / d var when that is a constant, else None."""
    from tvm.sym import detect_linear_equation

    if not uses(expr, var):
        return 0
    if expr.same_as(var):
        return 1
    linear = detect_linear_equation(expr, [var])
    return as_int(linear[0]) if linear else None


def stride(load: Load, var: Any) -> int | None:
    """Elements between two accesses when `var` grows by one; None when it is not constant (div, mod, gather)."""
    total, size = 0, 1
    unknown = False
    for index, extent in zip(reversed(load.indices), reversed(load.buffer.shape)):
        factor = coefficient(index, var)
        if factor is None or (factor and unknown):
            return None
        total += factor * size
        dim = as_int(extent)
        if dim is None:
            unknown = True
        else:
            size *= dim
    return total


def same_indices(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Are both index tuples the same variables in the same order?"""
    return len(a) == len(b) and all(x.same_as(y) for x, y in zip(a, b))
