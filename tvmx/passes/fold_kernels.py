"""Constant folding after lowering: kernels whose operands are all constants (packed weights) run at compile time.

TVM's FoldConstant compiles one module per call; here one module holds all kernels of a round. What would grow the
constants (int8 weights turned into floats) stays in the program.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tvmx.passes import fold
from tvmx.passes.constants import as_array, as_constant
from tvmx.passes.fold import GROWTH_LIMIT
from tvmx.passes.rewrite import RewriteRule, Scope, dims_of, dtype_of, op_name, rewrite_pass

MAX_ROUNDS = 4  # a packed, then transposed weight takes two


def fold_kernels() -> Any:
    """The pass."""
    import tvm
    from tvm import relax

    def run(mod: Any, _: Any) -> Any:
        for _round in range(MAX_ROUNDS):
            mod = rewrite_pass("tvmx.FoldKernels", fold.RULES, cse=False)(mod)
            ready = _foldable(mod)
            if not ready:
                break
            rule = RewriteRule("fold_kernel", ("call_tir",), _Lookup(_evaluate(mod, ready)))
            mod = rewrite_pass("tvmx.FoldKernels", (rule,), cse=False)(mod)
            mod = relax.transform.DeadCodeElimination()(mod)
        return mod

    return tvm.transform.module_pass(run, opt_level=0, name="tvmx.FoldKernels")


def _key(call: Any) -> tuple[Any, ...]:
    return (call.args[0].name_hint, *(hash(field) for field in call.args[1].fields))


class _Lookup:
    """The rule's body: a call that was evaluated  →  its value."""

    def __init__(self, results: dict[tuple[Any, ...], Any]) -> None:
        self.results = results

    def __call__(self, scope: Scope, call: Any) -> Any:
        from tvm import relax

        simple = len(call.args) == 2 and isinstance(call.args[1], relax.Tuple)
        return self.results.get(_key(call)) if simple else None


def _foldable(mod: Any) -> dict[tuple[Any, ...], Any]:
    """The calls, one per distinct (kernel, operands), that can be evaluated now and are worth it."""
    from tvm import relax

    found: dict[tuple[Any, ...], Any] = {}
    for _, func in mod.functions_items():
        if not isinstance(func, relax.Function):
            continue
        for block in func.body.blocks:
            for binding in block.bindings:
                call = binding.value
                if op_name(call) != "call_tir" or len(call.args) != 2 or not isinstance(call.ty, relax.TensorType):
                    continue
                arrays = [as_array(field) for field in call.args[1].fields]
                known = [a for a in arrays if a is not None]
                shape = dims_of(call)
                if len(known) < len(arrays) or not known or shape is None:
                    continue
                if not all(isinstance(d, int) for d in shape):
                    continue
                width = np.dtype(dtype_of(call)).itemsize
                size = math.prod(shape) * width
                # Packing pads a little; int8 or float16 weights turned into float32 would be a waste.
                widened = width > max(a.itemsize for a in known)
                if size <= max(GROWTH_LIMIT, 0 if widened else 2 * sum(a.nbytes for a in known)):
                    found[_key(call)] = call
    return found


def _evaluate(mod: Any, calls: dict[tuple[Any, ...], Any]) -> dict[tuple[Any, ...], Any]:
    import tvm

    names = {call.args[0].name_hint for call in calls.values()}
    kernels = {name: mod[name].with_attr("global_symbol", name) for name in sorted(names)}
    library = tvm.compile(tvm.IRModule(kernels), tvm.target.Target("llvm"))
    results = {}
    for key, call in calls.items():
        shape = [int(d) for d in dims_of(call) or ()]
        out = tvm.runtime.empty(shape, dtype_of(call))
        operands = [field.value for field in call.args[1].fields]
        library[call.args[0].name_hint](*operands, out)
        results[key] = as_constant(out.numpy())
    return results
