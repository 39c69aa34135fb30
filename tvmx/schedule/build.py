"""Scheduled PrimFuncs → machine code, the same way wherever they are built (compilation, tuning, tests)."""

from __future__ import annotations

import importlib
from typing import Any


def build_module(mod: Any, target: Any) -> Any:
    """`tvm.compile` of scheduled kernels for a `tvm.target.Target`.

    Bounds checks that a split leaves are marked `likely`, so that LoopPartition makes the last, partial iteration a
    loop of its own: otherwise each vector loop with a tail would run lane by lane.
    """
    import tvm

    with build_context():
        return tvm.compile(mark_predicates(mod), target)


def build_context() -> Any:
    """The PassContext that kernels are built in."""
    import tvm

    importlib.import_module("tvmx_schedules")  # registers the vector forms of exp, erf, ...
    config = {"tirx.disable_assert": True, "s_tir.LoopPartition": {"partition_const_loop": True}}
    return tvm.transform.PassContext(opt_level=3, config=config)


def mark_predicates(mod: Any) -> Any:
    """Wrap every block predicate of an IRModule in `likely`."""
    import tvm
    import tvm_ffi
    from tvm import tirx
    from tvm.s_tir import SBlockRealize

    def mark(realize: Any, mutator: Any) -> Any:
        realize = mutator.default_mutate(realize)
        predicate = realize.predicate
        if isinstance(predicate, tirx.IntImm) or _is_likely(predicate):
            return realize
        return SBlockRealize(realize.iter_values, tirx.likely(predicate), realize.block)

    funcs = {}
    for gv, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            func = func.with_body(tvm_ffi.structural_mutate(func.body, [(SBlockRealize, mark)]))
        funcs[gv] = func
    return tvm.IRModule(funcs, attrs=mod.attrs)


def _is_likely(expr: Any) -> bool:
    from tvm.ir import Call

    return isinstance(expr, Call) and getattr(expr.op, "name", "") == "tirx.likely"
