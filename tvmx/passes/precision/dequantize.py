"""Takes operators of a quantised program back to float: their operands' Q/DQ go, their weights are dequantised."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from tvmx.passes.constants import as_array, as_constant
from tvmx.passes.rewrite import dtype_of, op_name


def strip_quantization(mod: Any, variables: Collection[Any]) -> Any:
    """`main` where the operators bound to `variables` read float operands.

    dequantize(quantize(x)) → x and dequantize(constant) → its float value, for these readers only. An operand whose
    integers come from elsewhere (an integer operator) keeps its dequantize.
    """
    import tvm
    from tvm import relax

    values = {b.var: b.value for block in mod["main"].body.blocks for b in block.bindings}

    @relax.expr_functor.mutator
    class Strip(relax.PyExprMutator):  # type: ignore[misc]
        def visit_var_binding_(self, binding: Any) -> None:
            if binding.var in variables and isinstance(binding.value, tvm.ir.Call):
                args = [
                    relax.Tuple([_float(f, values) for f in a.fields])
                    if isinstance(a, relax.Tuple)
                    else _float(a, values)
                    for a in binding.value.args
                ]
                call = binding.value
                binding = relax.VarBinding(binding.var, tvm.ir.Call(call.op, args, call.attrs, call.ty_args))
            super().visit_var_binding_(binding)

    mod = mod.clone()
    mod[mod.get_global_var("main")] = Strip(mod).visit_expr(mod["main"])
    return relax.transform.DeadCodeElimination()(mod)


def _float(operand: Any, values: dict[Any, Any]) -> Any:
    """The float value that a dequantize stands for, or the operand."""
    call: Any = values.get(operand)
    if op_name(call) != "dequantize":
        return operand
    source = call.args[0]
    made: Any = values.get(source)
    if op_name(made) == "quantize" and dtype_of(made.args[0]) == dtype_of(call):
        return made.args[0]
    q, scale, zero = (as_array(a) for a in call.args[:3])
    if q is None or scale is None or zero is None:
        return operand
    return as_constant(dequantized(q, scale, zero, int(call.attrs.axis)).astype(dtype_of(call)))


def dequantized(q: np.ndarray[Any, Any], scale: np.ndarray[Any, Any], zero: np.ndarray[Any, Any], axis: int) -> Any:
    """(q - zero) * scale, per tensor or along `axis`."""
    shape = [1] * q.ndim
    if scale.size > 1:
        shape[axis] = scale.size
    difference = q.astype(np.int32) - zero.astype(np.int32).reshape(shape if zero.size > 1 else [1] * q.ndim)
    return difference.astype(np.float32) * scale.astype(np.float32).reshape(shape if scale.size > 1 else [1] * q.ndim)
