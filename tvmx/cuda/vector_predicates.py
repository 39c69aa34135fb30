"""Bound checks of vectorised loops become one check per vector where bound and start are multiples of the lanes.

`4 * q + lane < 72` holds for all four lanes or for none, so it is `4 * q < 72`. With the lane in it, TVM's vectoriser
would take the statement apart into scalars.
"""

from __future__ import annotations

from typing import Any


def vector_predicates() -> Any:
    """The pass; to run before VectorizeLoop."""
    from tvm import tirx

    def run(func: Any, _mod: Any, _ctx: Any) -> Any:
        import tvm_ffi

        state = _State()
        return func.with_body(tvm_ffi.structural_mutate(func.body, [(tirx.For, state.loop), (tirx.LT, state.less)]))

    return tirx.transform.prim_func_pass(run, opt_level=0, name="tvmx.VectorPredicates")


class _State:
    def __init__(self) -> None:
        self._lanes: list[tuple[Any, int]] = []

    def loop(self, node: Any, mutator: Any) -> Any:
        from tvm import tirx

        if node.kind != tirx.ForKind.VECTORIZED or not hasattr(node.extent, "value"):
            return mutator.default_mutate(node)
        self._lanes.append((node.loop_var, int(node.extent)))
        result = mutator.default_mutate(node)
        self._lanes.pop()
        return result

    def less(self, node: Any, mutator: Any) -> Any:
        for var, lanes in self._lanes:
            start = _first_lane(node.a, var, lanes)
            if start is not None and hasattr(node.b, "value") and int(node.b) % lanes == 0:
                return start < node.b
        return node


def _first_lane(expr: Any, var: Any, lanes: int) -> Any | None:
    """`expr` at lane 0 when it is that plus the lane and a multiple of `lanes`, else None."""
    import tvm
    from tvm.sym import Analyzer, detect_linear_equation

    from tvmx.schedule.tir import substitute, walk

    found: list[Any] = []
    walk(expr, tvm.ir.Var, lambda v: found.append(v) if v.same_as(var) else None)
    if not found:
        return None
    analyzer = Analyzer()
    expr = analyzer.simplify(expr)
    linear = detect_linear_equation(expr, [var])
    if not linear or getattr(analyzer.simplify(linear[0]), "value", None) != 1:
        return None
    start = analyzer.simplify(substitute(expr, [(var, tvm.tirx.const(0, expr.ty.dtype))]))
    return start if analyzer.can_prove(start % lanes == 0) else None
