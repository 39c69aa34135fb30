"""Scheduled PrimFuncs → object files, several at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tvmx.errors import CompileError
from tvmx.executor.in_place import InPlace, read_from_outputs
from tvmx.schedule.build import build_objects
from tvmx.schedule.fallback import build_error, does_not_compile
from tvmx.target import Target

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KernelSet:
    """Kernels with unique symbols, and per entry what each of its kernels is called in the library."""

    funcs: dict[str, Any]  # symbol -> PrimFunc
    symbols: dict[str, dict[str, str]]  # entry -> kernel name in the graph -> symbol
    uses: dict[str, InPlace | None]  # symbol -> what it overwrites, where it overwrites anything

    def with_funcs(self, funcs: Mapping[str, Any]) -> KernelSet:
        """The same kernels, some by other schedules."""
        return replace(self, funcs={**self.funcs, **funcs})

    def prepared(self, symbol: str, func: Any) -> Any:
        """Another form of a kernel, made ready for the library as the first one was."""
        return _prepared(func, symbol in self.uses, self.uses.get(symbol)).with_attr("global_symbol", symbol)

    @property
    def parallel(self) -> frozenset[str]:
        """Symbols of the kernels that hold a parallel loop."""
        return frozenset(s for s, f in self.funcs.items() if _is_parallel(f))


def collect(
    programs: Sequence[tuple[str, Mapping[str, Any], Mapping[str, InPlace | None]]],
) -> KernelSet:
    """Gather kernels, given as (entry, kernel name → PrimFunc, kernel name → what it overwrites); equal ones are one.

    None is for a kernel that runs in place at some calls only. It loses `noalias`, as one does whose input cannot be
    read through the output: the compiler may otherwise reorder its loads and stores.
    """
    from tvm_ffi import structural_equal, structural_hash

    by_hash: dict[int, list[tuple[str, Any]]] = {}
    funcs: dict[str, Any] = {}
    uses: dict[str, InPlace | None] = {}
    symbols: dict[str, dict[str, str]] = {}
    for entry, kernels, in_place in programs:
        names = symbols.setdefault(entry, {})
        for name, func in kernels.items():
            bare = _prepared(func, name in in_place, in_place.get(name))
            candidates = by_hash.setdefault(structural_hash(bare), [])
            found = next((s for s, f in candidates if structural_equal(f, bare)), None)
            if found is None:
                found = _unique(name, entry, funcs)
                funcs[found] = bare.with_attr("global_symbol", found)
                if name in in_place:
                    uses[found] = in_place[name]
                candidates.append((found, bare))
            names[name] = found
    return KernelSet(funcs, symbols, uses)


def _prepared(func: Any, in_place: bool, use: InPlace | None) -> Any:
    """A kernel without its name, reading what it overwrites through its output."""
    bare = func.without_attr("global_symbol") if _has(func, "global_symbol") else func
    if not in_place:
        return bare
    shared = None if use is None else read_from_outputs(bare, use.n_inputs, use.pairs)
    return bare.with_attr("tirx.noalias", False) if shared is None else shared


def compile_kernels(
    funcs: Mapping[str, Any],
    target: Target,
    folder: Path,
    jobs: int,
    plainer: Callable[[str, str], Any] | None = None,
) -> tuple[list[Path], dict[str, Any]]:
    """Compile kernels to object files in `folder`, `jobs` at a time; returns them and the kernels that were replaced.

    `plainer(symbol, reason)` gives another PrimFunc for one that does not build; it raises CompileError when there is
    none, as this does without it.
    """
    import tvm

    tvm_target = target.tvm()
    # Many small modules: LLVM's time grows faster than a module's size, and the work spreads evenly.
    # One function without noalias takes the promise from its whole module, so the two kinds never meet.
    strict = {n: f for n, f in funcs.items() if int(f.attrs.get("tirx.noalias", 0))}
    loose = {n: f for n, f in funcs.items() if n not in strict}
    chunks = [c for part in (strict, loose) for c in _chunks(part, max(jobs, min(len(part), 4 * jobs)))]

    def write(index: int, chunk: Mapping[str, Any]) -> list[Path]:
        return build_objects(tvm.IRModule(dict(chunk)), tvm_target, folder / f"kernels{index}.o")

    def build(index: int) -> tuple[list[Path], dict[str, Any]]:
        try:
            return write(index, chunks[index]), {}
        except Exception as error:  # TVM raises whatever its C++ side threw
            log.debug("kernels %s do not compile", list(chunks[index]), exc_info=True)
            others = _replacements(chunks[index], tvm_target, plainer, error)
        try:
            return write(index, {**chunks[index], **others}), others
        except Exception as error:
            raise CompileError(f"the kernels {list(chunks[index])} do not compile together: {error}") from error

    if jobs == 1 or len(chunks) == 1:
        built = [build(i) for i in range(len(chunks))]
    else:
        with ThreadPoolExecutor(jobs) as pool:
            built = list(pool.map(build, range(len(chunks))))
    replaced = {name: func for _, others in built for name, func in others.items()}
    return [path for paths, _ in built for path in paths], replaced


def _replacements(
    chunk: Mapping[str, Any], target: Any, plainer: Callable[[str, str], Any] | None, error: Exception
) -> dict[str, Any]:
    """Another PrimFunc for each kernel of a chunk that does not build by itself."""
    reasons = {name: build_error(name, func, target) for name, func in chunk.items()}
    failing = {name: reason for name, reason in reasons.items() if reason is not None}
    if not failing:
        raise CompileError(f"the kernels {list(chunk)} do not compile together: {error}") from error
    if plainer is None:
        name, reason = next(iter(failing.items()))
        raise CompileError(does_not_compile(name, reason)) from error
    return {name: plainer(name, reason) for name, reason in failing.items()}


def _chunks(funcs: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    chunks: list[dict[str, Any]] = [{} for _ in range(max(1, count))]
    for index, (name, func) in enumerate(funcs.items()):
        chunks[index % len(chunks)][name] = func
    return [c for c in chunks if c]


def _unique(name: str, entry: str, taken: Mapping[str, Any]) -> str:
    # `main` would clash with the library's default entry symbol.
    wanted = name if name not in taken and name != "main" else f"{entry}_{name}"
    count = 1
    while wanted in taken:
        wanted, count = f"{entry}_{name}_{count}", count + 1
    return wanted


def _has(func: Any, attr: str) -> bool:
    return func.attrs is not None and attr in func.attrs


def _is_parallel(func: Any) -> bool:
    from tvm.tirx import For

    from tvmx.schedule.tir import walk

    found: list[bool] = []
    walk(func, For, lambda loop: found.append(True) if int(loop.kind) == 1 else None)
    return bool(found)
