"""Lowering to CUDA source: launches, and the passes of ours."""

from __future__ import annotations

import numpy as np
import pytest

from tests.schedules.cuda.products import Convolution, check
from tvmx.cuda.lower import _eight_lanes, _whole_words, lower_kernel
from tvmx.debug.emulate import compiler
from tvmx.errors import CompileError
from tvmx.target import PRESETS


def test_byte_vectors_become_words() -> None:
    bytes_ = ", ".join(["(signed char)-128", "(signed char)1"] * 8)
    assert _whole_words(f"x = make_int4({bytes_});") == "x = make_int4(" + ", ".join(["(int)0x01800180u"] * 4) + ");"
    assert _whole_words("make_int2(1, 2)") == "make_int2(1, 2)"


def test_eight_lanes_of_32_bits() -> None:
    lanes = ", ".join(["(a + f(1, 2))"] * 8)
    kernel = f'extern "C" __global__ void k() {{ x = make_ulonglong4({lanes}); y = make_longlong4(1, 2, 3, 4); }}'
    fixed = _eight_lanes(kernel)
    assert fixed.count("tvmx_eight<ulonglong4>((a + f(1, 2))") == 1
    assert "make_longlong4(1, 2, 3, 4)" in fixed
    assert fixed.index("template <class V") < fixed.index("__global__")
    assert _eight_lanes("make_longlong4(1, 2, 3, 4)") == "make_longlong4(1, 2, 3, 4)"


@pytest.mark.skipif(compiler() is None, reason="the emulator needs a C++ compiler")
def test_quantisation_in_vectors() -> None:
    """f16 in, int8 out, eight lanes of float32 between them."""
    from tvm import te, tirx

    from tvmx.debug.emulate import emulate
    from tvmx.schedule import apply_default

    x = te.placeholder((32, 64), "float16", "x")

    def quantize(i, j):
        wide = te.max(te.min(x[i, j].astype("float32") * 20.0, 127.0), -128.0) + 12582912.0
        return (tirx.reinterpret("int32", wide) - 1262485504).astype("int8")

    func = te.create_prim_func([x, te.compute((32, 64), quantize, "q")])
    values = (np.random.default_rng(0).standard_normal((32, 64)) * 4).astype("float16")
    done = emulate(apply_default(func, PRESETS["cuda-sm80"]).func, PRESETS["cuda-sm80"], [values])
    expected = np.clip(np.rint(values.astype("float32") * np.float32(20)), -128, 127).astype("int8")
    np.testing.assert_array_equal(done.outputs[0], expected)


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
