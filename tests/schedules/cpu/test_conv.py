"""conv2d schedules against numpy on each instruction set this machine executes, for awkward shapes too."""

from __future__ import annotations

import pytest

from tests.schedules.cpu.conv_case import Case, build, run
from tvmx.target import PRESETS, resolve

TOLERANCE = 1e-5  # float32, a few thousand terms

POINTWISE = [
    Case((1, 14, 14, 64), 128),
    Case((1, 7, 7, 24), 100, epilogue="hardswish"),
    Case((2, 5, 3, 12), 19, epilogue=""),
    Case((1, 13, 11, 32), 32, epilogue="residual"),
    Case((1, 1, 1, 256), 64),
    Case((1, 6, 6, 18), 1),
    Case((1, 37, 1, 16), 64),
    Case((1, 6, 6, 20), 24, constant=False),
    Case((1, 7, 9, 20), 24, prologue=True),
]
DIRECT = [
    Case((1, 14, 14, 32), 64, (3, 3), (2, 2), (1, 1, 1, 1)),
    Case((1, 33, 31, 3), 16, (3, 3), (2, 2), (1, 1, 1, 1), epilogue="hardswish"),
    Case((2, 17, 11, 24), 19, (3, 3), (1, 2), (1, 0, 1, 1), (2, 1)),
    Case((1, 9, 7, 16), 48, (1, 1), (2, 2)),
    Case((1, 1, 40, 60), 60, (1, 3), pads=(0, 1, 0, 1), epilogue=""),
    Case((1, 12, 4, 24), 24, (5, 3), pads=(2, 1, 2, 1), epilogue="residual"),
    Case((1, 7, 9, 20), 24, (3, 2), pads=(1, 1, 1, 1), prologue=True),
    Case((1, 8, 9, 8), 8, (5, 5), pads=(2, 2, 2, 2), constant=False),
]


@pytest.mark.parametrize("case", POINTWISE, ids=str)
def test_pointwise(case: Case) -> None:
    error, rules = run(case, resolve("native", threads=1))
    assert "cpu.conv2d_1x1" in rules
    assert error < TOLERANCE


@pytest.mark.parametrize("case", DIRECT, ids=str)
def test_direct(case: Case) -> None:
    error, rules = run(case, resolve("native", threads=1))
    assert "cpu.conv2d" in rules
    assert error < TOLERANCE


@pytest.mark.parametrize("preset", ["x86_64-sse", "x86_64-avx2"])
@pytest.mark.parametrize("case", [POINTWISE[1], DIRECT[2]], ids=["pointwise", "direct"])
def test_lesser_instruction_sets(case: Case, preset: str) -> None:
    if not resolve("native").features.issuperset(PRESETS[preset].features):
        pytest.skip(f"this machine cannot execute {preset}")
    assert run(case, resolve(preset, threads=1))[0] < TOLERANCE


@pytest.mark.parametrize("case", [Case((1, 28, 28, 64), 128), Case((1, 28, 28, 32), 64, (3, 3), (2, 2), (1, 1, 1, 1))])
def test_two_threads(case: Case) -> None:
    assert run(case, resolve("native", threads=2))[0] < TOLERANCE


def test_neon_builds() -> None:
    executable, rules = build(DIRECT[0].module(), resolve("aarch64-neon", threads=2))
    assert "cpu.conv2d" in rules
    assert "fmla" in executable.mod.imports[0].inspect_source("asm")


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 9, 8, 64), 64, (3, 3), pads=(1, 1, 1, 1), groups=2),
        Case((1, 9, 8, 12), 18, (3, 3), (2, 2), (1, 1, 1, 1), groups=6, epilogue="hardswish"),
        Case((1, 9, 8, 8), 16, (3, 3), groups=8),
        Case((1, 6, 6, 8), 24, groups=4, constant=False),
    ],
    ids=str,
)
def test_grouped(case: Case) -> None:
    error, rules = run(case, resolve("native", threads=1))
    assert "cpu.conv2d" in rules
    assert error < TOLERANCE
