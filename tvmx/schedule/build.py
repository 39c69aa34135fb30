"""Scheduled PrimFuncs → machine code, the same way wherever they are built (compilation, tuning, tests)."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

from tvmx.schedule.vectorizer import guarded_target, is_at_risk, llvm_options

log = logging.getLogger(__name__)

UNROLL_STEP, UNROLL_EXPLICIT = "pragma_auto_unroll_max_step", "pragma_unroll_explicit"
_PARTITION = {"partition_const_loop": True}


def build_module(mod: Any, target: Any) -> Any:
    """Scheduled kernels as a callable `tvm.runtime.Executable`, for a `tvm.target.Target` of a CPU.

    A module with Relax functions is built as `tvm.compile` does.
    """
    import tvm

    if any(isinstance(f, tvm.relax.Function) for _, f in mod.functions_items()):
        guarded = any_at_risk(mod, target)
        with build_context(), llvm_options(guarded):
            chosen = guarded_target(target) if guarded else target
            return tvm.compile(partition_symbolic(mark_predicates(mod)), chosen)
    lowered = lower_module(mod, target)
    guarded = any(is_at_risk(f) for _, f in lowered.functions_items())
    return tvm.runtime.Executable(generate(lowered, target, guarded))


def build_objects(mod: Any, target: Any, path: Path) -> list[Path]:
    """Scheduled kernels as object files: `path`, and one beside it for kernels that need the vectoriser's guard."""
    import tvm

    lowered = lower_module(mod, target)
    risky = {gv: is_at_risk(f) for gv, f in lowered.functions_items()}
    made = []
    for guarded in sorted(set(risky.values())):
        part = tvm.IRModule({gv: f for gv, f in lowered.functions_items() if risky[gv] == guarded}, attrs=lowered.attrs)
        made.append(path.with_stem(f"{path.stem}-guarded") if guarded else path)
        generate(part, target, guarded, made[-1])
    return made


def any_at_risk(mod: Any, target: Any) -> bool:
    """Whether a kernel of a module needs the vectoriser's guard, or cannot be lowered by itself to say so."""
    import tvm

    kernels = {
        gv.name_hint: f.with_attr("global_symbol", gv.name_hint)
        for gv, f in mod.functions_items()
        if isinstance(f, tvm.tirx.PrimFunc)
    }
    try:
        return any(is_at_risk(f) for _, f in lower_module(tvm.IRModule(kernels), target).functions_items())
    except Exception:  # TVM raises whatever its C++ side threw; what is wrong shows when the module is built
        log.debug("kernels of a module cannot be lowered by themselves", exc_info=True)
        return True


def lower_module(mod: Any, target: Any) -> Any:
    """Scheduled kernels as LLVM's code generator takes them.

    Bounds checks that a split leaves are marked `likely`, so that LoopPartition makes the last, partial iteration a
    loop of its own: otherwise each vector loop with a tail would run lane by lane.
    """
    import tvm
    from tvm import tirx

    with build_context():
        bound = tirx.transform.BindTarget(target.with_host(target))(partition_symbolic(mark_predicates(mod)))
        pipeline, finalize, _ = tirx.get_default_tir_pipeline(target)
        lowered = finalize()(pipeline(bound))
        return tvm.tirx.transform.SkipAssert()(lowered)


def generate(lowered: Any, target: Any, guarded: bool, path: Path | None = None) -> Any:
    """Machine code of lowered kernels as a `tvm.runtime.Module`, written to `path` where one is given."""
    import tvm

    with llvm_options(guarded):
        module = tvm.get_global_func("target.build.llvm")(lowered, guarded_target(target) if guarded else target)
        if path is not None:
            module.write_to_file(str(path), "o")
        return module


def build_context() -> Any:
    """The PassContext that kernels are built in."""
    import tvm

    importlib.import_module("tvmx_schedules")  # registers the vector forms of exp, erf, ...
    config = {"tirx.disable_assert": True, "s_tir.LoopPartition": _PARTITION}
    return tvm.transform.PassContext(opt_level=3, config=config)


