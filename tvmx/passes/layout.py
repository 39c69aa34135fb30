"""Channels-last layout: NHWC activations and HWIO weights for every convolution, pool and resize of a program.

`ConvertLayout` meets each operator alone and leaves transposes around those it does not know. Here one forward walk
keeps, for each variable, where its axes lie in storage (`view.py`). Transposes, squeezes and unit reshapes move no
data; they change that record. Each operator has a rule (`layout_rules.py`) that either works on the stored form and
says how its result is stored, or gives up, and then its operands are brought to their logical order. So transposes
sink through everything that can work in another axis order, inverse pairs vanish, and constants are transposed at
compile time.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from tvmx.passes.constants import as_array, as_constant
from tvmx.passes.view import (
    Axes,
    Dims,
    identity,
    is_one,
    logical_of,
    permutation,
    reshape_axes,
    same_dims,
    storage_order,
)


@dataclass
class Root:
    """A stored tensor: its expression, shape, and the other forms of it made so far in each binding block."""

    expr: Any
    shape: Dims
    is_constant: bool = False
    forms: dict[Any, Any] = field(default_factory=dict)
    serial: int = field(default_factory=itertools.count().__next__)  # a later tensor has a larger one


@dataclass(frozen=True)
class Value:
    """A tensor as the program sees it: logical `shape`, stored in `root` as `axes` says."""

    root: Root
    shape: Dims
    axes: Axes

    @property
    def rank(self) -> int:
        return len(self.root.shape)

    @property
    def is_constant(self) -> bool:
        return self.root.is_constant

    def permuted(self, order: tuple[int, ...]) -> Value:
        return Value(self.root, tuple(self.shape[i] for i in order), tuple(self.axes[i] for i in order))


def dims_of(expr: Any) -> Dims | None:
    """The shape of a tensor expression with ints where static, or None where it is not known."""
    from tvm import relax, tirx

    if not isinstance(expr.ty, relax.TensorType) or not isinstance(expr.ty.shape, relax.ShapeExpr):
        return None
    return tuple(int(d) if isinstance(d, tirx.IntImm) else d for d in expr.ty.shape.values)


class Emitter:
    """What a rule may do: look up operands, bring them to a form, emit a call."""

    def __init__(self, builder: Any, resolve: Any, legalized: frozenset[str] = frozenset()) -> None:
        self.builder = builder
        self.legalized = legalized  # operators that have a lowering of ours
        self._resolve = resolve
        self.block = 0

    def value(self, expr: Any) -> Value | None:
        """The operand's record; None if its shape is unknown or it is no tensor."""
        found = self._resolve(expr)
        return found if isinstance(found, Value) else None

    def stored(self, expr: Any, is_constant: bool = False) -> Value | None:
        """A record for an expression stored in its logical order."""
        shape = dims_of(expr)
        return None if shape is None else Value(Root(expr, shape, is_constant), shape, identity(len(shape)))

    def emit(self, call: Any) -> Any:
        return self.builder.emit(self.builder.normalize(call))

    def form(self, value: Value, want: Axes) -> Any:
        """An expression that stores `value` so that physical axis k is logical axis want[k] (None: extent 1)."""
        shape = tuple(1 if w is None else value.shape[w] for w in want)
        held = logical_of(value.axes, value.rank)
        order_held = storage_order(value.shape, held)
        order_want = storage_order(value.shape, want)
        assert sorted(order_held) == sorted(order_want), f"{want} leaves out an axis of {value.shape}"
        root = value.root
        if order_held == order_want:
            return root.expr if same_dims(root.shape, shape) else self._reshape(root, shape)
        order = permutation(value.shape, held, want)
        if order is not None:
            return self._permute(root, order)
        # Ranks differ: permute in the stored rank, so that the transpose can fuse with what made the tensor, and
        # let a reshape, which is free, take the unit dims away or put them in.
        units = [k for k, w in enumerate(held) if w is None or is_one(value.shape[w])]
        order = (*units, *(held.index(w) for w in order_want))
        moved = self._permute(root, order)
        stored = tuple(root.shape[k] for k in order)
        return self._reshape(Root(moved, stored, root.is_constant, root.forms), shape)

    def logical(self, value: Value) -> Any:
        """An expression that stores `value` in its logical order."""
        return self.form(value, identity(len(value.shape)))

    def result(self, call: Any, like: Axes) -> Value:
        """Emit `call`, whose result is stored with `like` (logical → physical axis)."""
        var = self.emit(call)
        stored = dims_of(var)
        assert stored is not None
        shape = tuple(1 if axis is None else stored[axis] for axis in like)
        return Value(Root(var, stored), shape, like)

    def _cached(self, root: Root, key: Any, make: Any, fold: Any) -> Any:
        key = (root.expr, key, 0 if root.is_constant else self.block)
        if key not in root.forms:
            array = as_array(root.expr) if root.is_constant else None
            root.forms[key] = self.emit(make(root.expr)) if array is None else as_constant(fold(array))
        return root.forms[key]

    def _reshape(self, root: Root, shape: Dims) -> Any:
        from tvm import relax

        key = ("reshape", tuple(d if isinstance(d, int) else str(d) for d in shape))
        return self._cached(root, key, lambda e: relax.op.reshape(e, shape), lambda a: a.reshape(shape))

    def _permute(self, root: Root, order: tuple[int, ...]) -> Any:
        from tvm import relax

        return self._cached(root, order, lambda e: relax.op.permute_dims(e, order), lambda a: a.transpose(order))

    def reshaped(self, value: Value, target: Dims) -> Value:
        """Reshape, in storage where possible, else by bringing the value to its logical order first."""
        found = reshape_axes(value.shape, value.axes, value.rank, target)
        if found is None:
            expr = self._reshape(Root(self.logical(value), value.shape, value.is_constant, value.root.forms), target)
            return Value(Root(expr, target, value.is_constant), target, identity(len(target)))
        axes, stored = found
        if same_dims(stored, value.root.shape):
            return Value(value.root, target, axes)
        root = Root(self._reshape(value.root, stored), stored, value.is_constant)
        return Value(root, target, axes)


