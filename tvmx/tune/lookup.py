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
    """The user's logs and the shipped ones, asked in that order."""

    logs: tuple[TuningLog, ...]
    shipped: tuple[TuningLog, ...] = ()

    def best(self, workload: str, target: Target, default_hash: str) -> Verdict | None:
        """The first log's winner over the default of that hash. A shipped one must fit the machine's caches too."""
        for log in self.logs:
            if found := log.best(workload, target, default_hash):
                return found
        for log in self.shipped:
            found = log.best(workload, target, default_hash)
            if found is not None and same_caches(found, target):
                return found
        return None

    def outdated(self, workload: str, target: Target, default_hash: str) -> bool:
        """Whether the user's own logs hold winners over other defaults only. (Shipped ones age by themselves.)"""
        return any(log.outdated(workload, target, default_hash) for log in self.logs)

    def workload(self, workload: str) -> Any:
        every = (*self.logs, *self.shipped)
        return next((found for log in every if (found := log.workload(workload)) is not None), None)


def same_caches(record: Verdict, target: Target) -> bool:
    """Whether first- and second-level caches are as large as where the record was measured.

    Instruction set and thread count say little about a core; its caches tell one design from the other.
    """
    return all(record.target.get(name) == getattr(target, name) for name in ("l1_bytes", "l2_bytes"))


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
    ours = shipped_folders(target) if shipped else []
    return Logs(tuple(logs), tuple(TuningLog(f, readonly=True) for f in ours))


def shipped_folders(target: Target | None = None) -> list[Path]:
    """The log folders that ship with tvmx: one per instruction set level."""
    import importlib.resources

    try:
        root = Path(str(importlib.resources.files("tvmx_tuning_logs")))
    except ModuleNotFoundError:
        return []
    names = sorted(p.parent.name for p in root.glob(f"*/{RECORDS}"))
    return [root / n for n in names if target is None or n == target_class(target)]
