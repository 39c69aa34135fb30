"""Registry of schedule rules: one body is the untuned default and the tuning space.

A rule is `f(sch, target) -> None` over `tvm.s_tir.Schedule`. It draws its decisions with
`sch.sample_*(..., decision=<what the analytical model chose>)`: replaying the given decisions is the default,
sampling others is the MetaSchedule space.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvmx.schedule.workload import Workload
from tvmx.target import Target

log = logging.getLogger(__name__)

Body = Callable[[Any, Target], None]


@dataclass(frozen=True)
class Rule:
    """One registered schedule; `match` sees the workload, `when` the target. Higher `priority` is tried first."""

    name: str
    body: Body
    match: Callable[[Workload], bool]
    when: Callable[[Target], bool]
    priority: int


@dataclass(frozen=True)
class Scheduled:
    """A scheduled PrimFunc, the rule that made it, and the schedule's trace."""

    func: Any
    rule: str
    trace: Any


_RULES: list[Rule] = []


def schedule_rule(
    name: str,
    match: Callable[[Workload], bool],
    when: Callable[[Target], bool] = lambda target: True,
    priority: int = 0,
) -> Callable[[Body], Body]:
    """Register a schedule rule. `name` must be unique; a catch-all has a negative priority."""

    def register(body: Body) -> Body:
        assert all(rule.name != name for rule in _RULES), f"schedule rule {name!r} registered twice"
        _RULES.append(Rule(name, body, match, when, priority))
        return body

    return register


def rules_for(workload: Workload, target: Target) -> list[Rule]:
    """The rules that claim `workload` on `target`, best first."""
    importlib.import_module("tvmx_schedules")  # registers ours
    found = [r for r in _RULES if r.when(target) and r.match(workload)]
    return sorted(found, key=lambda rule: -rule.priority)


def apply_rule(rule: Rule, func: Any, target: Target) -> Scheduled:
    """Run one rule on a PrimFunc. Raises what the schedule raises."""
    import tvm
    from tvm.s_tir import Schedule

    sch = Schedule(tvm.IRModule({"main": func}), debug_mask="none")
    rule.body(sch, target)
    result = sch.mod["main"]
    if func.attrs is not None and "global_symbol" in func.attrs:
        result = result.with_attr("global_symbol", func.attrs["global_symbol"])
    return Scheduled(result, rule.name, sch.trace)


def apply_default(func: Any, target: Target) -> Scheduled:
    """Schedule a PrimFunc with the first rule that can. There always is one: the last leaves it as it is."""
    for rule in rules_for(Workload.of(func), target):
        try:
            return apply_rule(rule, func, target)
        except Exception as error:  # each primitive has errors of its own; the next rule has its turn
            reason = str(error).strip().splitlines()
            log.warning("schedule rule %s refused: %s", rule.name, reason[-1] if reason else error)
    return Scheduled(func, "unscheduled", None)
