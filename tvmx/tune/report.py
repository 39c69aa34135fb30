"""What a tuning session reports at its end."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from tvmx.tune.progress import Progress


@dataclass(frozen=True)
class TuneReport:
    """What a session did. `progress.tasks` holds each task's default and best latency."""

    log: str
    progress: Progress
    new_trials: int
    failed: dict[str, int]  # status → trials
    confirmed: int  # tasks with a winner
    interrupted: bool
    seconds: float
    spent: dict[str, float]  # seconds by activity: search, build, run
    predicted: int = 0  # candidates that only a model has seen, for want of a device
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        tasks = [{**dataclasses.asdict(t), "speedup": t.speedup} for t in self.progress.tasks]
        return {
            "log": self.log,
            "new_trials": self.new_trials,
            "failed": self.failed,
            "confirmed": self.confirmed,
            "interrupted": self.interrupted,
            "predicted": self.predicted,
            "note": self.note,
            "seconds": self.seconds,
            "spent": self.spent,
            "default_total_s": self.progress.default_total_s,
            "total_s": self.progress.total_s,
            "tasks": tasks,
        }

    def __str__(self) -> str:
        p = self.progress
        if self.note:
            return (
                f"{self.note}: nothing was measured\n{self.predicted} candidates of {len(p.tasks)} kernels built and "
                f"ranked by prediction in {self.seconds:.0f} s; no schedule changes by that\nlog: {self.log}\n"
                "to measure, write them into a bundle (--offline bundle.tar) or name a measuring server (--rpc)"
            )
        failed = ", ".join(f"{n} {status}" for status, n in sorted(self.failed.items())) or "none"
        spent = ", ".join(f"{k} {v:.0f} s" for k, v in self.spent.items())
        kernels = f"{p.default_total_s * 1e3:.3f} -> {p.total_s * 1e3:.3f} ms ({p.speedup:.2f}x)"
        lines = [
            f"{self.new_trials} trials in {self.seconds:.0f} s ({spent}); failed: {failed}",
            f"{self.confirmed} of {len(p.tasks)} kernels have a confirmed faster schedule; all kernels {kernels}",
            f"log: {self.log}",
        ]
        if self.interrupted:
            lines.append("interrupted: everything measured is in the log; the same command goes on from there")
        return "\n".join(lines)
