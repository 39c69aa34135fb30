"""Programs for a CUDA target → one `.so`: machine code, host tables, parameters, manifest. Needs no GPU."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmx.cuda.lower import DeviceProgram
from tvmx.cuda.survey import MATRIX_RULES
from tvmx.errors import CompileError
from tvmx.executor.constants import ConstantPool
from tvmx.executor.cuda_host import PRELUDE, KernelEntry, code_table, entry_tables
from tvmx.executor.cuda_kernels import DeviceCode, Unscheduled, arch_of, compile_device
from tvmx.executor.cuda_schedule import Scheduled, schedule
from tvmx.executor.host_code import HostSource
from tvmx.executor.kernels import KernelSet, collect
from tvmx.executor.link import Toolchain, link_cuda, write_data
from tvmx.executor.manifest import Bounds, entry_manifest, library_manifest
from tvmx.executor.sharing import shared
from tvmx.graph import COPY
from tvmx.runtime.arena import ArenaBuffer
from tvmx.runtime.manifest import Branch
from tvmx.target import Target

if TYPE_CHECKING:
    from tvmx.executor.build import BuildResult, EntryProgram

_ALIGN = 64


def build_cuda_artifact(
    programs: Sequence[EntryProgram],
    target: Target,
    output: Path,
    planner: str = "best",
    planner_budget_s: float = 2.0,
    jobs: int = 1,
    branches: Mapping[str, Branch] | None = None,
    max_streams: int = 4,
    source_folder: Path | None = None,
) -> BuildResult:
    """Write one `.so` for the GPUs of `target`; `source_folder` also receives the CUDA source of every kernel.

    Raises CompileError for symbolic shapes and control flow, for a kernel that does not compile, or without nvcc.
    """
    from tvmx.executor.build import BuildResult

    assert target.gpu is not None, "a CUDA target"
    refuse(programs, target)
    programs = [dataclasses.replace(p, graph=shared(p.graph)) for p in programs if p.graph is not None]
    tools = Toolchain.of(target)
    kernels = collect([(p.entry, _functions(p), {}) for p in programs])
    code = compile_device(kernels.funcs, _unscheduled(programs, kernels), target, jobs, source_folder)
    programs = [_with_rules(p, kernels, code) for p in programs]
    began = time.perf_counter()
    plans = [_schedule(p, kernels, code, target, max_streams, planner, planner_budget_s) for p in programs]
    seconds = {**code.seconds, "plan": time.perf_counter() - began}
    constants = ConstantPool()
    with tempfile.TemporaryDirectory(prefix="tvmx-build-") as name:
        folder = Path(name)
        began = time.perf_counter()
        table, facts = write_images(folder / "images.bin", code)
        places = {k.name: i for i, k in enumerate(table)}
        assert len(places) == len(table), "two kernels of one name"
        parts, entries = [], {}
        for program, plan in zip(programs, plans):
            offsets = constants.add(plan.graph.constants)
            symbols = kernels.symbols[program.entry]
            mine = {n: code.programs[s] for n, s in symbols.items()}
            parts.append(
                entry_tables(plan.graph, program.entry, mine, places, plan.streams, plan.arena.offsets, offsets)
            )
            entries[program.entry] = _entry(program, plan, mine, offsets)
        archs = {i.cubin.arch for i in code.images.values()}
        arch = max(archs, default=arch_of(target))  # sm_90a, where a kernel needs it
        exact = not arch[-1].isdigit()
        parts.append(code_table(table, target.gpu.sm, exact, [p.streams for p in plans], constants.bytes, target.name))
        manifest = library_manifest(entries, target, constants.bytes, "cuda", branches=branches)
        manifest["cuda"] = {"sm": target.gpu.sm, "arch": arch, "exact": exact, "kernels": facts}
        write_data(folder, constants, manifest, tools, images=True)
        size = link_cuda(folder, PRELUDE + "\n".join(parts), tools, output)
        seconds["link"] = time.perf_counter() - began
    first = plans[0]
    report = {
        "executor": "cuda",
        "kernels": len(code.programs),
        "nodes": {p.entry: len(s.graph.nodes) for p, s in zip(programs, plans)},
        "rules": dict(Counter(r for p in programs for r in _rules(p).values())),
        "tensor_core_share": round(_share(entries), 4),
        "spilled_bytes": sum(r.spill_stores + r.spill_loads for r in code.resources.values()),
        "streams": {p.entry: s.streams.streams for p, s in zip(programs, plans)},
        "parameter_bytes": constants.bytes,
        "library_bytes": size,
        "arena_bytes": first.arena.height,
        "arena_lower_bound": first.arena.lower_bound,
        "build_seconds": {k: round(v, 3) for k, v in seconds.items()},
    }
    return BuildResult(output, first.arena, report)


def refuse(programs: Sequence[EntryProgram], target: Target) -> None:
    """Raise CompileError for what a CUDA library cannot hold, saying what to do."""
    for program in programs:
        if program.graph is None:
            raise CompileError(
                f"this model needs the Relax VM ({program.vm_reason}), which {target.name} libraries do not have; "
                "fix what depends on data with --constant or --shape, or compile it for a CPU target"
            )
        symbolic = [t.name for t in program.graph.tensors.values() if any(isinstance(d, str) for d in t.shape)] + [
            n.name for n in program.graph.nodes if any(not s.lstrip("-").isdigit() for s in n.scalars)
        ]
        if symbolic:
            raise CompileError(
                f"a library for {target.name} needs fixed shapes, and {symbolic[0]!r} has a symbolic one; give every "
                "input's, as with --shape x=1,3,224,224, or several as entries"
            )


def write_images(path: Path, code: DeviceCode) -> tuple[list[KernelEntry], list[dict[str, Any]]]:
    """One block of all images, each at a multiple of 64; the kernels' table, and what the manifest says of them."""
    table: list[KernelEntry] = []
    facts: list[dict[str, Any]] = []
    with path.open("wb") as file:
        file.write(bytes(_ALIGN))  # no image is at 0
        for symbol, program in code.programs.items():
            image = code.images[symbol]
            places = []
            for data in (image.cubin.data, image.ptx):
                file.write(bytes(-file.tell() % _ALIGN))
                places.append([file.tell(), len(data)])
                file.write(data)
            resources = {r.kernel: r for r in image.cubin.kernels}
            shared = Counter[str]()
            for launch in program.launches:
                shared[launch.kernel] = max(shared[launch.kernel], launch.shared_bytes)
            for launch in {l.kernel: l for l in program.launches}.values():
                r = resources[launch.kernel]
                dynamic = shared[launch.kernel]
                table.append(KernelEntry(launch.kernel, places[0][0], places[1][0], dynamic, dynamic + r.static_shared))
                facts.append(
                    {
                        "name": launch.kernel, "program": symbol, "cubin": places[0], "ptx": places[1],
                        "registers": r.registers, "stack": r.stack, "spills": r.spill_stores + r.spill_loads,
                        "shared": dynamic + r.static_shared, "threads": launch.threads,
                    }
                )  # fmt: skip
    return table, facts


