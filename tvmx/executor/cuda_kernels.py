"""Scheduled PrimFuncs → machine code and PTX, several compilers at once; plainer schedules for what does not lower."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmx.cuda.images import Image, compile_image
from tvmx.cuda.lower import DeviceProgram, lower_kernel
from tvmx.cuda.nvcc import Resources, cuda_compiler
from tvmx.errors import CompileError
from tvmx.schedule.registry import Scheduled, apply_rule, rules_for
from tvmx.schedule.workload import Workload
from tvmx.target import Target

log = logging.getLogger(__name__)

MAX_GRID_X, MAX_GRID_YZ, MAX_THREADS = 2**31 - 1, 65535, 1024


@dataclass(frozen=True)
class Unscheduled:
    """A kernel before scheduling, and the rule whose schedule it got."""

    func: Any  # PrimFunc
    rule: str


@dataclass(frozen=True)
class DeviceCode:
    """Every distinct kernel of a library, lowered and compiled, by the symbol of its PrimFunc.

    `rules` are those of kernels that got another schedule than they came with.
    """

    programs: dict[str, DeviceProgram]
    images: dict[str, Image]
    rules: dict[str, str]
    seconds: dict[str, float]

    @property
    def resources(self) -> dict[str, Resources]:
        """By kernel of the device."""
        return {r.kernel: r for i in self.images.values() for r in i.cubin.kernels}


def compile_device(
    funcs: Mapping[str, Any],
    unscheduled: Mapping[str, Unscheduled],
    target: Target,
    jobs: int,
    source_folder: Path | None = None,
) -> DeviceCode:
    """Lower every kernel and compile it, `jobs` compilers at a time. Raises CompileError naming the kernel.

    `unscheduled` holds what to schedule anew for kernels that do not lower as they are.
    """
    began = time.perf_counter()
    lowering = 0.0
    programs: dict[str, DeviceProgram] = {}
    rules: dict[str, str] = {}
    waiting: dict[str, Any] = {}
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        try:
            for symbol, func in funcs.items():
                before = time.perf_counter()
                program = programs[symbol] = _lowered(symbol, func, unscheduled.get(symbol), target, rules)
                lowering += time.perf_counter() - before
                if source_folder is not None:
                    source_folder.mkdir(parents=True, exist_ok=True)
                    (source_folder / f"{symbol}.cu").write_text(program.source)
                waiting[symbol] = pool.submit(compile_image, program.source, arch_of(target), symbol)
            images = {}
            for symbol, done in waiting.items():
                try:
                    images[symbol] = done.result()
                except CompileError as error:
                    if unscheduled.get(symbol) is None or cuda_compiler() is None:
                        raise
                    found = _replacement(symbol, unscheduled[symbol], target, error)
                    programs[symbol], rules[symbol], images[symbol] = found
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return DeviceCode(programs, images, rules, {"lower": lowering, "compile": time.perf_counter() - began - lowering})


def arch_of(target: Target) -> str:
    """What the device code is compiled for: "sm_80"."""
    assert target.gpu is not None, "a CUDA target"
    return f"sm_{target.gpu.sm}"


def _lowered(symbol: str, func: Any, plain: Unscheduled | None, target: Target, rules: dict[str, str]) -> DeviceProgram:
    """The kernel's launches; a plainer schedule's, noted in `rules`, where its own does not lower."""
    try:
        return _launchable(lower_kernel(func, target, symbol), target)
    except CompileError as error:
        if plain is None:
            raise
        program, rules[symbol] = next(_lower_others(symbol, plain, target, error))
        return program


def _replacement(
    symbol: str, plain: Unscheduled, target: Target, error: CompileError
) -> tuple[DeviceProgram, str, Image]:
    """Program, rule and image of a kernel that the CUDA compiler refuses under its own schedule."""
    for program, rule in _lower_others(symbol, plain, target, error):
        try:
            return program, rule, compile_image(program.source, arch_of(target), symbol)
        except CompileError as also:
            log.debug("kernel %s: %s does not compile either: %s", symbol, rule, also)
    raise error


def _lower_others(
    symbol: str, plain: Unscheduled, target: Target, error: CompileError
) -> Iterator[tuple[DeviceProgram, str]]:
    """What lowers under other rules, best first; raises `error` in the end."""
    for other in _others(plain, target):
        try:
            program = _launchable(lower_kernel(other.func, target, symbol), target)
        except CompileError as also:
            log.debug("kernel %s: %s does not lower either: %s", symbol, other.rule, also)
            continue
        log.warning(
            "kernel %s: its schedule %s cannot be built (%s); %s takes its place, which may be slower",
            symbol, plain.rule, error, other.rule,
        )  # fmt: skip
        yield program, other.rule
    raise error


def _launchable(program: DeviceProgram, target: Target) -> DeviceProgram:
    """The program itself; raises CompileError for a launch that no device takes."""
    gpu = target.gpu
    assert gpu is not None, "a CUDA target"
    for launch in program.launches:
        x, y, z = launch.grid
        if min(x, y, z) < 1 or x > MAX_GRID_X or max(y, z) > MAX_GRID_YZ or launch.threads > MAX_THREADS:
            raise CompileError(f"{launch.kernel}: no GPU launches {launch.grid} blocks of {launch.block} threads")
        if launch.shared_bytes > gpu.shared_bytes_per_block:
            raise CompileError(
                f"{launch.kernel} needs {launch.shared_bytes} bytes of shared memory a block; {gpu.model} has "
                f"{gpu.shared_bytes_per_block}"
            )
    return program


def _others(plain: Unscheduled, target: Target) -> Iterator[Scheduled]:
    """What other rules make of a kernel, best first."""
    for rule in rules_for(Workload.of(plain.func), target):
        if rule.name == plain.rule.removeprefix("tuned:") and not plain.rule.startswith("tuned:"):
            continue
        try:
            yield apply_rule(rule, plain.func, target)
        except Exception as error:  # each primitive has errors of its own; the next rule has its turn
            log.debug("schedule rule %s refused: %s", rule.name, error)
