"""Scheduled PrimFuncs → object files, several at a time."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmx.errors import CompileError
from tvmx.executor.in_place import InPlace, read_from_outputs
from tvmx.schedule.build import build_module
from tvmx.target import Target

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KernelSet:
    """Kernels with unique symbols, and per entry what each of its kernels is called in the library."""

    funcs: dict[str, Any]  # symbol -> PrimFunc
    symbols: dict[str, dict[str, str]]  # entry -> kernel name in the graph -> symbol

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
    symbols: dict[str, dict[str, str]] = {}
    for entry, kernels, in_place in programs:
        names = symbols.setdefault(entry, {})
        for name, func in kernels.items():
            bare = func.without_attr("global_symbol") if _has(func, "global_symbol") else func
            if name in in_place:
                use = in_place[name]
                shared = None if use is None else read_from_outputs(bare, use.n_inputs, use.pairs)
                bare = bare.with_attr("tirx.noalias", False) if shared is None else shared
            candidates = by_hash.setdefault(structural_hash(bare), [])
            found = next((s for s, f in candidates if structural_equal(f, bare)), None)
            if found is None:
                found = _unique(name, entry, funcs)
                funcs[found] = bare.with_attr("global_symbol", found)
                candidates.append((found, bare))
            names[name] = found
    return KernelSet(funcs, symbols)


def compile_kernels(funcs: Mapping[str, Any], target: Target, folder: Path, jobs: int) -> list[Path]:
    """Compile kernels to object files in `folder`, `jobs` at a time. Raises CompileError naming the kernel."""
    import tvm

    tvm_target = target.tvm()
    # Many small modules: LLVM's time grows faster than a module's size, and the work spreads evenly.
    # One function without noalias takes the promise from its whole module, so the two kinds never meet.
    strict = {n: f for n, f in funcs.items() if int(f.attrs.get("tirx.noalias", 0))}
    loose = {n: f for n, f in funcs.items() if n not in strict}
    chunks = [c for part in (strict, loose) for c in _chunks(part, max(jobs, min(len(part), 4 * jobs)))]

    def build(index: int) -> Path:
        path = folder / f"kernels{index}.o"
        module = build_module(tvm.IRModule(chunks[index]), tvm_target)
        module.mod.write_to_file(str(path), "o")
        return path

    try:
        if jobs == 1 or len(chunks) == 1:
            return [build(i) for i in range(len(chunks))]
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(build, range(len(chunks))))
    except Exception as error:
        raise _blame(funcs, tvm_target, error) from error


def _blame(funcs: Mapping[str, Any], target: Any, error: Exception) -> CompileError:
    """Find which kernel does not compile, to say so."""
    import tvm

    for name, func in funcs.items():
        try:
            build_module(tvm.IRModule({name: func}), target)
        except Exception as found:
            reason = str(found).strip().splitlines()
            return CompileError(
                f"kernel {name} does not compile: {reason[-1] if reason else found}; "
                "please report it with the model, or compile for another target"
            )
    return CompileError(f"the kernels do not compile together: {error}")


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
