"""Where `compile` looks tuned schedules up: the user's log first, then the logs that ship with tvmx."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmx.errors import TuneError
from tvmx.target import Target
from tvmx.tune.log import RECORDS, TuningLog
from tvmx.tune.record import Verdict, target_class


@dataclass(frozen=True)
class Logs:
    """Several logs, asked in order."""

    logs: tuple[TuningLog, ...]

    def best(self, workload: str, target: Target) -> Verdict | None:
        return next((found for log in self.logs if (found := log.best(workload, target))), None)

    def workload(self, workload: str) -> Any:
        return next((found for log in self.logs if (found := log.workload(workload)) is not None), None)


def open_logs(path: str | Path | None, shipped: bool = True, target: Target | None = None) -> Logs:
    """What `compile` looks schedules up in: the log at `path` first, then the logs that ship with tvmx.

    With a target, only the shipped folder of its class is read. Raises TuneError when `path` holds no log.
    """
    logs = []
    if path is not None:
        folder = Path(path)
        if not (folder / RECORDS).is_file():
            raise TuneError(
                f"no tuning log at {folder}: there is no {RECORDS}; make one with `tvmx tune --log {folder}`"
            )
        logs.append(TuningLog(folder, readonly=True))
    if shipped:
        logs += [TuningLog(f, readonly=True) for f in shipped_folders(target)]
    return Logs(tuple(logs))


def shipped_folders(target: Target | None = None) -> list[Path]:
    """The log folders that ship with tvmx: one per instruction set level."""
    import importlib.resources

    try:
        root = Path(str(importlib.resources.files("tvmx_tuning_logs")))
    except ModuleNotFoundError:
        return []
    names = sorted(p.parent.name for p in root.glob(f"*/{RECORDS}"))
    return [root / n for n in names if target is None or n == target_class(target)]
