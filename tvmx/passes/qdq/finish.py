"""What the rules leave: constants become floats, and every reader of a dequantize gets its own.

A dequantize that several kernels read would be written as a float tensor; one per reader is fused into each.
"""

from __future__ import annotations

from typing import Any

from tvmx.passes.constants import as_constant
from tvmx.passes.rewrite import op_name


def finish_dequantize() -> Any:
    """The pass."""
    import tvm
    from tvm import relax

    def run(mod: Any, _: Any) -> Any:
        mod = mod.clone()
        for gv, func in mod.functions_items():
            if isinstance(func, relax.Function) and not (func.attrs and "Primitive" in func.attrs):
                mod[gv] = _finisher()(mod).visit_expr(func)
        return relax.transform.DeadCodeElimination()(mod)

    return tvm.transform.module_pass(run, opt_level=0, name="tvmx.FinishDequantize")


_CLASS: Any = None


def _finisher() -> Any:
    global _CLASS
    if _CLASS is not None:
        return _CLASS
    import tvm
    from tvm import relax

    @relax.expr_functor.mutator
    class Finisher(relax.PyExprMutator):  # type: ignore[misc]
        def __init__(self, mod: Any) -> None:
            super().__init__(mod)
            self.sources: dict[Any, Any] = {}
            self.values: dict[Any, Any] = {}

        def visit_var_binding_(self, binding: Any) -> None:
            if op_name(binding.value) == "dequantize" and isinstance(binding.var, relax.DataflowVar):
                call = self.visit_expr(binding.value)
                value = _folded(call)
                if value is not None:
                    self.values[binding.var] = value
                    return
                self.sources[binding.var] = call
                return
            super().visit_var_binding_(binding)

        def visit_dataflow_var_(self, var: Any) -> Any:
            if var in self.values:
                return self.values[var]
            if var in self.sources:
                return self.builder_.emit(self.builder_.normalize(self.sources[var]))
            found = self.get_var_remap(var)
            return var if found is None else found

        def visit_var_(self, var: Any) -> Any:
            found = self.get_var_remap(var)
            return var if found is None else found

    def _folded(call: Any) -> Any | None:
        from tvmx.passes.constants import as_array
        from tvmx.passes.qdq.params import QParams, dequantize_array, qparams

        codes = as_array(call.args[0])
        if codes is None:
            return None
        params = qparams(call, str(codes.dtype))
        if not isinstance(params, QParams):
            return None
        return as_constant(dequantize_array(codes, params).astype(str(call.attrs.out_dtype)))

    assert tvm is not None
    _CLASS = Finisher
    return Finisher