def _schedule(
    program: EntryProgram, kernels: KernelSet, code: DeviceCode, target: Target, max_streams: int,
    planner: str, budget_s: float,
) -> Scheduled:  # fmt: skip
    assert program.graph is not None
    assert target.gpu is not None
    mine = {name: code.programs[symbol] for name, symbol in kernels.symbols[program.entry].items()}
    return schedule(program.graph, mine, code.resources, program.rules, target.gpu, max_streams, planner, budget_s)


def _entry(
    program: EntryProgram, plan: Scheduled, programs: Mapping[str, DeviceProgram], offsets: Mapping[str, int]
) -> dict[str, Any]:
    issued = range(len(plan.graph.nodes))  # nodes are in the order of issue
    assert plan.streams.order == tuple(issued)
    buffers = [ArenaBuffer(u.id, min(u.written_by), max(u.accesses) + 1, u.size) for u in plan.uses]
    model = program.model
    entry = entry_manifest(
        plan.graph,
        program.rules,
        buffers,
        plan.arena,
        HostSource("", (), ()),
        offsets,
        Bounds.of(getattr(model, "bounds", {}) or {}),
        tuple(getattr(model, "checks", ()) or ()),
    )
    entry["streams"] = {
        "count": plan.streams.streams,
        "events": plan.streams.events,
        "steps": [[s.what, s.stream, s.index] for s in plan.streams.steps],
        "tasks": [[t.seconds, t.share, list(t.after)] for t in plan.tasks],
    }
    for node, raw in zip(plan.graph.nodes, entry["nodes"]):
        launches = programs[node.kernel].launches if node.kernel != COPY else ()
        raw["launches"] = [[l.kernel, list(l.grid), list(l.block), l.shared_bytes] for l in launches]
    return entry


def _share(entries: Mapping[str, Any]) -> float:
    nodes = [n for e in entries.values() for n in e["nodes"]]
    matrix = sum(n["flops"] for n in nodes if n["rule"].removeprefix("tuned:") in MATRIX_RULES)
    return float(matrix / max(1, sum(n["flops"] for n in nodes)))


def _unscheduled(programs: Sequence[EntryProgram], kernels: KernelSet) -> dict[str, Unscheduled]:
    """By symbol; nothing for programs that come without their unscheduled kernels."""
    found = {}
    for program in programs:
        if program.unscheduled is not None:
            for name, symbol in kernels.symbols[program.entry].items():
                found[symbol] = Unscheduled(program.unscheduled[name], program.rules.get(name, ""))
    return found


def _with_rules(program: EntryProgram, kernels: KernelSet, code: DeviceCode) -> EntryProgram:
    """The program with the rules that made its kernels in the end."""
    changed = {n: code.rules[s] for n, s in kernels.symbols[program.entry].items() if s in code.rules}
    return dataclasses.replace(program, rules={**program.rules, **changed}) if changed else program


def _functions(program: EntryProgram) -> dict[str, Any]:
    assert program.graph is not None
    return {name: program.mod[name] for name in sorted({n.kernel for n in program.graph.nodes} - {COPY})}


def _rules(program: EntryProgram) -> dict[str, str]:
    return {name: program.rules.get(name, "") for name in _functions(program)}
