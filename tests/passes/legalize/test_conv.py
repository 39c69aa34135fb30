"""Which kernel the legalization picks, and what it leaves to TVM."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.schedules.cpu.conv_case import Case
from tvmx.passes.legalize.conv import pack_array
from tvmx.pipeline import run_phases
from tvmx.target import resolve


def kernels(module: Any) -> list[str]:
    from tvm import tirx

    lowered = run_phases(module, resolve("native", threads=1))
    return [v.name_hint for v, f in lowered.functions.items() if isinstance(f, tirx.PrimFunc)]


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        (Case((1, 8, 8, 16), 16), "conv2d_1x1"),
        (Case((1, 8, 8, 16), 16, strides=(2, 2)), "conv2d"),
        (Case((1, 8, 8, 16), 16, (5, 5)), "conv2d"),
        (Case((1, 28, 28, 32), 32, (3, 3)), "conv2d_winograd"),
        (Case((1, 8, 8, 16), 16, (3, 3), groups=16), "depthwise_conv2d"),
    ],
    ids=str,
)
def test_bias_and_relu_join_the_kernel(case: Case, kernel: str) -> None:
    assert kernels(case.module()) == [f"fused_{kernel}_add_relu"]


def test_a_weight_that_is_an_input_is_packed_by_a_kernel() -> None:
    names = kernels(Case((1, 8, 8, 16), 320, (3, 3), constant=False).module())
    assert "pack_weight" in names


def test_panels_are_padded_with_zeros() -> None:
    weight = np.arange(3 * 5, dtype="float32").reshape(1, 1, 3, 5) + 1
    packed = pack_array(weight, 4)
    assert packed.shape == (2, 1, 1, 3, 4)
    np.testing.assert_array_equal(packed[1, 0, 0, :, 0], weight[0, 0, :, 4])
    assert not packed[1, ..., 1:].any()


def test_other_dtypes_keep_the_stock_lowering() -> None:
    from tvm import relax

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 4, 4, 8), "float64"))
    w = relax.Var("w", relax.TensorType((1, 1, 8, 8), "float64"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="HWIO"))
        builder.emit_func_output(y)
    assert "conv2d_1x1" not in kernels(builder.get())
