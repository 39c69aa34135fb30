"""Sizes that depend on symbolic dims, as text: integer arithmetic in the dims' names, from TIR, evaluated here."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from tvmx.errors import CompileError

Size = int | str
"""A number, or a formula such as "(m + 127) // 128"."""

_NODES = {"Add": "+", "Sub": "-", "Mul": "*", "FloorDiv": "//", "FloorMod": "%", "Div": "//", "Mod": "%"}
_CALLS = {
    "shift_right": ">>",
    "shift_left": "<<",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "tirx.shift_right": ">>",
    "tirx.shift_left": "<<",
}
_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.RShift: operator.rshift,
    ast.LShift: operator.lshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}


def formula(expr: Any) -> Size:
    """A TIR expression of sizes. Raises CompileError for what is no arithmetic of dims.

    Sizes are not negative, so TIR's truncating division is the flooring one.
    """
    if isinstance(expr, int):
        return expr
    kind = type(expr).__name__
    if kind == "IntImm":
        return int(expr.value)
    if kind == "Cast":
        return formula(expr.value)
    if kind in _NODES:
        return f"({formula(expr.a)} {_NODES[kind]} {formula(expr.b)})"
    if kind in ("Min", "Max"):
        return f"{kind.lower()}({formula(expr.a)}, {formula(expr.b)})"
    sign = _CALLS.get(getattr(getattr(expr, "op", None), "name", "").removeprefix("prim."))
    if sign is not None:
        return f"({formula(expr.args[0])} {sign} {formula(expr.args[1])})"
    if hasattr(expr, "name"):
        return str(expr.name)
    raise CompileError(f"a launch size is no arithmetic of dims: {expr}")


def evaluate(size: Size, dims: Mapping[str, int]) -> int:
    """The number for these dims. Raises CompileError for a dim that is missing or text that is no formula."""
    if isinstance(size, int):
        return size
    try:
        return _value(ast.parse(size, mode="eval").body, dims)
    except (SyntaxError, KeyError, ZeroDivisionError) as error:
        raise CompileError(f"cannot evaluate {size!r} for {dict(dims)}: {error!r}") from None


def _value(node: ast.AST, dims: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return dims[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, dims), _value(node.right, dims))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        return (min if node.func.id == "min" else max)(*(_value(a, dims) for a in node.args))
    raise KeyError(ast.dump(node))
