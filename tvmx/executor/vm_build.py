"""Programs that are no straight line: a Relax VM executable in the same sealed artifact, on the same thread pool."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmx.errors import CompileError
from tvmx.executor.constants import ConstantPool
from tvmx.executor.link import VM_EXPORTS, Toolchain, compile_pool, replacing, write_data
from tvmx.executor.manifest import Bounds, library_manifest
from tvmx.runtime.seal import seal
from tvmx.schedule.build import any_at_risk, build_context, mark_predicates, partition_symbolic
from tvmx.schedule.fallback import build_error, plainer
from tvmx.schedule.vectorizer import guarded_target, llvm_options
from tvmx.target import Target

if TYPE_CHECKING:
    from tvmx.executor.build import BuildResult, EntryProgram

log = logging.getLogger(__name__)


def build_vm_artifact(programs: Sequence[EntryProgram], target: Target, output: Path) -> BuildResult:
    """Write a `.so` that the Relax VM runs; it needs TVM's runtime libraries where it is loaded.

    Raises CompileError when it cannot be built, or when several entries are asked for.
    """
    from tvmx.executor.build import BuildResult

    program = next(p for p in programs if p.graph is None)
    reason = program.vm_reason or "the program is no straight line of kernels"
    if len(programs) > 1:
        raise CompileError(
            f"entry {program.entry!r} would run through the Relax VM ({reason}), and several entries need "
            "straight-line programs; compile it into a file of its own"
        )
    log.info("%s: runs through the Relax VM: %s", output.name, reason)
    began = time.perf_counter()
    tools = Toolchain.of(target)
    guarded = any_at_risk(program.mod, target.tvm())
    executable = _compile_program(program, target)
    entries = {program.entry: _entry(program)}
    manifest = library_manifest(entries, target, 0, "vm", reason)
    with tempfile.TemporaryDirectory(prefix="tvmx-build-") as name:
        folder = Path(name)
        write_data(folder, ConstantPool(), manifest, tools)
        (folder / "exports.map").write_text(VM_EXPORTS)
        tools.run(["-c", "data.S", "-o", "data.o"], folder)
        compile_pool(folder, tools, for_vm=True)

        def join(path: str, objects: list[str], **options: Any) -> None:
            tools.run(
                ["-shared", "-o", path, "pool.o", "data.o", *objects,
                 "-Wl,--version-script=exports.map", "-Wl,-z,noexecstack", "-Wl,--build-id=none",
                 "-lm", "-lpthread"],
                folder,
            )  # fmt: skip

        with replacing(output.absolute()) as made, llvm_options(guarded):
            executable.export_library(str(made), fcompile=join, workspace_dir=str(folder))
            seal(made)
    report = {
        "executor": "vm",
        "reason": reason,
        "library_bytes": output.stat().st_size,
        "arena_bytes": None,
        "arena_lower_bound": None,
        "build_seconds": {"vm": round(time.perf_counter() - began, 3)},
    }
    return BuildResult(output, None, report)


def _compile_program(program: EntryProgram, target: Target) -> Any:
    """Relax VM executable; kernels whose schedules do not build get plainer ones. Raises CompileError."""
    try:
        return _compile(program.mod, target)
    except CompileError as error:
        mod = _with_plainer_kernels(program, target)
        if mod is None:
            raise
        log.debug("the executable was built again with plainer kernels", exc_info=error)
        return _compile(mod, target)


def _with_plainer_kernels(program: EntryProgram, target: Target) -> Any | None:
    """The module with every kernel that does not build by itself replaced; None where there is no such kernel."""
    import tvm

    if program.unscheduled is None:
        return None
    tvm_target, changed = target.tvm(), {}
    for var, func in program.mod.functions_items():
        name = var.name_hint
        if not isinstance(func, tvm.tirx.PrimFunc):
            continue
        reason = build_error(name, func.with_attr("global_symbol", name), tvm_target)
        if reason is not None:
            plain = program.unscheduled[name].with_attr("global_symbol", name)
            other = plainer(name, plain, program.rules.get(name, ""), target, reason).func
            changed[name] = other.without_attr("global_symbol").with_attr("tirx.is_scheduled", True)
    if not changed:
        return None
    funcs = {v: changed.get(v.name_hint, f) for v, f in program.mod.functions_items()}
    return tvm.IRModule(funcs, attrs=program.mod.attrs)


def _compile(mod: Any, target: Target) -> Any:
    """Relax VM executable. TVM's storage planner is left out: it frees storage that a reshape still aliases."""
    import tvm
    from tvm import relax

    guarded = any_at_risk(mod, target.tvm())
    t = relax.transform
    pipeline = tvm.transform.Sequential(
        [
            relax.backend.DispatchSortScan(),
            t.LegalizeOps(),
            t.RewriteDataflowReshape(),
            t.ToNonDataflow(),
            t.RemovePurityChecking(),
            t.CallTIRRewrite(),
            t.LowerAllocTensor(),
            t.KillAfterLastUse(),
            t.LowerRuntimeBuiltin(),
            t.ComputePrimValue(),
            t.VMShapeLower(),
            t.AttachGlobalSymbol(),
            tvm.transform.module_pass(lambda m, _: partition_symbolic(m), opt_level=0, name="tvmx.PartitionSymbolic"),
        ]
    )
    try:
        with build_context(), llvm_options(guarded):
            chosen = guarded_target(target.tvm()) if guarded else target.tvm()
            return relax.build(mark_predicates(mod), target=chosen, relax_pipeline=pipeline)
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise CompileError(f"the Relax VM cannot run this model: {reason[-1] if reason else error}") from error


def _entry(program: EntryProgram) -> dict[str, Any]:
    model = program.model
    return {
        "inputs": [_info(i) for i in model.inputs],
        "outputs": [_info(o) for o in model.outputs],
        "dims": {k: list(v) for k, v in Bounds.of(getattr(model, "bounds", {}) or {}).ranges.items()},
        "checks": [
            {"input": c.input, "low": c.low, "high": c.high, "node": c.node}
            for c in getattr(model, "checks", ()) or ()
        ],
        "guards": [],
        "values": [],
        "tensors": [],
        "nodes": [],
        "arena": {
            "buffers": [], "offsets": None, "bytes": None, "lower_bound": None,
            "unshared_bytes": None, "planner": None,
        },
    }  # fmt: skip


def _info(info: Any) -> dict[str, Any]:
    shape = [d if isinstance(d, int) else str(d) for d in info.shape]
    return {"name": info.name, "tensor": info.name, "shape": shape, "dtype": info.dtype}
