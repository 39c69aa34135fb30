"""A stream plan as a picture: time → right, a row a stream, a rectangle a kernel, an arrow where a stream waits.

Times are the compiler's estimates, run through its simulator.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from tvmx.cuda.survey import MATRIX_RULES
from tvmx.errors import PlanError
from tvmx.executor.streams import Step, StreamPlan, Task, Timeline, lower_bound, simulate
from tvmx.report.files import write_text
from tvmx.runtime.artifact import read_artifact
from tvmx.runtime.manifest import Entry

ROW, GAP, LEFT, RIGHT, TOP, BOTTOM = 34, 14, 76, 24, 64, 34
FONT = 10
CHARACTER = 0.61 * FONT  # mean width of a character
MATRIX, OTHER, ARROW = "#4c78a8", "#b8c4ce", "#c44e52"


def draw_timeline(artifact_path: str | os.PathLike[str], svg_path: str | os.PathLike[str]) -> None:
    """Draw how each entry of a CUDA library is spread over streams.

    Raises ArtifactError for a damaged file, PlanError for a library that is for no GPU.
    """
    manifest = read_artifact(artifact_path).manifest
    if manifest.executor != "cuda":
        raise PlanError(f"{artifact_path} was built for {manifest.target}, which has no streams to draw")
    parts, height, width = [], 0, 0
    for name, entry in manifest.entries.items():
        drawing = _Drawing(f"{Path(artifact_path).name}, entry {name}, {manifest.target}", entry)
        parts += [f'<g transform="translate(0 {height})">', *drawing.lines(), "</g>"]
        height += drawing.height
        width = max(width, drawing.width)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="{FONT}">'
    )
    mark = (
        '<defs><marker id="tip" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="5" markerHeight="5" orient="auto">'
        f'<path d="M0,0 L6,3 L0,6 z" fill="{ARROW}"/></marker></defs>'
    )
    background = '<rect width="100%" height="100%" fill="white"/>'
    write_text(Path(svg_path), "\n".join([head, mark, background, *parts, "</svg>", ""]))


def plan_of(entry: Entry) -> tuple[list[Task], StreamPlan]:
    """Tasks and stream plan, as the manifest keeps them."""
    if entry.streams is None:
        raise PlanError(f"entry {entry.name!r} has no stream plan")
    tasks = [Task(n.op or n.kernel, s, share, after) for n, (s, share, after) in zip(entry.nodes, entry.streams.tasks)]
    steps = tuple(Step(what, stream, index) for what, stream, index in entry.streams.steps)  # type: ignore[arg-type]
    return tasks, StreamPlan(entry.streams.count, entry.streams.events, steps)


class _Drawing:
    def __init__(self, title: str, entry: Entry) -> None:
        self.title, self.entry = title, entry
        self.tasks, self.plan = plan_of(entry)
        self.line: Timeline = simulate(self.tasks, self.plan)
        self.span = self.line.makespan or 1e-6
        plot = min(max(960.0, 9.0 * len(self.tasks)), 6000.0)
        self.width = round(LEFT + plot + RIGHT)
        self.height = TOP + self.plan.streams * (ROW + GAP) + BOTTOM
        self.per_second = plot / self.span

    def x(self, seconds: float) -> float:
        return LEFT + seconds * self.per_second

    def y(self, stream: int) -> float:
        return TOP + stream * (ROW + GAP)

    def lines(self) -> list[str]:
        serial = sum(t.seconds for t in self.tasks)
        bound = lower_bound(self.tasks, self.plan.streams)
        facts = (
            f"{len(self.tasks)} kernels on {self.plan.streams} stream(s), {self.plan.events} events; estimated "
            f"{self.span * 1e6:.1f} µs, one stream {serial * 1e6:.1f} µs, lower bound {bound * 1e6:.1f} µs"
        )
        out = [
            f'<text x="{LEFT}" y="20" font-size="13" font-weight="bold">{escape(self.title)}</text>',
            f'<text x="{LEFT}" y="36">{escape(facts)}</text>',
            f'<rect x="{LEFT}" y="43" width="10" height="10" fill="{MATRIX}"/>'
            f'<text x="{LEFT + 14}" y="52">Tensor Cores</text>'
            f'<rect x="{LEFT + 100}" y="43" width="10" height="10" fill="{OTHER}"/>'
            f'<text x="{LEFT + 114}" y="52">other kernels</text>'
            f'<text x="{LEFT + 204}" y="52" fill="{ARROW}">→ waits for an event</text>',
        ]
        for stream in range(self.plan.streams):
            middle = self.y(stream) + ROW / 2 + 4
            out.append(f'<text x="{LEFT - 8}" y="{middle:.1f}" text-anchor="end">stream {stream}</text>')
            out.append(
                f'<line x1="{LEFT}" x2="{self.width - RIGHT}" y1="{self.y(stream) + ROW:.1f}" '
                f'y2="{self.y(stream) + ROW:.1f}" stroke="#e4e4e4"/>'
            )
        on = self.plan.stream_of
        out += [self._box(i, on[i]) for i in range(len(self.tasks))]
        return [*out, *self._arrows(on), *self._axis()]

    def _box(self, index: int, stream: int) -> str:
        task, node = self.tasks[index], self.entry.nodes[index]
        left, wide = self.x(self.line.starts[index]), (self.line.ends[index] - self.line.starts[index])
        width = max(0.8, wide * self.per_second - 0.6)
        matrix = node.rule.removeprefix("tuned:") in MATRIX_RULES
        room = int((width - 6) / CHARACTER)
        label = task.name if len(task.name) <= room else task.name[: room - 1] + "…"
        if room < 8:  # a few letters tell less than the kernel's number in `tvmx inspect`
            label = str(index) if len(str(index)) <= room else ""
        tip = (
            f"{index}: {task.name}\n{self.line.starts[index] * 1e6:.1f} to {self.line.ends[index] * 1e6:.1f} µs, fills "
            f"{task.share:.0%} of the GPU\n{node.rule}, {node.flops / 1e6:.1f} MFLOP"
        )
        text = (
            f'<text x="{left + 3:.1f}" y="{self.y(stream) + ROW / 2 + 4:.1f}" fill="{"white" if matrix else "black"}">'
            f"{escape(label)}</text>"
        )
        return (
            f'<g><title>{escape(tip)}</title><rect x="{left:.2f}" y="{self.y(stream):.1f}" width="{width:.2f}" '
            f'height="{ROW}" rx="1.5" fill="{MATRIX if matrix else OTHER}"/>{text if label else ""}</g>'
        )

    def _arrows(self, on: dict[int, int]) -> list[str]:
        """From the end of what an event marks to the begin of what waits for it."""
        out = []
        last: dict[int, float] = {}
        recorded: dict[int, tuple[int, float]] = {}
        waiting: dict[int, list[int]] = {}
        for step in self.plan.steps:
            if step.what == "record":
                recorded[step.index] = step.stream, last.get(step.stream, 0.0)
            elif step.what == "wait":
                waiting.setdefault(step.stream, []).append(step.index)
            else:
                out += [self._arrow(*recorded[e], step.stream, step.index) for e in waiting.pop(step.stream, [])]
                last[step.stream] = self.line.ends[step.index]
        return out

    def _arrow(self, source: int, since: float, stream: int, task: int) -> str:
        down = stream > source
        y1 = self.y(source) + (ROW if down else 0)
        y2 = self.y(stream) + (0 if down else ROW)
        return (
            f'<line x1="{self.x(since):.1f}" y1="{y1:.1f}" x2="{self.x(self.line.starts[task]):.1f}" y2="{y2:.1f}" '
            f'stroke="{ARROW}" stroke-width="0.9" marker-end="url(#tip)"/>'
        )

    def _axis(self) -> list[str]:
        base = TOP + self.plan.streams * (ROW + GAP)
        out = [f'<line x1="{LEFT}" x2="{self.width - RIGHT}" y1="{base}" y2="{base}" stroke="#888"/>']
        for tick in _ticks(self.span * 1e6, (self.width - LEFT - RIGHT) // 90):
            x = self.x(tick * 1e-6)
            out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}" stroke="#888"/>')
            out.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">{tick:g} µs</text>')
        return out


def _ticks(span: float, wanted: int) -> Sequence[float]:
    """Round numbers from 0 to `span`, about `wanted` of them."""
    raw = span / max(1, wanted)
    power: float = 10.0 ** len(str(int(raw))) if raw >= 1 else 1.0
    step = next((s for s in (power / 10, power / 5, power / 2, power) if s >= raw), power)
    return [i * step for i in range(int(span / step) + 1)]
