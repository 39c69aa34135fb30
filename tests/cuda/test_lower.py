"""Lowering to CUDA source: launches, and the passes of ours."""

from __future__ import annotations

import numpy as np
import pytest

from tests.schedules.cuda.products import Convolution, check
from tvmx.cuda.lower import _whole_words, lower_kernel
from tvmx.debug.emulate import compiler
from tvmx.errors import CompileError
from tvmx.target import PRESETS


def test_byte_vectors_become_words() -> None:
    bytes_ = ", ".join(["(signed char)-128", "(signed char)1"] * 8)
    assert _whole_words(f"x = make_int4({bytes_});") == "x = make_int4(" + ", ".join(["(int)0x01800180u"] * 4) + ");"
    assert _whole_words("make_int2(1, 2)") == "make_int2(1, 2)"


def test_an_unscheduled_kernel_is_refused() -> None:
    from tvm import te

    a = te.placeholder((4,), "float32", "a")
    func = te.create_prim_func([a, te.compute((4,), lambda i: a[i] + 1, "b")])
    with pytest.raises(CompileError, match=r"does not lower|bound to threads"):
        lower_kernel(func, PRESETS["cuda-sm80"])


@pytest.mark.skipif(compiler() is None, reason="the emulator needs a C++ compiler")
@pytest.mark.parametrize("preset", ["cuda-sm80", "cuda-sm75"])
def test_padding_with_a_zero_point(preset: str) -> None:
    """uint8 data has zero point 128 as int8: what surrounds the image is -128, not 0."""

    class Padded(Convolution):
        def module(self):
            from tvm import relax

            a = self.arrays()
            builder = relax.BlockBuilder()
            x = relax.Var("x", relax.TensorType(self.x, "int8"))
            with builder.function("main", [x]):
                with builder.dataflow():
                    wide = builder.emit(relax.op.nn.pad(x, [0, 0, 1, 1, 1, 1, 0, 0], pad_value=-128))
                    y = relax.op.nn.conv2d(
                        wide, relax.const(a["w"]), data_layout="NHWC", kernel_layout="HWIO", out_dtype="int32"
                    )
                    y = builder.emit_output(builder.emit(y))
                builder.emit_func_output(y)
            return builder.get()

        def reference(self):
            inner = Convolution((1, 10, 10, 32), 24, (3, 3), dtype="int8")
            a = self.arrays()
            x = np.pad(a["x"], ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-128).astype("float64")
            y = np.zeros((1, 8, 8, inner.out))
            for i in range(3):
                for j in range(3):
                    y += x[:, i : i + 8, j : j + 8] @ a["w"][i, j].astype("float64")
            return y

    outcome = check(Padded((1, 8, 8, 32), 24, (3, 3), dtype="int8"), PRESETS[preset])
    assert (outcome.copies > 0) == (preset == "cuda-sm80")
