"""Rewrites a program so that each operator computes as its plan entry says.

    dense        y = astype(op(astype(x, h), astype(w, h), out_dtype=float32), h)
                 y = op(x, w: h, out_dtype=float32)       where h is only storage: constants in h, the rest in float32
    elementwise  y = astype(op(x, …) in float32, h)      its kernel widens what is stored in h
    reduce       the same
    move         y = op(astype(x, h))                     elements only change place

Narrowing casts are shared by all readers of a value and stand next to what makes it, so they fuse into that kernel.
Widening casts stand before each reader, one each, so they fuse into it and no wide copy is ever stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmx.passes.constants import as_array
from tvmx.passes.precision.io import cast_io
from tvmx.passes.precision.moves import moving_kernel
from tvmx.passes.rewrite import count_uses, op_name
from tvmx.precision.kinds import role_of
from tvmx.precision.plan import Entry
from tvmx.precision.rules import DTYPES, SHORT

WIDE = "float32"
KEPT_CONSTANT = 4096  # elements: a smaller constant of an elementwise operator is not worth rounding


@dataclass(frozen=True)
class Stored:
    """What holds a value of the original program: an expression of another dtype; `wide`: its float32 form, if any."""

    expr: Any
    dtype: str
    wide: Any = None


def narrow_constant(array: np.ndarray[Any, Any], dtype: str) -> Any:
    """The constant in 16 bits; finite values that float16 cannot hold saturate."""
    import ml_dtypes
    import tvm
    from tvm import relax

    if dtype == "float16":
        top = np.finfo(np.float16).max
        array = np.where(np.isfinite(array), np.clip(array, -top, top), array)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    return relax.const(tvm.runtime.tensor(np.ascontiguousarray(array.astype(kind)).reshape(array.shape)))


def cast_program(mod: Any, entries: Mapping[Any, Entry], io: str) -> Any:
    """`main` with every variable in `entries` computed as its entry says, and inputs and outputs in `io`."""
    mod = mod.clone()
    walker = _walker()(mod, entries)
    main = walker.visit_expr(mod["main"] if io in ("keep", "fp32") else cast_io(mod["main"], DTYPES[io]))
    mod = walker.builder_.get()
    mod[mod.get_global_var("main")] = main
    return mod


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
    class CastWalker(relax.PyExprMutator):  # type: ignore[misc]
        def __init__(self, mod: Any, entries: Mapping[Any, Entry]) -> None:
            super().__init__(mod)
            self.mod = mod
            self.entries = entries
            self.uses = count_uses(mod["main"])
            self.stored: dict[Any, Stored] = {}
            self.narrowed: dict[tuple[Any, str], Any] = {}
            self.wide: dict[Any, Any] = {}  # per binding: variable → its widened form

        # operands

        def visit_var_(self, var: Any) -> Any:
            """A use that the rules below do not know: the value in its original dtype."""
            found = self.stored.get(var)
            if found is None:
                kept = self.get_var_remap(var)
                return var if kept is None else kept
            if var not in self.wide:
                self.wide[var] = self.original(var, found)
            return self.wide[var]

        def visit_dataflow_var_(self, var: Any) -> Any:
            return self.visit_var_(var)

        def original(self, var: Any, found: Stored) -> Any:
            if isinstance(var.ty, relax.TupleType):
                items = [self.emit(relax.TupleGetItem(found.expr, i)) for i in range(len(var.ty.fields))]
                return relax.Tuple([self.cast(v, str(t.dtype)) for v, t in zip(items, var.ty.fields)])
            if found.wide is not None and self.uses.get(var, 0) <= 1:
                return found.wide  # nobody reads the narrow form: it is never stored, so it is not rounded
            return self.cast(found.expr, str(var.ty.dtype))

        def emit(self, expr: Any, name: str = "") -> Any:
            return self.builder_.emit(self.builder_.normalize(expr), name)

        def cast(self, expr: Any, dtype: str) -> Any:
            return expr if str(expr.ty.dtype) == dtype else self.emit(relax.op.astype(expr, dtype))

        def narrow(self, operand: Any, dtype: str) -> Any:
            """The operand in 16 bits: a constant now, a variable by one cast that all its readers share."""
            if not self.is_wide(operand):
                return self.visit_expr(operand)
            found = self.stored.get(operand) if isinstance(operand, relax.Var) else None
            if found is not None and found.dtype == dtype:
                return found.expr
            key = (operand, dtype)
            if key not in self.narrowed:
                array = as_array(operand)
                if array is not None:
                    self.narrowed[key] = narrow_constant(array, dtype)
                else:
                    self.narrowed[key] = self.cast(self.visit_expr(operand), dtype)
            return self.narrowed[key]

        def is_wide(self, operand: Any) -> bool:
            return isinstance(operand.ty, relax.TensorType) and str(operand.ty.dtype) == WIDE

        def stored_constant(self, operand: Any, dtype: str, least: int = 0) -> Any:
            """A constant of more than `least` elements is stored in 16 bits, to be widened by the kernel."""
            array = as_array(operand) if self.is_wide(operand) else None
            if array is None or array.size <= least:
                return self.visit_expr(operand)
            return self.emit(relax.op.astype(self.narrow(operand, dtype), WIDE))

        def operands(self, args: Any, form: Callable[[Any], Any]) -> list[Any]:
            return [relax.Tuple([form(f) for f in a.fields]) if isinstance(a, relax.Tuple) else form(a) for a in args]

        # bindings

        def visit_var_binding_(self, binding: Any) -> None:
            self.wide = {}
            entry = self.entries.get(binding.var)
            value = binding.value
            if isinstance(value, relax.TupleGetItem) and value.tuple_value in self.stored:
                tuple_ = self.stored[value.tuple_value]
                if isinstance(binding.var.ty, relax.TensorType) and str(binding.var.ty.dtype) == WIDE:
                    item = self.emit(relax.TupleGetItem(tuple_.expr, value.index), binding.var.name)
                    self.define(binding, item, tuple_.dtype)
                    return
            if isinstance(value, relax.Var) and value in self.stored:
                self.define(binding, self.stored[value].expr, self.stored[value].dtype)
                return
            if entry is None or entry.precision not in SHORT or not isinstance(value, tvm.ir.Call):
                super().visit_var_binding_(binding)
                return
            if not getattr(self, f"{role_of(entry.kind)}_")(binding, value, entry):
                super().visit_var_binding_(binding)

        def define(self, binding: Any, expr: Any, dtype: str) -> None:
            """`binding.var` is held by `expr`, cast to `dtype`, from here on."""
            held = Stored(expr, dtype)
            if isinstance(expr.ty, relax.TensorType) and str(expr.ty.dtype) != dtype:
                held = Stored(self.cast(expr, dtype), dtype, expr if str(expr.ty.dtype) == WIDE else None)
            if isinstance(binding.var, relax.DataflowVar):
                self.stored[binding.var] = held
                return
            super().visit_var_binding_(relax.VarBinding(binding.var, self.original(binding.var, held)))

        def dense_(self, binding: Any, call: Any, entry: Entry) -> bool:
            dtype = DTYPES[entry.precision]
            if str(call.ty.dtype) != WIDE:
                return False
            if entry.storage:
                args = [self.visit_expr(a) if as_array(a) is None else self.narrow(a, dtype) for a in call.args]
                made = with_out_dtype(call, args, WIDE)
                super().visit_var_binding_(relax.VarBinding(binding.var, self.builder_.normalize(made)))
                return True
            args = [self.narrow(a, dtype) for a in call.args]
            made = self.emit(with_out_dtype(call, args, DTYPES[entry.assignment.accumulate]), binding.var.name)
            self.define(binding, made, dtype)
            return True

        def elementwise_(self, binding: Any, call: Any, entry: Entry) -> bool:
            dtype = DTYPES[entry.precision]
            if not isinstance(call.ty, relax.TensorType) or str(call.ty.dtype) != WIDE:
                return False
            args = self.operands(call.args, lambda a: self.stored_constant(a, dtype, KEPT_CONSTANT))
            made = self.emit(tvm.ir.Call(call.op, args, call.attrs, call.ty_args), binding.var.name)
            self.define(binding, made, dtype)
            return True

        reduce_ = elementwise_

        def move_(self, binding: Any, call: Any, entry: Entry) -> bool:
            dtype = DTYPES[entry.precision]
            types = call.ty.fields if isinstance(call.ty, relax.TupleType) else [call.ty]
            if any(not isinstance(t, relax.TensorType) or str(t.dtype) != WIDE for t in types):
                return False
            kernel = moving_kernel(self.mod, call)
            if kernel is not None:
                args = [self.narrow(a, dtype) for a in call.args[1].fields]
                moved = self.builder_.call_te(kernel, *args, primfunc_name_hint=call.args[0].name_hint)
            else:
                args = self.operands(call.args, lambda a: self.narrow(a, dtype))
                moved = tvm.ir.Call(call.op, args, call.attrs, call.ty_args)
            self.define(binding, self.emit(moved, binding.var.name), dtype)
            return True

        def opaque_(self, binding: Any, call: Any, entry: Entry) -> bool:
            return False

    return CastWalker


def with_out_dtype(call: Any, args: list[Any], dtype: str) -> Any:
    """The product of other operands, accumulated in `dtype`."""
    from tvm import relax

    kind, a = op_name(call), call.attrs
    if kind == "matmul":
        return relax.op.matmul(*args, out_dtype=dtype)
    options = {
        "strides": a.strides, "padding": a.padding, "dilation": a.dilation, "groups": int(a.groups),
        "data_layout": a.data_layout, "kernel_layout": a.kernel_layout, "out_layout": a.out_layout, "out_dtype": dtype,
    }  # fmt: skip
    if "transpose" in kind:
        options["output_padding"] = a.output_padding
    return getattr(relax.op.nn, kind.removeprefix("nn."))(*args, **options)
