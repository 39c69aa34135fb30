"""What a session shows while it runs: a live table on a terminal, a line per round elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO


@dataclass(frozen=True)
class TaskProgress:
    """One row. Times in seconds; None until measured."""

    name: str
    rule: str  # of the winner, or the default's
    occurrences: int
    trials: int
    failed: int
    default_s: float | None
    best_s: float | None
    done: bool
    active: bool

    @property
    def speedup(self) -> float:
        return self.default_s / self.best_s if self.default_s and self.best_s else 1.0


@dataclass(frozen=True)
class Progress:
    """The whole session. `total_s` estimates one run of the model: every kernel's time × its calls."""

    tasks: tuple[TaskProgress, ...]
    trials: int
    max_trials: int
    elapsed_s: float
    time_budget_s: float
    stage: str

    @property
    def default_total_s(self) -> float:
        return sum((t.default_s or 0.0) * t.occurrences for t in self.tasks)

    @property
    def total_s(self) -> float:
        return sum((t.best_s or 0.0) * t.occurrences for t in self.tasks)

    @property
    def speedup(self) -> float:
        return self.default_total_s / self.total_s if self.total_s else 1.0

    @property
    def left_s(self) -> float:
        """Seconds until the budget is spent, at the pace so far."""
        left = max(0.0, self.time_budget_s - self.elapsed_s)
        if self.trials and self.max_trials > 0:
            left = min(left, (self.max_trials - self.trials) * self.elapsed_s / self.trials)
        return max(0.0, left)

    def __str__(self) -> str:
        active = next((t for t in self.tasks if t.active), None)
        what = f" {active.name} {_us(active.best_s)} ({active.speedup:.2f}x)" if active else ""
        return (
            f"[{self.elapsed_s:5.0f} s] {self.trials}/{self.max_trials} trials, kernels "
            f"{self.default_total_s * 1e3:.2f} -> {self.total_s * 1e3:.2f} ms ({self.speedup:.2f}x), "
            f"{self.left_s:.0f} s left; {self.stage}{what}"
        )


class Display:
    """Shows Progress objects. Use as a context manager."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self._live: Any = None
        self._last_line = 0.0

    def __enter__(self) -> Display:
        if self.stream.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self.stream), auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, progress: Progress) -> None:
        if self._live is not None:
            size = self._live.console.size
            self._live.update(table(progress, max(3, min(24, size.height - 8)), size.width), refresh=True)
        elif time.monotonic() - self._last_line > 5 or progress.stage == "done":
            self._last_line = time.monotonic()
            print(progress, file=self.stream, flush=True)


def table(progress: Progress, rows: int = 24, width: int = 120) -> Any:
    """A rich table of `width` columns: the tasks by weight, at most `rows`, and a line of totals."""
    from rich import box
    from rich.table import Table

    fixed = ("calls", "trials", "failed", "default", "best", "speed-up")
    room = width - 59  # of the columns above
    schedule = 24 if room >= 48 else 0
    out = Table(title=progress.stage, caption=_totals(progress), box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    out.add_column("task", no_wrap=True)
    for name in fixed:
        out.add_column(name, justify="right", no_wrap=True)
    if schedule:
        out.add_column("schedule", no_wrap=True)
    ordered = sorted(progress.tasks, key=lambda t: (not t.active, -(t.default_s or 0.0) * t.occurrences))
    for t in ordered[:rows]:
        mark = "▶ " if t.active else "✓ " if t.done else "  "
        name = _cut(t.name.removeprefix("fused_"), max(8, room - schedule - 4))
        cells = (mark + name, str(t.occurrences), str(t.trials), str(t.failed), _us(t.default_s), _us(t.best_s))
        last = (_cut(t.rule, schedule),) if schedule else ()
        out.add_row(*cells, f"{t.speedup:.2f}x", *last, style="bold" if t.active else None)
    if len(ordered) > rows:
        out.add_row(f"  … {len(ordered) - rows} more", *[""] * (len(out.columns) - 1))
    return out


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _totals(p: Progress) -> str:
    return (
        f"{p.trials}/{p.max_trials} trials · all kernels {p.default_total_s * 1e3:.3f} → {p.total_s * 1e3:.3f} ms "
        f"({p.speedup:.2f}x) · {p.elapsed_s:.0f} s, {p.left_s:.0f} s left"
    )


def _us(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
