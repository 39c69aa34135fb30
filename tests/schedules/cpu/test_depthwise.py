"""Depthwise schedules against numpy."""

from __future__ import annotations

import pytest

from tests.schedules.cpu.conv_case import Case, run
from tvmx.target import resolve

CASES = [
    Case((1, 14, 14, 32), 32, (3, 3), pads=(1, 1, 1, 1), groups=32, epilogue="residual"),
    Case((1, 15, 13, 48), 48, (5, 5), (2, 1), (2, 2, 2, 2), groups=48, epilogue="hardswish"),
    Case((2, 9, 9, 10), 10, (3, 3), (2, 2), (1, 1, 1, 1), groups=10, epilogue=""),
    Case((1, 9, 10, 16), 16, (3, 3), pads=(0, 0, 0, 0), dilation=(2, 2), groups=16),
    Case((1, 9, 10, 16), 16, (3, 3), groups=16, prologue=True),
    Case((1, 6, 6, 7), 7, (3, 3), pads=(1, 1, 1, 1), groups=7, constant=False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("target", ["native", "x86_64-avx2"])
def test_depthwise(case: Case, target: str) -> None:
    error, rules = run(case, resolve(target, threads=1))
    assert "cpu.depthwise_conv2d" in rules
    assert error < 1e-5


def test_two_threads() -> None:
    case = Case((1, 56, 56, 32), 32, (3, 3), pads=(1, 1, 1, 1), groups=32)
    assert run(case, resolve("native", threads=2))[0] < 1e-5
