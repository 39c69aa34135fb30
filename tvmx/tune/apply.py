"""Schedule every kernel of a lowered module: a tuning log's confirmed winner, else the default."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from tvmx.schedule import Scheduled, apply_default
from tvmx.target import Target
from tvmx.tune.lookup import open_logs
from tvmx.tune.trace import replay
from tvmx.tune.workload import canonical, workload_hash

__all__ = ["apply_schedules", "is_scheduled", "open_logs", "schedule_hash"]

logger = logging.getLogger(__name__)


class Winner(Protocol):
    """What a look-up finds: a schedule that beat the default."""

    @property
    def rule(self) -> str: ...
    @property
    def trace(self) -> Any: ...


class Lookup(Protocol):
    """A source of confirmed schedules, such as `tvmx.tune.log.TuningLog`."""

    def best(self, workload: str, target: Target, default_hash: str) -> Winner | None: ...
    def outdated(self, workload: str, target: Target, default_hash: str) -> bool: ...
    def workload(self, workload: str) -> Any: ...


def apply_schedules(mod: Any, target: Target, log: Lookup | None = None) -> tuple[Any, dict[str, str]]:
    """Schedule the PrimFuncs of a lowered, unscheduled IRModule.

    Returns the new module and, for each kernel's name, the rule that scheduled it: `"cpu.matmul"`
    for a default, `"tuned:cpu.matmul"` for a winner that replays from `log`. A winner that no
    longer replays, or that beat another default than today's, gives way to the default; one warning counts these.
    """
    import tvm

    updates: dict[Any, Any] = {}
    rules: dict[str, str] = {}
    outdated = 0
    for var, func in mod.functions.items():
        if not isinstance(func, tvm.tirx.PrimFunc) or is_scheduled(func):
            continue
        scheduled = apply_default(func, target)
        if log is not None:
            tuned = _tuned(func, scheduled, target, log)
            outdated += tuned is None and log.outdated(workload_hash(func), target, schedule_hash(scheduled.func))
            scheduled = tuned or scheduled
        updates[var] = scheduled.func.with_attr("tirx.is_scheduled", True)
        rules[var.name_hint] = scheduled.rule
    if outdated:
        logger.warning(
            "%d tuned schedules beat other defaults than today's, and the defaults are used; "
            "run `tvmx tune` again to compare them", outdated,
        )  # fmt: skip
    out = tvm.IRModule({v: updates.get(v, f) for v, f in mod.functions.items()}, attrs=mod.attrs)
    return out, rules


def is_scheduled(func: Any) -> bool:
    """Whether a PrimFunc carries TVM's own mark of a finished schedule."""
    return func.attrs is not None and bool(func.attrs.get("tirx.is_scheduled", False))


def schedule_hash(func: Any) -> str:
    """16 hex digits: identity of a scheduled PrimFunc, whatever its name."""
    return workload_hash(func)


def _tuned(func: Any, default: Scheduled, target: Target, source: Lookup) -> Scheduled | None:
    key = workload_hash(func)
    winner = source.best(key, target, schedule_hash(default.func))
    if winner is None:
        return None
    try:
        # Traces find blocks by name, and only the stored workload is sure to have the same names.
        stored = source.workload(key)
        result = replay(stored if stored is not None else canonical(func), winner.trace)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        name = str(func.attrs.get("global_symbol", key)) if func.attrs is not None else key
        logger.warning("%s: its tuned schedule no longer replays (%s); using the default", name, reason[-1])
        return None
    result = result.without_attr("global_symbol")
    for attr, value in (func.attrs or {}).items():
        result = result.with_attr(attr, value)
    return Scheduled(result, f"tuned:{winner.rule}", winner.trace)
