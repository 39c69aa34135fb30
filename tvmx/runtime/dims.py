"""Dimension expressions: a small arithmetic language over named integers, parsed here and never evaluated as code.

`compile_dim("(N + 1) // 2")` gives a function of `{"N": 7}` → 4. Allowed: integers, names, + - * // % min max,
comparisons, and/or, `a if c else b`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from tvmx.errors import ArtifactError

Bindings = Mapping[str, int]
DimFunction = Callable[[Bindings], int]

_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLS: dict[str, Callable[..., int]] = {"min": min, "max": max}
_MAX_LENGTH = 10_000  # the parser recurses; a longer text is no dimension


def compile_dim(text: int | str) -> DimFunction:
    """A function of the bindings. Raises ArtifactError for anything outside the language."""
    if isinstance(text, int):
        return _constant(text)
    if len(text) > _MAX_LENGTH:
        raise ArtifactError(f"dimension expression of {len(text)} characters; the file is damaged")
    try:
        return _build(ast.parse(text, mode="eval").body, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ArtifactError(f"cannot read dimension {text!r}: {error}") from None


def names_in(text: int | str) -> frozenset[str]:
    """The symbolic dims that an expression uses."""
    if isinstance(text, int):
        return frozenset()
    tree = ast.parse(text, mode="eval")
    return frozenset(n.id for n in ast.walk(tree) if isinstance(n, ast.Name)) - set(_CALLS)


def evaluate(text: int | str, bindings: Bindings) -> int:
    """`compile_dim(text)(bindings)`."""
    return compile_dim(text)(bindings)


def _constant(value: int) -> DimFunction:
    return lambda bindings: value


def _build(node: ast.expr, text: str) -> DimFunction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return _constant(node.value)
    if isinstance(node, ast.Name):
        name = node.id
        return lambda bindings: bindings[name]
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _binary(_BINARY[type(node.op)], _build(node.left, text), _build(node.right, text), text)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _build(node.operand, text)
        return lambda bindings: -value(bindings)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
        compare = _COMPARE[type(node.ops[0])]
        left, right = _build(node.left, text), _build(node.comparators[0], text)
        return lambda bindings: int(compare(left(bindings), right(bindings)))
    if isinstance(node, ast.BoolOp):
        parts = [_build(v, text) for v in node.values]
        decide = all if isinstance(node.op, ast.And) else any
        return lambda bindings: int(decide(p(bindings) for p in parts))
    if isinstance(node, ast.IfExp):
        test, then, other = (_build(n, text) for n in (node.test, node.body, node.orelse))
        return lambda bindings: then(bindings) if test(bindings) else other(bindings)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _CALLS
        and node.args
        and not node.keywords
    ):
        call, args = _CALLS[node.func.id], [_build(a, text) for a in node.args]
        return lambda bindings: call(a(bindings) for a in args)
    raise ArtifactError(f"dimension {text!r} holds {type(node).__name__}, which is not dimension arithmetic")


def _binary(op: Callable[[int, int], int], left: DimFunction, right: DimFunction, text: str) -> DimFunction:
    def apply(bindings: Bindings) -> int:
        try:
            return op(left(bindings), right(bindings))
        except ZeroDivisionError:
            raise ArtifactError(f"dimension {text!r} divides by zero for {dict(bindings)}") from None

    return apply
