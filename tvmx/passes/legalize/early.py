"""Lowering of operators together with what defines their operands.

LegalizeOps goes forward, so that an operator sees operands that are lowered already: a padding or a dequantisation
is an opaque kernel by then. The operators here are lowered first, while definitions can still be read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvmx.target import Target

Table = dict[str, Callable[[Any, Any], Any]]
Before = Callable[[Any], Any]
"""The operator that a variable was bound to before its lowering, None for a parameter. A kernel may compute what that
operator does by itself; the lowered one is dead code if nobody else reads it."""


def legalize_early(target: Target) -> Any:
    """The pass. A legalizer that returns None leaves its call for LegalizeOps."""
    import tvm
    from tvm import relax

    from tvmx.passes.legalize import conversions, integer, tensor_core

    def first(before: Before) -> Table:
        return {**integer.legalizers(target, before), **tensor_core.early_legalizers(target)}

    tables = (first, *(lambda _, table=table: table for table in conversions.legalizers(target)))

    def run(mod: Any, _: Any) -> Any:
        for table in tables:
            for gv, func in mod.functions_items():
                if isinstance(func, relax.Function) and not (func.attrs and "Primitive" in func.attrs):
                    walker = _walker_class()(mod, table)
                    rewritten = walker.visit_expr(func)
                    mod = walker.builder_.get()
                    mod[gv] = rewritten
        return relax.transform.DeadCodeElimination()(mod)

    return tvm.transform.module_pass(run, opt_level=0, name="tvmx.LegalizeEarly")


_CLASS: Any = None


def _walker_class() -> Any:
    """The walker's class; made on first use because its base needs TVM."""
    global _CLASS
    if _CLASS is None:
        import tvm
        from tvm import relax

        @relax.expr_functor.mutator
        class EarlyWalker(relax.PyExprMutator):  # type: ignore[misc]
            def __init__(self, mod: Any, table: Callable[[Before], Table]) -> None:
                super().__init__(mod)
                self.before: dict[Any, Any] = {}
                self.table = table(self.before.get)

            def visit_var_binding_(self, binding: Any) -> None:
                super().visit_var_binding_(binding)
                self.before[binding.var] = binding.value  # a lowered operator of the same type keeps its variable

            def visit_call_(self, call: Any) -> Any:
                call = self.builder_.normalize(super().visit_call_(call))
                rule = self.table.get(call.op.name) if isinstance(call.op, tvm.ir.Op) else None
                found = None if rule is None else rule(self.builder_, call)
                return call if found is None else found

        _CLASS = EarlyWalker
    return _CLASS
