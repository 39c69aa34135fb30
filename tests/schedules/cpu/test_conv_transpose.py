"""Transposed convolutions against a scatter written in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.schedules.cpu.conv_case import build
from tvmx.target import resolve


@dataclass(frozen=True)
class Case:
    x: tuple[int, int, int, int]
    out: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    output_padding: tuple[int, int] = (0, 0)
    groups: int = 1

    def arrays(self) -> tuple[Any, Any]:
        rng = np.random.default_rng(3)
        x = rng.standard_normal(self.x).astype("float32")
        return x, rng.standard_normal((*self.kernel, self.x[3], self.out // self.groups)).astype("float32")

    def module(self) -> Any:
        from tvm import relax

        _, w = self.arrays()
        builder = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType(self.x, "float32"))
        with builder.function("main", [x]):
            with builder.dataflow():
                y = builder.emit(
                    relax.op.nn.conv2d_transpose(
                        x,
                        relax.const(w),
                        strides=list(self.strides),
                        padding=list(self.pads),
                        output_padding=list(self.output_padding),
                        groups=self.groups,
                        data_layout="NHWC",
                        kernel_layout="HWIO",
                    )
                )
                y = builder.emit_output(relax.op.nn.relu(y))
            builder.emit_func_output(y)
        return builder.get()

    def reference(self) -> Any:
        x, w = (a.astype("float64") for a in self.arrays())
        n, h, width, depth = self.x
        (kh, kw), (sh, sw) = self.kernel, self.strides
        top, left, bottom, right = self.pads
        size = [(h - 1) * sh + kh + self.output_padding[0], (width - 1) * sw + kw + self.output_padding[1]]
        full = np.zeros((n, *size, self.out))
        per, mine = depth // self.groups, self.out // self.groups
        for g in range(self.groups):
            for i in range(kh):
                for j in range(kw):
                    full[:, i : i + (h - 1) * sh + 1 : sh, j : j + (width - 1) * sw + 1 : sw, g * mine :][
                        ..., :mine
                    ] += x[..., g * per : (g + 1) * per] @ w[i, j, g * per : (g + 1) * per]
        return np.maximum(full[:, top : size[0] - bottom, left : size[1] - right], 0)


CASES = [
    Case((1, 10, 12, 24), 24, (2, 2), (2, 2)),
    Case((1, 10, 12, 24), 1, (2, 2), (2, 2)),
    Case((2, 5, 7, 8), 16, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1)),
    Case((1, 6, 5, 16), 20, (4, 4), (2, 2), (1, 1, 1, 1)),
    Case((1, 6, 5, 16), 8, (3, 2), (1, 3), (0, 1, 1, 0)),
    Case((1, 4, 4, 8), 8, (5, 5), (2, 2), (3, 2, 4, 3), (1, 0)),
    Case((1, 4, 4, 8), 8, (1, 1), (2, 2)),
    Case((1, 4, 4, 8), 8, (3, 3), (2, 2), (1, 1, 1, 1), groups=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_transpose(case: Case, threads: int) -> None:
    import tvm
    from tvm import relax

    executable, rules = build(case.module(), resolve("native", threads=threads))
    if case.groups == 1:
        assert {"cpu.conv2d", "cpu.conv2d_1x1"} & set(rules)
    got = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(case.arrays()[0])).numpy()
    expected = case.reference()
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()
