"""Symbolic dims that an operator needs equal but nobody can prove equal while importing.

`x[N, S] + table[1, min(S, 512)]` is right for every S up to 512. ONNX leaves the check to the run; Relax would give the
sum an unknown shape and lose all that follows. So the operand is viewed with the dims of the other, and the executor
checks the two expressions whenever new shapes are bound. (`match_cast` would say it better, but CanonicalizeBindings
takes a cast for a definition of the dim, removes it, and recurses for ever where the dim occurs on both sides.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tvm import ir, relax
from tvm_ffi import structural_equal

if TYPE_CHECKING:
    from tvmx.frontend.node import Expr, Node

_BROADCASTING = frozenset(
    f"relax.{name}"
    for name in (
        "add", "subtract", "multiply", "divide", "floor_divide", "mod", "floor_mod", "power", "maximum", "minimum",
        "equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "logical_and", "logical_or",
        "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift", "where",
    )
)  # fmt: skip

Places = list[tuple[int, int]]  # (operand, axis) of dims that must be one, or 1


def agree(node: Node, expr: Expr) -> Expr:
    """`expr`, with operands cast where its symbolic dims must be equal and are not known to be."""
    if not isinstance(expr, ir.Call) or not isinstance(expr.op, ir.Op):
        return expr
    found = _operands(node, expr)
    if found is None or not any(not isinstance(d, int) for a in found[0] for d in node.dims(a)):
        return expr
    args, places = found
    cast = agreed(node, args, places)
    if cast is not args:
        return _again(expr, cast)
    known = node.norm(expr)
    if isinstance(known.ty.shape, relax.ShapeExpr):
        return known
    # Equal once simplified within the bounds of the dims, which Relax does not know.
    return _again(expr, agreed(node, args, places, as_written=True))


def _operands(node: Node, call: Any) -> tuple[list[Expr], list[Places]] | None:
    """The operands of an operator that wants dims equal, and where."""
    if call.op.name == "relax.concat" and isinstance(call.args[0], relax.Tuple) and call.attrs.axis is not None:
        parts = list(call.args[0].fields)
        rank = len(node.dims(parts[0]))
        axes = [a for a in range(rank) if a != int(call.attrs.axis) % rank]
        return parts, [[(i, axis) for i in range(len(parts))] for axis in axes]
    args = list(call.args)
    if call.op.name in _BROADCASTING:
        return args, broadcast_places([len(node.dims(a)) for a in args])
    if call.op.name == "relax.matmul":
        ranks = [len(node.dims(a)) for a in args]
        outer = broadcast_places([r - 2 for r in ranks]) if min(ranks) > 2 else []
        return args, [[(0, ranks[0] - 1), (1, max(0, ranks[1] - 2))], *outer]
    return None


def _again(call: Any, args: list[Expr]) -> Any:
    if call.op.name == "relax.concat":
        return relax.op.concat(args, call.attrs.axis)
    return ir.Call(call.op, args, call.attrs)


def broadcast_places(ranks: Sequence[int]) -> list[Places]:
    """Axes that numpy's rule aligns, from the last one."""
    return [[(i, r - 1 - k) for i, r in enumerate(ranks) if r > k] for k in range(max(ranks, default=0))]


def agreed(node: Node, args: list[Expr], places: Sequence[Places], as_written: bool = False) -> list[Expr]:
    """`args` themselves, or a new list in which the dims at each of `places` are one expression (or 1).

    `as_written` casts also where dims are equal once simplified, but written in different ways.
    """
    shapes = [list(a.ty.shape.values) if as_written else node.dims(a) for a in args]
    wanted = [list(s) for s in shapes]
    for group in places:
        dims = [node.dims(args[i])[axis] for i, axis in group]
        symbolic = [d for d in dims if not isinstance(d, int)]
        fixed = {d for d in dims if isinstance(d, int) and d != 1}
        if not symbolic or len(fixed) > 1:
            continue  # nothing to settle, or wrong whatever the dims are: the operator itself says so
        target = fixed.pop() if fixed else min(symbolic, key=lambda d: len(str(d)))
        for (i, axis), dim in zip(group, dims):
            if not isinstance(dim, int):
                wanted[i][axis] = target
    changed = [i for i, (w, s) in enumerate(zip(wanted, shapes)) if not all(map(_same, w, s))]
    if not changed:
        return args
    result = list(args)
    for i in changed:
        result[i] = node.bb.emit(relax.op.memory.view(args[i], relax.ShapeExpr(wanted[i])))
    return result


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return bool(structural_equal(a, b))
