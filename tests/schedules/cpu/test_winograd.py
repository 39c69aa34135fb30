"""Winograd schedules against float64 numpy: 1e-5 of the output's range, ten times under the project's error budget."""

from __future__ import annotations

import numpy as np
import pytest

from tests.schedules.cpu.conv_case import Case, build, run
from tvmx.passes.legalize.conv_model import winograd_plan
from tvmx.passes.legalize.winograd_te import weights
from tvmx.target import resolve

SAME = (1, 1, 1, 1)
CASES = [
    Case((1, 28, 28, 32), 64, (3, 3), pads=SAME, epilogue="hardswish"),
    Case((2, 26, 13, 24), 24, (3, 3), pads=SAME, epilogue="residual"),
    Case((1, 30, 18, 20), 36, (3, 3), pads=(0, 1, 2, 0), epilogue=""),
    Case((1, 28, 28, 32), 32, (3, 3), pads=SAME, prologue=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_winograd(case: Case) -> None:
    error, rules = run(case, resolve("native", threads=1))
    assert "cpu.conv2d_winograd" in rules
    assert error < 1e-5


def test_two_threads_avx2() -> None:
    error, rules = run(CASES[0], resolve("x86_64-avx2", threads=2))
    assert "cpu.conv2d_winograd" in rules
    assert error < 1e-5


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 28, 28, 32), 64, (3, 3), (2, 2), SAME),
        Case((1, 28, 28, 32), 64, (3, 3), pads=SAME, dilation=(2, 2)),
        Case((1, 28, 28, 3), 64, (3, 3), pads=SAME),
        Case((1, 28, 28, 32), 64, (3, 3), pads=SAME, constant=False),
    ],
    ids=["strided", "dilated", "three channels", "weight is an input"],
)
def test_direct_where_winograd_does_not_apply(case: Case) -> None:
    assert "cpu.conv2d" in build(case.module(), resolve("native", threads=1))[1]


def test_transformed_weights_are_the_definition() -> None:
    g = np.random.default_rng(0).standard_normal((3, 3, 5, 6)).astype("float32")
    packed = weights(g, 4)
    assert packed.shape == (6, 6, 2, 5, 4)
    np.testing.assert_allclose(packed[0, 0, 0, :, :], g[0, 0, :, :4] / 16, rtol=1e-6)  # G's first row is (1/4, 0, 0)
    np.testing.assert_allclose(packed[5, 5, 1, :, :2], g[2, 2, :, 4:], rtol=1e-6)  # its last (0, 0, 1)
    assert not packed[:, :, 1, :, 2:].any()


def test_stages_spread_over_threads() -> None:
    case = Case((1, 7, 7, 256), 256, (3, 3), pads=SAME, epilogue="residual")
    target = resolve("native", threads=2)
    assert winograd_plan(1, 2, 2, 256, 256, target, threads=2).group == 0
    error, rules = run(case, target)
    assert "cpu.conv2d_winograd" in rules
    assert error < 1e-5
