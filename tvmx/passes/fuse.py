"""Which kernels FuseOps may join. It looks at operator kinds only; here the kinds are corrected by what a merged
kernel would have to recompute.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from tvmx.passes.rewrite import dims_of

log = logging.getLogger(__name__)

# TVM's OpPatternKind
BROADCAST = 1
INJECTIVE = 2
OUT_ELEMENTWISE_FUSABLE = 4
OPAQUE = 8
PATTERN = "op_pattern"

# Their code binds the argument to a variable, and TVM's code generator puts the value back wherever the variable is
# read: each further one around it takes eleven times as long (four 1 s, five 18 s, seven for ever).
_BINDING = {"tirx.exp": 1, "tirx.sigmoid": 1, "tirx.tanh": 1, "tirx.erf": 1, "tirx.log": 2}
MAX_NESTING = 4


def guard_patterns() -> Any:
    """The pass; to run right after AnnotateTIROpPattern.

    - An element-wise kernel that spreads a computed small tensor over a large one (an SE block's scale, a mean)
      becomes injective: FuseOps would otherwise make it the epilogue of the small tensor's convolution, which would
      then be computed once per element of the large one. It still joins element-wise neighbours.
    - A kernel that reads elements of a computed input several times (resize, tile, broadcast) no longer swallows the
      element-wise producer of that input, but still takes an epilogue.
    - A chain of exp, tanh and the like is cut where its code could not be generated in reasonable time.
    """
    import tvm
    from tvm import relax, tirx

    from tvmx.schedule.tir import walk

    def run(mod: Any, _: Any) -> Any:
        for gv, func in mod.functions_items():
            if isinstance(func, relax.Function):
                mod = _guard_function(mod, gv)
        return mod

    def _guard_function(mod: Any, gv: Any) -> Any:
        computed: set[Any] = set()
        renamed: dict[Any, Any] = {}
        nesting: dict[Any, int] = {}  # of binding calls, in the kernel that would end with this value
        for block in mod[gv].body.blocks:
            for binding in block.bindings:
                kind = _corrected(mod, binding.value, computed)
                own = _binding_calls(mod, binding.value)
                if own is not None:
                    nested = own + max((nesting.get(operand, 0) for operand in binding.value.args[1].fields), default=0)
                    if nested > MAX_NESTING:
                        kind = OUT_ELEMENTWISE_FUSABLE
                    nesting[binding.var] = own if kind == OUT_ELEMENTWISE_FUSABLE else nested
                if kind is not None:
                    callee = binding.value.args[0]
                    renamed[binding.var] = (callee, kind)
                if not _is_opaque(mod, binding.value):
                    computed.add(binding.var)
        if not renamed:
            return mod
        clones: dict[Any, Any] = {}
        builder_mod = mod

        @relax.expr_functor.mutator
        class Redirect(relax.PyExprMutator):  # type: ignore[misc]
            def visit_var_binding_(self, binding: Any) -> None:
                if binding.var in renamed:
                    callee, kind = renamed[binding.var]
                    key = (callee.name_hint, kind)
                    if key not in clones:
                        clone = builder_mod[callee].with_attr(PATTERN, kind)
                        clones[key] = self.builder_.add_func(clone, callee.name_hint)
                    call = binding.value
                    call = tvm.ir.Call(call.op, [clones[key], *call.args[1:]], call.attrs, call.ty_args)
                    binding = relax.VarBinding(binding.var, call)
                super().visit_var_binding_(binding)

        walker = Redirect(mod)
        func = walker.visit_expr(mod[gv])
        result = walker.builder_.get()
        result[gv] = func
        return result

    def _is_opaque(mod: Any, value: Any) -> bool:
        """A kernel that FuseOps leaves alone takes no epilogue either."""
        if not isinstance(value, tvm.ir.Call) or getattr(value.op, "name", "") != "relax.call_tir":
            return False
        attrs = mod[value.args[0]].attrs
        return attrs is not None and int(attrs.get(PATTERN) or 0) == OPAQUE

    def _corrected(mod: Any, value: Any, computed: set[Any]) -> int | None:
        if not isinstance(value, tvm.ir.Call) or getattr(value.op, "name", "") != "relax.call_tir":
            return None
        func = mod[value.args[0]]
        kind = func.attrs.get(PATTERN) if func.attrs else None
        result = _elements(value)
        if kind is None or int(kind) > INJECTIVE or result is None or not isinstance(func, tirx.PrimFunc):
            return None
        for operand in value.args[1].fields:
            size = _elements(operand)
            if operand in computed and size is not None and size < result:
                return (
                    INJECTIVE if int(kind) <= BROADCAST and len(value.args[1].fields) > 1 else OUT_ELEMENTWISE_FUSABLE
                )
        return None

    def _binding_calls(mod: Any, value: Any) -> int | None:
        """Of an element-wise kernel; None for what starts a kernel of its own."""
        if not isinstance(value, tvm.ir.Call) or getattr(value.op, "name", "") != "relax.call_tir":
            return None
        func = mod[value.args[0]]
        kind = func.attrs.get(PATTERN) if func.attrs else None
        if kind is None or int(kind) > INJECTIVE:
            return None
        calls = 0

        def count(call: Any) -> None:
            nonlocal calls
            calls += _BINDING.get(getattr(call.op, "name", ""), 0)

        walk(func.body, tvm.ir.Call, count)
        return calls

    return tvm.transform.module_pass(run, opt_level=0, name="tvmx.GuardPatterns")


def fuse_kernels() -> Any:
    """FuseOps and FuseTIR. Where TVM fails to join the kernels, they are left apart: slower, not wrong."""
    import tvm
    from tvm import relax

    def run(mod: Any, _: Any) -> Any:
        try:
            return tvm.transform.Sequential([relax.transform.FuseOps(), relax.transform.FuseTIR()])(mod)
        except Exception as error:  # TVM raises whatever its C++ side threw
            reason = str(error).strip().splitlines()
            log.warning("kernels are left unfused, TVM cannot join them: %s", reason[-1] if reason else error)
            return mod

    return tvm.transform.module_pass(run, opt_level=0, name="tvmx.FuseKernels")


def _elements(expr: Any) -> int | None:
    """How many elements a tensor has, symbolic dims counted as large."""
    from tvm import relax

    if not isinstance(expr.ty, relax.TensorType):
        return None
    shape = dims_of(expr)
    return None if shape is None else math.prod(d if isinstance(d, int) else 1 << 10 for d in shape)