def convert_layout(target: Any = None) -> Any:
    """The pass. Symbolic dims are carried; a tensor of unknown shape keeps its order."""
    import tvm
    from tvm import relax

    from tvmx.passes.layout_rules import RULES
    from tvmx.passes.legalize import legalizers

    known = frozenset(legalizers(target)) if target is not None else frozenset()
    mutator = _mutator()

    def run(mod: Any, _: Any) -> Any:
        mod = mod.clone()  # the caller keeps its module as it is
        for gv, func in mod.functions_items():
            if isinstance(func, relax.Function) and not (func.attrs and "Primitive" in func.attrs):
                walker = mutator(mod, RULES, known)
                mod[gv] = walker.visit_expr(func)
        return mod

    return tvm.transform.module_pass(run, opt_level=0, name="tvmx.ConvertLayout")


def _mutator() -> Any:
    """The walker's class; made on first use because its base needs TVM."""
    global _MUTATOR
    if _MUTATOR is None:
        _MUTATOR = _make_mutator()
    return _MUTATOR


_MUTATOR: Any = None


def _make_mutator() -> Any:
    import tvm
    from tvm import relax

    @relax.expr_functor.mutator
    class LayoutWalker(relax.PyExprMutator):  # type: ignore[misc]
        def __init__(self, mod: Any, rules: Any, known: frozenset[str]) -> None:
            super().__init__(mod)
            self.rules = rules
            self.values: dict[Any, Value | list[Value]] = {}
            self.constants: dict[Any, Value | None] = {}
            self.emitter = Emitter(self.builder_, self.resolve, known)
            self.blocks = 0

        def resolve(self, expr: Any) -> Value | list[Value] | None:
            if isinstance(expr, tvm.ir.GenericConst):
                if expr not in self.constants:
                    self.constants[expr] = self.emitter.stored(expr, is_constant=True)
                return self.constants[expr]
            if not isinstance(expr, relax.Var):
                return None
            if expr not in self.values:
                found = self.emitter.stored(self.renamed(expr))
                if found is None:
                    return None
                self.values[expr] = found
            return self.values[expr]

        def visit_var_(self, var: Any) -> Any:
            found = self.values.get(var)
            if found is None:
                return self.renamed(var)  # not super(): it would come back here for a DataflowVar, for ever
            if isinstance(found, list):
                return relax.Tuple([self.emitter.logical(v) for v in found])
            return self.emitter.logical(found)

        def renamed(self, var: Any) -> Any:
            found = self.get_var_remap(var)
            return var if found is None else found

        def visit_dataflow_var_(self, var: Any) -> Any:
            return self.visit_var_(var)

        def visit_binding_block_(self, block: Any) -> Any:
            outer = self.enter_block()
            result = super().visit_binding_block_(block)
            self.emitter.block = outer
            return result

        def visit_dataflow_block_(self, block: Any) -> Any:
            outer = self.enter_block()
            result = super().visit_dataflow_block_(block)
            self.emitter.block = outer
            return result

        def enter_block(self) -> int:
            outer = self.emitter.block
            self.blocks += 1
            self.emitter.block = self.blocks
            return outer

        def visit_var_binding_(self, binding: Any) -> None:
            found = self.apply_rule(binding.value)
            if found is None:
                super().visit_var_binding_(binding)
            elif isinstance(binding.var, relax.DataflowVar):
                self.values[binding.var] = found
            else:
                exprs = [self.emitter.logical(v) for v in (found if isinstance(found, list) else [found])]
                value = relax.Tuple(exprs) if isinstance(found, list) else exprs[0]
                super().visit_var_binding_(relax.VarBinding(binding.var, value))

        def apply_rule(self, value: Any) -> Value | list[Value] | None:
            if isinstance(value, relax.TupleGetItem):
                items = self.values.get(value.tuple_value)
                return items[value.index] if isinstance(items, list) else None
            if isinstance(value, relax.Var):
                return self.resolve(value)
            if not isinstance(value, tvm.ir.Call) or not isinstance(value.op, tvm.ir.Op):
                return None
            rule = self.rules.get(value.op.name)
            return None if rule is None else rule(self.emitter, value)

    return LayoutWalker
