"""Peephole rewriting of Relax programs: a table of rules, one forward walk, repeated until nothing fires.

A rule sees one call with its operands' definitions already rewritten. It returns the expression to use instead, a
`Refusal` that says why the shape it recognised is left alone, or None when the call is not its business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

MAX_ROUNDS = 8  # chains of rules settle in two or three; a pair of rules that undo each other must not hang


@dataclass(frozen=True)
class Refusal:
    """Why a rule that recognised its shape leaves it as it is."""

    reason: str


@dataclass(frozen=True)
class RewriteRule:
    """`roots` are the names of the operators ("relax.add") that the rule may replace."""

    name: str
    roots: tuple[str, ...]
    apply: Callable[[Scope, Any], Any]


class Scope:
    """What a rule may ask about the program around a call."""

    def __init__(self, builder: Any, mod: Any, uses: dict[Any, int]) -> None:
        self.builder = builder
        self.mod = mod
        self.name = ""  # of the variable whose definition is being rewritten; what `emit` makes takes it too
        self.made_kernels = False
        self._uses = uses
        self._definitions: dict[Any, Any] = {}

    def define(self, var: Any, value: Any, uses: int) -> None:
        self._definitions[var] = value
        self._uses[var] = uses

    def definition(self, expr: Any) -> Any:
        """The value bound to a variable, or the expression itself."""
        from tvm import relax

        return self._definitions.get(expr, expr) if isinstance(expr, relax.Var) else expr

    def used_once(self, expr: Any) -> bool:
        """True if `expr` is the only use of its variable, so that rewriting its definition duplicates no work."""
        return self._uses.get(expr, 1) <= 1

    def call(self, expr: Any, *names: str) -> Any:
        """The call that defines `expr` if its operator is one of `names` (without "relax."), else None."""
        found = self.definition(expr)
        return found if op_name(found) in names else None

    def kernel(self, compute: Callable[..., Any], *args: Any, name: str, pattern: int | None = None) -> Any:
        """A call (not yet bound) of a new TensorIR function; `pattern` as FuseOps knows it, if not by its blocks."""
        self.made_kernels = True
        attrs = {} if pattern is None else {"op_pattern": pattern}
        return self.builder.call_te(compute, *args, primfunc_name_hint=name, primfunc_attrs=attrs)

    def emit(self, expr: Any) -> Any:
        """Bind an intermediate result; the variable that holds it."""
        expr = self.builder.normalize(expr)
        var = self.builder.emit(expr, self.name)
        self.define(var, expr, 1)
        return var


def op_name(expr: Any) -> str:
    """The operator's name without "relax.", or "" if `expr` is no call of an operator."""
    import tvm

    if isinstance(expr, tvm.ir.Call) and isinstance(expr.op, tvm.ir.Op):
        return str(expr.op.name).removeprefix("relax.")
    return ""


def dims_of(expr: Any) -> tuple[Any, ...] | None:
    """The shape of a tensor expression with ints where static, or None where it is not known."""
    from tvm import relax, tirx

    if not isinstance(expr.ty, relax.TensorType) or not isinstance(expr.ty.shape, relax.ShapeExpr):
        return None
    return tuple(int(d) if isinstance(d, tirx.IntImm) else d for d in expr.ty.shape.values)


def dtype_of(expr: Any) -> str:
    return str(expr.ty.dtype)


def count_uses(func: Any) -> dict[Any, int]:
    """How often each variable of a function is used, the result included."""
    from tvm import relax

    uses: dict[Any, int] = {}

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Var):
            uses[expr] = uses.get(expr, 0) + 1

    def bindings(seq: Any) -> None:
        for block in seq.blocks:
            for binding in block.bindings:
                expression(binding.value)
        expression(seq.body)

    def expression(value: Any) -> None:
        import tvm

        if isinstance(value, relax.Var):
            visit(value)
        elif isinstance(value, tvm.ir.Call):
            for arg in value.args:
                expression(arg)
        elif isinstance(value, relax.Tuple):
            for field in value.fields:
                expression(field)
        elif isinstance(value, relax.TupleGetItem):
            expression(value.tuple_value)
        elif isinstance(value, relax.If):
            expression(value.cond)
            bindings(value.true_branch)
            bindings(value.false_branch)
        elif isinstance(value, relax.SeqExpr):
            bindings(value)
        elif isinstance(value, relax.Function):
            bindings(value.body)

    bindings(func.body)
    return uses


