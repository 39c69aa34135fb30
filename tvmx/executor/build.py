"""Programs + target → one `.so`: plan memory, compile kernels, emit host code, link, seal."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmx.errors import CompileError
from tvmx.executor.constants import ConstantPool
from tvmx.executor.host_code import host_source
from tvmx.executor.in_place import InPlace, kernels_in_place
from tvmx.executor.kernels import KernelSet, collect, compile_kernels
from tvmx.executor.lifetimes import arena_buffers
from tvmx.executor.link import Toolchain, link, write_data
from tvmx.executor.manifest import Bounds, entry_manifest, library_manifest
from tvmx.executor.order import reordered
from tvmx.executor.sharing import shared
from tvmx.graph import COPY, Graph
from tvmx.memory import Solution, plan
from tvmx.runtime.arena import ArenaBuffer, to_problem
from tvmx.runtime.manifest import Branch
from tvmx.schedule.fallback import does_not_compile, plainer
from tvmx.target import Target


@dataclass(frozen=True)
class EntryProgram:
    """One entry point: the imported model, its program, the scheduled kernels, the rule that made each.

    `graph` is None for a model that runs through the Relax VM, for the reason `vm_reason`.
    """

    entry: str
    model: Any  # has inputs, outputs, bounds, checks, name
    graph: Graph | None
    mod: Any  # tvm.IRModule with scheduled PrimFuncs
    rules: Mapping[str, str]
    vm_reason: str | None = None
    unscheduled: Any = None  # tvm.IRModule before scheduling, for kernels whose schedule does not build


@dataclass(frozen=True)
class BuildResult:
    """The file written, the plan of the first entry (None when it is symbolic or a VM program), and figures."""

    path: Path
    plan: Solution | None
    report: dict[str, Any]


@dataclass(frozen=True)
class _Planned:
    program: EntryProgram
    graph: Graph  # the program's, in the order that is run
    buffers: list[ArenaBuffer]
    solution: Solution | None  # None: sizes are symbolic


def build_artifact(
    programs: Sequence[EntryProgram],
    target: Target,
    output: Path,
    planner: str = "best",
    planner_budget_s: float = 2.0,
    jobs: int | None = None,
    branches: Mapping[str, Branch] | None = None,
    streams: int = 4,
    source_folder: Path | None = None,
) -> BuildResult:
    """Write one `.so` with an entry point a program; parameters and equal kernels are stored once.

    `branches` are further entries, each made of three programs of which one decides. For CUDA targets, `streams` is
    the most that kernels are spread over, and `source_folder` receives their source.

    Raises CompileError when a kernel or the library cannot be built. `output` is replaced only by a whole file.
    """
    for program in programs:
        if not program.entry.isidentifier() or not program.entry.isascii():
            raise CompileError(f"entry {program.entry!r} must be an identifier, like 'b8'")
    if target.kind == "cuda":
        from tvmx.executor.cuda_build import build_cuda_artifact

        return build_cuda_artifact(
            programs, target, output, planner, planner_budget_s, jobs or _cores(), branches, streams, source_folder
        )
    if any(p.graph is None for p in programs):
        from tvmx.executor.vm_build import build_vm_artifact

        return build_vm_artifact(programs, target, output)
    began = time.perf_counter()
    tools = Toolchain.of(target)
    planned = [_plan(p, planner, planner_budget_s) for p in programs]
    kernels = collect([(p.program.entry, _functions(p), _in_place_kernels(p)) for p in planned])
    constants = ConstantPool()
    seconds = {"plan": time.perf_counter() - began}
    with tempfile.TemporaryDirectory(prefix="tvmx-build-") as name:
        folder = Path(name)
        began = time.perf_counter()
        objects: list[Path] = []
        if kernels.funcs:
            plain = _Plainer(planned, kernels, target)
            objects, replaced = compile_kernels(kernels.funcs, target, folder, jobs or _cores(), plain)
            kernels = kernels.with_funcs(replaced)
            planned = [dataclasses.replace(p, program=plain.with_rules(p.program)) for p in planned]
        seconds["kernels"] = time.perf_counter() - began
        began = time.perf_counter()
        host, entries = _host(planned, kernels, constants)
        manifest = library_manifest(entries, target, constants.bytes, "graph", branches=branches)
        write_data(folder, constants, manifest, tools)
        tiles = "amx_tile" in manifest["target"]["features"]
        size = link(folder, host, objects, tools, target, output, tiles)
        seconds["link"] = time.perf_counter() - began
    first = planned[0]
    report = {
        "executor": "graph",
        "kernels": len(kernels.funcs),
        "nodes": {p.program.entry: len(p.graph.nodes) for p in planned},
        "rules": dict(Counter(r for p in planned for r in _rules(p).values())),
        "parameter_bytes": constants.bytes,
        "library_bytes": size,
        "arena_bytes": first.solution.height if first.solution else None,
        "arena_lower_bound": first.solution.lower_bound if first.solution else None,
        "build_seconds": {k: round(v, 3) for k, v in seconds.items()},
    }
    return BuildResult(output, first.solution, report)


def _plan(program: EntryProgram, planner: str, budget_s: float) -> _Planned:
    assert program.graph is not None
    graph = shared(program.graph)
    buffers = arena_buffers(graph)
    if any(isinstance(b.size, str) for b in buffers):
        return _Planned(program, graph, buffers, None)
    solution = plan(to_problem(buffers, int), budget_s=budget_s, planner=planner)
    other = reordered(graph)
    if other is not graph:
        others = arena_buffers(other)
        lower = plan(to_problem(others, int), budget_s=budget_s, planner=planner)
        if lower.height < solution.height:
            return _Planned(program, other, others, lower)
    return _Planned(program, graph, buffers, solution)


class _Plainer:
    """Plainer forms of kernels whose schedules do not build, and which rules made them."""

    def __init__(self, planned: Sequence[_Planned], kernels: KernelSet, target: Target) -> None:
        self._programs = {p.program.entry: p.program for p in planned}
        self._kernels = kernels
        self._target = target
        self._rules: dict[str, str] = {}  # symbol -> rule

    def __call__(self, symbol: str, reason: str) -> Any:
        for entry, symbols in self._kernels.symbols.items():
            program = self._programs[entry]
            for name, found in symbols.items():
                if found == symbol and program.unscheduled is not None:
                    func = self._kernels.prepared(symbol, program.unscheduled[name])
                    other = plainer(symbol, func, program.rules.get(name, ""), self._target, reason)
                    self._rules[symbol] = other.rule
                    return other.func
        raise CompileError(does_not_compile(symbol, reason))

    def with_rules(self, program: EntryProgram) -> EntryProgram:
        """The program with the rules that made its kernels in the end."""
        symbols = self._kernels.symbols[program.entry]
        changed = {name: self._rules[s] for name, s in symbols.items() if s in self._rules}
        return dataclasses.replace(program, rules={**program.rules, **changed}) if changed else program


def _in_place_kernels(planned: _Planned) -> dict[str, InPlace | None]:
    over = {b.id: b.over for b in planned.buffers if b.over is not None}
    return kernels_in_place(planned.graph.nodes, over, planned.graph.storage)


def _functions(planned: _Planned) -> dict[str, Any]:
    used = {n.kernel for n in planned.graph.nodes} - {COPY}
    return {name: planned.program.mod[name] for name in sorted(used)}


def _rules(planned: _Planned) -> dict[str, str]:
    return {name: planned.program.rules.get(name, "") for name in _functions(planned)}


def _host(planned: Sequence[_Planned], kernels: KernelSet, constants: ConstantPool) -> tuple[str, dict[str, Any]]:
    sources, entries = [], {}
    parallel = kernels.parallel
    for p in planned:
        entry, symbols = p.program.entry, kernels.symbols[p.program.entry]
        offsets = constants.add(p.graph.constants)
        source = host_source(
            p.graph,
            entry,
            symbols,
            p.solution.offsets if p.solution else None,
            offsets,
            tuple(b.id for b in p.buffers),
            any(symbols[n.kernel] in parallel for n in p.graph.nodes if n.kernel != COPY),
        )
        sources.append(source.source)
        model = p.program.model
        entries[entry] = entry_manifest(
            p.graph,
            p.program.rules,
            p.buffers,
            p.solution,
            source,
            offsets,
            Bounds.of(getattr(model, "bounds", {}) or {}),
            tuple(getattr(model, "checks", ()) or ()),
        )
    return "\n".join(sources), entries


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