def mark_predicates(mod: Any) -> Any:
    """Wrap every block predicate of an IRModule in `likely`; drop the scope pragmas of TIR builders, which LLVM's code
    generator warns of."""
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

    def unwrap(statement: Any, mutator: Any) -> Any:
        statement = mutator.default_mutate(statement)
        return statement.body if statement.attr_key == "pragma_scope" else statement

    def serial(loop: Any, mutator: Any) -> Any:
        loop = mutator.default_mutate(loop)
        if loop.kind != tirx.ForKind.UNROLLED:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body, None, loop.annotations)

    def leave_to_llvm(loop: Any, mutator: Any) -> Any:
        """`pragma_unroll_explicit = 0`: LLVM unrolls as it likes, and has no hint to warn of."""
        loop = mutator.default_mutate(loop)
        if int(loop.annotations.get(UNROLL_EXPLICIT, 1)):
            return loop
        notes = {k: v for k, v in loop.annotations.items() if k not in (UNROLL_EXPLICIT, UNROLL_STEP)}
        body = tvm_ffi.structural_mutate(loop.body, [(tirx.For, serial)])
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, notes)

    rules = [(SBlockRealize, mark), (tirx.AttrStmt, unwrap), (tirx.For, leave_to_llvm)]
    funcs = {}
    for gv, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            func = func.with_body(tvm_ffi.structural_mutate(func.body, rules))
        funcs[gv] = func
    return tvm.IRModule(funcs, attrs=mod.attrs)


def partition_symbolic(mod: Any) -> Any:
    """Lower kernels with symbolic dims as far as LoopPartition. The pipeline's own run finds nothing left to do there.

    Their loops are 64-bit, and where LoopPartition replaces the variable of a tail of one iteration, it writes a
    32-bit zero, which ends the build ("int32 vs. int64", TVM 0.27). So the loop is kept, and not as a vector of one.
    """
    import tvm
    import tvm_ffi
    from tvm import s_tir, tirx

    symbolic = {gv: f for gv, f in mod.functions_items() if isinstance(f, tirx.PrimFunc) and _has_symbolic_dims(f)}
    if not symbolic:
        return mod
    lowering = [
        s_tir.transform.CanonicalizeLoop(),
        s_tir.transform.LowerInitBlock(),
        s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.CompactBufferAllocation(),
        s_tir.transform.LowerMatchBuffer(),
        s_tir.transform.StmtSimplify(),
        s_tir.transform.LowerOpaqueBlock(),
        tirx.transform.FlattenBuffer(),
        tirx.transform.BF16ComputeLegalize(),
        tirx.transform.NarrowDataType(32),
        s_tir.transform.LoopPartition(),
    ]
    config = {"s_tir.LoopPartition": {**_PARTITION, "no_unroll_loop_with_extent_one": True}}
    with tvm.transform.PassContext(opt_level=3, config=config):
        lowered = tvm.transform.Sequential(lowering)(tvm.IRModule(symbolic))

    def serial(loop: Any, mutator: Any) -> Any:
        loop = mutator.default_mutate(loop)
        fixed = isinstance(loop.extent, tirx.IntImm)
        vector_of_one = loop.kind == tirx.ForKind.VECTORIZED and fixed and loop.extent.value == 1
        # A window cut at a border has as many taps as lie inside, which UnrollLoop refuses.
        unrolled_part = loop.kind == tirx.ForKind.UNROLLED and not fixed
        if not vector_of_one and not unrolled_part:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)

    funcs = dict(mod.functions_items())
    for gv, func in lowered.functions_items():
        funcs[gv] = func.with_body(tvm_ffi.structural_mutate(func.body, [(tirx.For, serial)]))
    return tvm.IRModule(funcs, attrs=mod.attrs)


def _has_symbolic_dims(func: Any) -> bool:
    from tvm import tirx

    return any(not isinstance(d, tirx.IntImm) for p in func.params if hasattr(p.ty, "shape") for d in p.ty.shape)


def _is_likely(expr: Any) -> bool:
    from tvm.ir import Call

    return isinstance(expr, Call) and getattr(expr.op, "name", "") == "tirx.likely"