Events = dict[str, list[tuple[str, str | None]]]
"""Per variable name: the rules that recognised its binding, each with None when it fired, else why it refused."""


def rewrite_pass(name: str, rules: Sequence[RewriteRule], events: Events | None = None, cse: bool = True) -> Any:
    """A module pass that applies `rules` until none fires; dead code is removed after each round.

    What the rules did and refused is added to `events`. `cse=False` leaves equal expressions apart, as casts are that
    must each fuse into their own reader.
    """
    import tvm
    from tvm import relax

    table: dict[str, list[RewriteRule]] = {}
    for rule in rules:
        for root in rule.roots:
            table.setdefault(root.removeprefix("relax."), []).append(rule)

    def run(mod: Any, _: Any) -> Any:
        mod = mod.clone()  # the caller keeps its module as it is
        counts: dict[str, int] = {}
        for _round in range(MAX_ROUNDS):
            before = sum(counts.values())
            for gv, func in mod.functions_items():
                if isinstance(func, relax.Function) and not (func.attrs and "Primitive" in func.attrs):
                    walker = _walker()(mod, func, table, counts, events)
                    after = walker.visit_expr(func)
                    if walker.scope.made_kernels:
                        mod = walker.builder_.get()
                    mod[gv] = after
            if sum(counts.values()) == before:
                break
            mod = relax.transform.CanonicalizeBindings()(mod)
            if cse:
                mod = relax.transform.EliminateCommonSubexpr()(mod)
            mod = relax.transform.DeadCodeElimination()(mod)
        if counts:
            log.debug("%s: %s", name, ", ".join(f"{k} x {v}" for k, v in sorted(counts.items())))
        return mod

    return tvm.transform.module_pass(run, opt_level=0, name=name)


_WALKER: Any = None


def _walker() -> Any:
    """The walker's class; made on first use because its base needs TVM."""
    global _WALKER
    if _WALKER is None:
        _WALKER = _make_walker()
    return _WALKER


def _make_walker() -> Any:
    import tvm
    from tvm import relax

    @relax.expr_functor.mutator
    class RewriteWalker(relax.PyExprMutator):  # type: ignore[misc]
        def __init__(self, mod: Any, func: Any, table: Any, counts: dict[str, int], events: Events | None) -> None:
            super().__init__(mod)
            self.events = events
            self.table = table
            self.counts = counts
            self.uses = count_uses(func)
            self.scope = Scope(self.builder_, mod, dict(self.uses))

        def visit_var_binding_(self, binding: Any) -> None:
            if not isinstance(binding.value, tvm.ir.Call):
                super().visit_var_binding_(binding)
                return
            value = self.builder_.normalize(self.visit_expr(binding.value))
            self.scope.name = binding.var.name
            for rule in self.table.get(op_name(value), ()):
                found = rule.apply(self.scope, value)
                if found is not None and self.events is not None:
                    reason = found.reason if isinstance(found, Refusal) else None
                    self.events.setdefault(binding.var.name, []).append((rule.name, reason))
                if isinstance(found, Refusal):
                    log.debug("%s refused at %s: %s", rule.name, binding.var.name, found.reason)
                elif found is not None:
                    self.counts[rule.name] = self.counts.get(rule.name, 0) + 1
                    value = self.builder_.normalize(found)
                    break
            super().visit_var_binding_(relax.VarBinding(binding.var, value))
            self.scope.define(self.renamed(binding.var), value, self.uses.get(binding.var, 0))

        def renamed(self, var: Any) -> Any:
            found = self.get_var_remap(var)
            return var if found is None else found

        # The base class would stumble over the empty entry that get_var_remap leaves for an unknown variable.
        def visit_var_(self, var: Any) -> Any:
            return self.renamed(var)

        def visit_dataflow_var_(self, var: Any) -> Any:
            return self.renamed(var)

    return RewriteWalker
