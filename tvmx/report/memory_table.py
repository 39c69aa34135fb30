"""Planners side by side as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from tvmx.errors import PlanError
from tvmx.memory import Problem, Solution


def load_problem(path: str | Path, entry: str | None = None) -> Problem:
    """The problem in a CSV, or the one that a compiled `.so` was planned for.

    Raises PlanError for a CSV that cannot be read or a `.so` whose sizes are symbolic, ArtifactError for a bad `.so`.
    """
    if Path(path).suffix == ".csv":
        return Problem.from_csv(path)
    from tvmx.runtime.arena import to_problem
    from tvmx.runtime.artifact import read_artifact

    entries = read_artifact(path).manifest.entries
    chosen = entries[entry] if entry in entries else next(iter(entries.values()))

    def size(value: int | str) -> int:
        if isinstance(value, str):
            raise PlanError(f"{path} has symbolic shapes and is planned at run time; give a CSV of one shape instead")
        return value

    return to_problem(chosen.arena.buffers, size)


class Progress:
    """Follows `compare`: keeps the plans that are done, and writes a line on the one at work to a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.done: list[Solution] = []

    def __call__(self, name: str, solution: Solution | None) -> None:
        if solution is not None:
            self.done.append(solution)
        if self.stream.isatty():
            text = f"{name} …" if solution is None else ""
            self.stream.write(f"\r\x1b[K{text}")
            self.stream.flush()


def table(solutions: Sequence[Solution]) -> str:
    """A line a solution: height, how far from the lower bound, seconds, whether the search was cut short."""
    lines = [f"{'planner':12}{'bytes':>16}{'lower bound':>16}{'ratio':>8}{'seconds':>9}"]
    for s in solutions:
        ratio = s.height / s.lower_bound if s.lower_bound else 1.0
        cut = "  truncated" if s.truncated else ""
        lines.append(f"{s.planner:12}{s.height:16,}{s.lower_bound:16,}{ratio:8.3f}{s.seconds:9.3f}{cut}")
    return "\n".join(lines)
