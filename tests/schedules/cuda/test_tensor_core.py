"""Tensor Core products and convolutions, emulated from their CUDA source."""

from __future__ import annotations

import pytest

from tests.schedules.cuda.products import Convolution, Product, check
from tvmx.debug.emulate import compiler
from tvmx.target import PRESETS

pytestmark = pytest.mark.skipif(compiler() is None, reason="the emulator needs a C++ compiler")

SAME = (1, 1, 1, 1)

CONVOLUTIONS = {
    "3x3": ("cuda-sm80", Convolution((1, 14, 14, 64), 64, (3, 3), pads=SAME)),
    "1x1 odd": ("cuda-sm86", Convolution((2, 9, 7, 24), 33)),
    "stem": ("cuda-sm89", Convolution((1, 15, 15, 3), 32, (7, 7), (2, 2), (3, 3, 3, 3))),
    "dilated wmma": ("cuda-sm75", Convolution((1, 14, 14, 32), 64, (3, 3), (2, 1), SAME, (2, 2))),
    "grouped": ("cuda-sm80", Convolution((1, 10, 10, 64), 64, (3, 3), pads=SAME, groups=2)),
    "split k": ("cuda-sm80", Convolution((1, 7, 7, 256), 64, (3, 3), pads=SAME)),
    "residual": ("cuda-sm90", Convolution((1, 8, 8, 32), 32, (3, 3), pads=SAME, epilogue="residual")),
    "weights given": ("cuda-sm80", Convolution((1, 8, 8, 32), 24, (3, 3), pads=SAME, constant=False)),
    "bf16": ("cuda-sm86", Convolution((1, 9, 9, 40), 33, (3, 3), pads=SAME, dtype="bfloat16", epilogue="relu")),
    "int8": ("cuda-sm80", Convolution((1, 10, 10, 64), 48, (3, 3), pads=SAME, dtype="int8", epilogue="requantize")),
    "int8 wmma": ("cuda-sm75", Convolution((1, 7, 7, 48), 33, dtype="int8", epilogue="requantize")),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name: str) -> None:
    preset, case = CONVOLUTIONS[name]
    outcome = check(case, PRESETS[preset])
    assert outcome.rules[0] == ("cuda.wmma" if preset == "cuda-sm75" else "cuda.mma")
    assert outcome.conflicts == 0
    if preset != "cuda-sm75" and case.x[3] % 16 == 0 and case.constant:
        assert outcome.copies > 0, "cp.async"
    assert ("cuda.elementwise" in outcome.rules) == (name in ("split k", "grouped"))


PRODUCTS = {
    "constant": ("cuda-sm80", Product((1, 33, 72), (72, 40))),
    "odd": ("cuda-sm86", Product((5, 45), (45, 17))),
    "batch": ("cuda-sm80", Product((2, 3, 20, 32), (2, 3, 32, 24), constant=False)),
    "attention": ("cuda-sm90", Product((1, 4, 24, 32), (1, 4, 24, 32), constant=False, transpose_b=True)),
    "int8": ("cuda-sm89", Product((2, 30, 64), (64, 48), dtype="int8")),
    "bf16 batch": ("cuda-sm80", Product((2, 20, 32), (2, 32, 24), dtype="bfloat16", constant=False)),
    "int8 batch": ("cuda-sm80", Product((3, 20, 64), (3, 24, 64), dtype="int8", constant=False, transpose_b=True)),
    "wmma": ("cuda-sm75", Product((40, 56), (56, 24), constant=False)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_product(name: str) -> None:
    preset, case = PRODUCTS[name]
    outcome = check(case, PRESETS[preset], reverse=name in ("batch", "int8"))
    assert outcome.rules[0] == ("cuda.wmma" if preset == "cuda-sm75" else "cuda.mma")
    assert outcome.conflicts == 0


def test_float32_is_left_to_other_schedules() -> None:
    outcome = check(Product((8, 16), (16, 8), dtype="float32"), PRESETS["cuda-sm80"])
    assert outcome.rules == ["cuda.dlight"]
