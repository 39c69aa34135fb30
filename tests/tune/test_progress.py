"""What a session shows, on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tvmx.tune.progress import Display, Progress, TaskProgress, table


def row(name: str, default: float | None, best: float | None, calls: int = 1, active: bool = False) -> TaskProgress:
    return TaskProgress(name, "cpu.matmul", calls, 10, 1, default, best, False, active)


def snapshot(stage: str = "searching") -> Progress:
    tasks = (row("conv", 2e-3, 1e-3, calls=2, active=True), row("add", 5e-6, 5e-6), row("later", None, None))
    return Progress(tasks, 25, 100, 10.0, 100.0, stage)


def test_totals_count_calls_and_time_left_follows_the_pace() -> None:
    p = snapshot()
    assert abs(p.default_total_s - 4.005e-3) < 1e-12
    assert abs(p.total_s - 2.005e-3) < 1e-12
    assert p.left_s == 30.0  # 75 trials at 2.5 a second, less than the 90 s of the budget
    assert p.tasks[0].speedup == 2.0
    assert p.tasks[2].speedup == 1.0


def test_plain_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    with Display(stream) as show:
        show(snapshot())
        show(snapshot())  # within five seconds of the first: no line
        show(snapshot("done"))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "25/100 trials" in lines[0]
    assert "2.00x" in lines[0]
    assert "conv" in lines[0]
    assert "\x1b" not in stream.getvalue()


def test_table_lists_the_heaviest_and_counts_the_rest() -> None:
    console = Console(file=io.StringIO(), width=160)
    console.print(table(snapshot(), rows=2))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "▶ conv" in text
    assert "1 more" in text
    assert "1.000 ms" in text


@pytest.mark.parametrize("width", [80, 100, 200])
def test_table_fits_the_terminal(width: int) -> None:
    long = row("fused_conv2d_1x16_add14_multiply14_add15_tir_clip7_multiply15", 9e-3, 3e-3, active=True)
    progress = Progress((long, *snapshot().tasks), 25, 1000, 100.0, 600.0, "searching")
    console = Console(file=io.StringIO(), width=width)
    console.print(table(progress, width=width))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    rows = [line for line in lines if "ms" in line and "→" not in line]
    assert len(rows) == 2  # a line each
    assert "conv2d" in rows[0]
    assert "3.00x" in rows[0]
    assert ("cpu.matmul" in rows[0]) == (width > 100)
    assert "left" in lines[-1]
