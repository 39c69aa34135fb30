"""The memory plan as a picture: time in kernel calls → right, address ↑, a rectangle a buffer, coloured by kind.

Draws what the manifest says; a plan for symbolic shapes is made here, at the upper bounds of the dims.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from tvmx.errors import PlanError
from tvmx.memory import INPLACE, Buffer, Problem, Solution, plan
from tvmx.report.files import write_text
from tvmx.report.memory_kinds import COLORS, node_kinds, problem_kinds
from tvmx.runtime.arena import to_problem
from tvmx.runtime.artifact import read_artifact
from tvmx.runtime.dims import evaluate
from tvmx.runtime.manifest import Entry

PLOT_HEIGHT = 520
STRIP_HEIGHT = 70  # the bytes alive at each instant, below the plot
LEFT, RIGHT, TOP, BOTTOM = 84, 150, 66, 40
GAP = 14  # between plot and strip
FONT = 10
CHARACTER = 0.61 * FONT  # mean width of a character


@dataclass(frozen=True)
class Panel:
    """One plan to draw. `kinds` and `notes` (what computes it) are by buffer id, `steps` names the instants."""

    title: str
    problem: Problem
    solution: Solution
    kinds: Mapping[str, str]
    notes: Mapping[str, str] = field(default_factory=dict)
    steps: Sequence[str] = ()


def draw_artifact(artifact_path: str | os.PathLike[str], svg_path: str | os.PathLike[str], entry: str = "") -> None:
    """Draw the memory plan of a compiled `.so` into an SVG file: that of `entry`, or of all its entries.

    Raises ArtifactError for a damaged file, PlanError for an unknown entry or a model without a plan.
    """
    manifest = read_artifact(artifact_path).manifest
    if manifest.executor == "vm":
        raise PlanError(f"{artifact_path} runs through the Relax VM ({manifest.reason}), which plans no arena to draw")
    if entry and entry not in manifest.entries:
        raise PlanError(f"{artifact_path} has no entry {entry!r}; choose one of {', '.join(manifest.entries)}")
    chosen = {entry: manifest.entries[entry]} if entry else manifest.entries
    name = Path(artifact_path).name
    panels = [artifact_panel(f"{name}, entry {n}" if len(manifest.entries) > 1 else name, e) for n, e in chosen.items()]
    write_text(Path(svg_path), svg(panels))


def draw_problem(problem: Problem, solution: Solution, svg_path: str | os.PathLike[str], title: str = "") -> None:
    """Draw one plan of a problem into an SVG file."""
    write_text(Path(svg_path), svg([Panel(title, problem, solution, problem_kinds(problem))]))


def artifact_panel(title: str, entry: Entry) -> Panel:
    """The plan of one entry; symbolic dims take their upper bound, or the lower where there is none."""
    dims = {name: high if high is not None else max(low, 1) for name, (low, high) in entry.dims.items()}
    problem = to_problem(entry.arena.buffers, lambda size: max(0, evaluate(size, dims)))
    if entry.arena.offsets is None:
        solution = plan(problem, planner="greedy")
        title += " at " + ", ".join(f"{n}={v}" for n, v in dims.items())
    else:
        assert entry.arena.bytes is not None
        solution = Solution(
            entry.arena.offsets, entry.arena.bytes, entry.arena.lower_bound or 0, entry.arena.planner or "?"
        )
    kinds, notes = node_kinds(entry)
    return Panel(title, problem, solution, kinds, notes, [n.op for n in entry.nodes])


def svg(panels: Sequence[Panel]) -> str:
    """The picture of one or more plans, one below the other."""
    drawn = [_Drawing(p) for p in panels]
    width = max((d.width for d in drawn), default=LEFT + RIGHT)
    each = TOP + PLOT_HEIGHT + GAP + STRIP_HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {each * len(drawn)}" width="{width}" '
        f'height="{each * len(drawn)}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="{FONT}">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for i, drawing in enumerate(drawn):
        parts += [f'<g transform="translate(0 {i * each})">', *drawing.lines(), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


class _Drawing:
    """Scales and marks of one panel."""

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        self.buffers = [b for b in panel.problem if b.size]
        self.first = min((b.start for b in self.buffers), default=0)
        self.steps = max(max((b.end for b in self.buffers), default=1), len(panel.steps)) - self.first
        # two pixels an instant are enough to see a rectangle; the picture is vector, zooming shows the rest
        plot = min(max(920.0, 2.0 * self.steps), 3600.0)
        self.width = round(LEFT + plot + RIGHT)
        self.per_step = plot / self.steps
        self.right = LEFT + plot
        self.floor = TOP + PLOT_HEIGHT
        self.per_byte = PLOT_HEIGHT / max(panel.solution.height, panel.solution.lower_bound, 1) / 1.03
        self.live = _live(panel.problem, self.first, self.steps)
        # what is overwritten in place is drawn up to that instant, not below the new value
        self.seen_until = {b.alias_of: b.start for b in self.buffers if b.alias == INPLACE and b.alias_of is not None}

    def x(self, step: float) -> float:
        return LEFT + (step - self.first) * self.per_step

    def y(self, byte: float) -> float:
        return self.floor - byte * self.per_byte

    def lines(self) -> list[str]:
        return [
            *self._heading(),
            *self._axes(),
            *self._shared_storage(),
            *(self._buffer(b) for b in self.buffers),
            *(line for b in self.buffers for line in self._label(b)),
            *self._marks(),
            *self._strip(),
            *self._legend(),
        ]

    def _heading(self) -> list[str]:
        s = self.panel.solution
        unshared = self.panel.problem.unshared_bytes
        saved = f", {1 - s.height / unshared:.0%} less than {_bytes(unshared)} without sharing" if unshared else ""
        ratio = f" ({s.height / s.lower_bound:.3f} x the lower bound)" if s.lower_bound else ""
        facts = f"{len(self.panel.problem)} buffers in {_bytes(s.height)}{ratio}, planner {s.planner}{saved}"
        return [_text(LEFT, 20, self.panel.title, "start", size=14), _text(LEFT, 38, facts, "start", size=11)]

    def _axes(self) -> list[str]:
        out = []
        for value in _ticks(self.panel.solution.height, 8, binary=True):
            y = self.y(value)
            out.append(f'<path d="M{LEFT} {y:.1f}H{self.right:.1f}" stroke="#e4e4e4"/>')
            out.append(_text(LEFT - 6, y + 3.5, _bytes(value), "end"))
        bottom = self.floor + GAP + STRIP_HEIGHT
        for value in _ticks(self.steps, 14, binary=False):
            x = self.x(value + self.first)
            out.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#f0f0f0"/>')
            out.append(_text(x, bottom + 14, str(value + self.first), "middle"))
        out.append(_text((LEFT + self.right) / 2, bottom + 30, "time in kernel calls", "middle"))
        return out

    def _shared_storage(self) -> list[str]:
        """Storage that several buffers share is alive between their uses too: grey behind them."""
        groups: dict[str, list[Buffer]] = {}
        for b in self.buffers:
            root = b
            while root.alias_of is not None:
                root = self.panel.problem[root.alias_of]
            groups.setdefault(root.id, []).append(b)
        at = self.panel.solution.offsets
        return [
            self._rectangle(
                min(b.start for b in group),
                max(b.end for b in group),
                min(at[b.id] for b in group),
                max(at[b.id] + b.size for b in group),
                'fill="#d9d9d9" stroke="#999" stroke-width="0.4"',
            )
            for group in groups.values()
            if len(group) > 1
        ]

    def _rectangle(self, start: int, end: int, low: int, high: int, style: str, inside: str = "") -> str:
        x, y = self.x(start), self.y(high)
        size = f'width="{self.x(end) - x:.2f}" height="{self.y(low) - y:.2f}"'
        return f'<rect x="{x:.2f}" y="{y:.2f}" {size} {style}' + (f">{inside}</rect>" if inside else "/>")

    def _seen(self, b: Buffer) -> int:
        return max(self.seen_until.get(b.id, b.end), b.start + 1)

    def _buffer(self, b: Buffer) -> str:
        at = self.panel.solution.offsets[b.id]
        dash = ' stroke-dasharray="2 1.5"' if b.alias_of is not None else ""
        shares = f"\n{b.alias} of {b.alias_of}" if b.alias_of is not None else ""
        note = self.panel.notes.get(b.id, "")
        tip = f"{b.id} {note}\n{b.size:,} bytes at {at:,}\nalive [{b.start}, {b.end}){shares}"
        thin = min(0.6, 0.15 * self.per_step)
        style = f'fill="{COLORS[self.panel.kinds[b.id]]}" stroke="#333" stroke-width="{thin:.2f}"{dash}'
        return self._rectangle(b.start, self._seen(b), at, at + b.size, style, f"<title>{escape(tip)}</title>")

    def _label(self, b: Buffer) -> list[str]:
        """The longest description that fits, along the longer side."""
        at, until = self.panel.solution.offsets[b.id], self._seen(b)
        width, height = (until - b.start) * self.per_step - 4, b.size * self.per_byte - 3
        if min(width, height) < FONT:
            return []
        text = _fitting(b.id, self.panel.notes.get(b.id, ""), _bytes(b.size), int(max(width, height) / CHARACTER))
        x, y = self.x((b.start + until) / 2), self.y(at + b.size / 2)
        turn = height > width
        return [_text(x + 3.5 * turn, y + 3.5 * (not turn), text, "middle", turn=turn)] if text else []

    def _marks(self) -> list[str]:
        """The arena's height, the lower bound, and the instant when most bytes are alive."""
        s = self.panel.solution
        peak = max(range(self.steps), key=self.live.__getitem__, default=0)
        x = self.x(self.first + peak + 0.5)
        top, bound = self.y(s.height), self.y(s.lower_bound)
        apart = max(bound, top + 28)
        return [
            f'<path d="M{LEFT} {top:.1f}H{self.right + 6:.1f}" stroke="#b00" stroke-width="1.4"/>',
            _text(self.right + 9, top, "peak (arena)", "start", "#b00"),
            _text(self.right + 9, top + 12, f"{s.height:,} bytes", "start", "#b00"),
            f'<path d="M{LEFT} {bound:.1f}H{self.right + 6:.1f}" stroke="#04c" stroke-width="1.4" '
            'stroke-dasharray="6 4"/>',
            _text(self.right + 9, apart, "lower bound", "start", "#04c"),
            _text(self.right + 9, apart + 12, f"{s.lower_bound:,} bytes", "start", "#04c"),
            f'<path d="M{x:.1f} {TOP - 4}V{self.floor + GAP + STRIP_HEIGHT}" stroke="#b00" stroke-width="0.8" '
            'stroke-dasharray="2 3"/>',
            _text(x, TOP - 7, f"most bytes alive at {self.first + peak}", "middle", "#b00"),
        ]

    def _strip(self) -> list[str]:
        """Bytes alive over time, to its own scale."""
        base, scale = self.floor + GAP + STRIP_HEIGHT, STRIP_HEIGHT / max(*self.live, 1)
        path = [f"M{LEFT} {base}"]
        for step, value in enumerate(self.live):
            path.append(f"V{base - value * scale:.1f}H{self.x(self.first + step + 1):.1f}")
        return [
            f'<path d="{"".join(path)}V{base}Z" fill="#c9d6e8" stroke="#456" stroke-width="0.6"/>',
            _text(LEFT - 6, base - STRIP_HEIGHT / 2, "bytes", "end"),
            _text(LEFT - 6, base - STRIP_HEIGHT / 2 + 12, "alive", "end"),
        ]

    def _legend(self) -> list[str]:
        present = {self.panel.kinds[b.id] for b in self.buffers}
        out, y = [], TOP + 90
        for kind, color in COLORS.items():
            if kind in present:
                out.append(f'<rect x="{self.right + 10:.1f}" y="{y}" width="11" height="11" fill="{color}"/>')
                out.append(_text(self.right + 26, y + 9, kind, "start"))
                y += 17
        if any(b.alias_of is not None for b in self.buffers):
            out.append(
                f'<rect x="{self.right + 10:.1f}" y="{y}" width="11" height="11" fill="#d9d9d9" stroke="#333" '
                'stroke-dasharray="2 1.5"/>'
            )
            out.append(_text(self.right + 26, y + 9, "shares storage", "start"))
        return out


