"""Kernels whose schedule is fine by TVM's schedule primitives and fails in lowering or in LLVM: a plainer schedule.

A rule that raises gives way to the next one while scheduling (`registry.apply_default`). What fails only when the
kernel is built is found here: the catch-all takes its place, and where that fails too, the kernel as lowered, serial.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from tvmx.errors import CompileError
from tvmx.schedule.build import build_module
from tvmx.schedule.registry import Scheduled, apply_rule, rules_for
from tvmx.schedule.workload import Workload
from tvmx.target import Target

log = logging.getLogger(__name__)

UNSCHEDULED = "unscheduled"


def build_error(name: str, func: Any, tvm_target: Any) -> str | None:
    """Why TVM or LLVM cannot build a kernel, in one line; None when they can."""
    import tvm

    try:
        build_module(tvm.IRModule({name: func}), tvm_target)
    except Exception as error:  # TVM raises whatever its C++ side threw
        lines = str(error).strip().splitlines()
        return lines[-1] if lines else type(error).__name__
    return None


def plainer(name: str, func: Any, failed_rule: str, target: Target, reason: str) -> Scheduled:
    """The first plainer schedule of an unscheduled PrimFunc that builds, with a warning naming kernel and rule.

    `func` has its global symbol. Raises CompileError when none builds.
    """
    tvm_target = target.tvm()
    for candidate in _candidates(func, failed_rule, target):
        found = build_error(name, candidate.func, tvm_target)
        if found is None:
            log.warning(
                "kernel %s: its schedule %s cannot be built (%s); %s takes its place, which may be slower",
                name, failed_rule or "(unknown)", reason, candidate.rule,
            )  # fmt: skip
            return candidate
        log.debug("kernel %s: %s cannot be built either: %s", name, candidate.rule, found)
    raise CompileError(does_not_compile(name, reason))


def does_not_compile(name: str, reason: str) -> str:
    """The error of a kernel that nothing can build."""
    return f"kernel {name} does not compile: {reason}; please report it with the model, or compile for another target"


def _candidates(func: Any, failed_rule: str, target: Target) -> Iterator[Scheduled]:
    """The catch-all rules, best first, then the kernel as it is."""
    for rule in rules_for(Workload.of(func), target):
        if rule.priority >= 0 or rule.name == failed_rule:
            continue
        try:
            yield apply_rule(rule, func, target)
        except Exception as error:  # each primitive has errors of its own; the next one has its turn
            log.debug("schedule rule %s refused: %s", rule.name, error)
    yield Scheduled(func, UNSCHEDULED, None)