def _live(problem: Problem, first: int, steps: int) -> list[int]:
    """Bytes of the storage alive at each instant; buffers that share count once, as long as any lives."""
    change = [0] * (steps + 1)
    storages: dict[str, tuple[int, int, int]] = {}
    for b in problem:
        root, at = b, 0
        while root.alias_of is not None:
            at += root.alias_offset
            root = problem[root.alias_of]
        start, end, size = storages.get(root.id, (b.start, b.end, 0))
        storages[root.id] = min(start, b.start), max(end, b.end), max(size, at + b.size)
    for start, end, size in storages.values():
        if size:
            change[start - first] += size
            change[end - first] -= size
    live, total = [], 0
    for delta in change[:-1]:
        total += delta
        live.append(total)
    return live


def _ticks(limit: int, count: int, binary: bool) -> list[int]:
    """At most `count` round values in [0, limit]."""
    step = 1
    while limit // step > count:
        step *= 2 if binary or str(step)[0] != "2" else 5
        if not binary and str(step)[0] == "4":
            step = step * 5 // 4
    return list(range(0, limit + 1, step))


def _bytes(value: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value} B"


def _fitting(name: str, note: str, size: str, room: int) -> str:
    """As much of name, note and size as `room` characters hold; empty when not even the name."""
    for_note = room - len(name) - len(size) - 6
    if note and for_note >= min(8, len(note)):
        return f"{name} · {note if len(note) <= for_note else note[: for_note - 1] + '…'} · {size}"
    for text in (f"{name} · {size}", name):
        if len(text) <= room:
            return text
    return ""


def _text(x: float, y: float, text: str, anchor: str, color: str = "#222", size: int = FONT, turn: bool = False) -> str:
    rotate = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    bigger = f' font-size="{size}"' if size != FONT else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" pointer-events="none"'
        f"{bigger}{rotate}>{escape(text)}</text>"
    )
