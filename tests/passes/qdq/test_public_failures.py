"""What other runtimes were reported to get wrong on QDQ models."""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import op as R

from tests.passes.qdq.helpers import codes, module, native, run

RNG = np.random.default_rng(2)


def test_softmax_of_one_does_not_wrap():
    """1.0 at a scale of 1/128 is 128 steps: int8 saturates at 127 and must not become -128."""
    x = np.full((4, 32), -128, np.int8)
    x[:, 3] = 127
    one, zero = relax.const(np.float32(1.0)), relax.const(np.int8(0))
    step = relax.const(np.float32(1 / 128))

    def body(emit, v):
        y = emit(R.nn.softmax(emit(R.dequantize(v, one, zero, -1, "float32")), -1))
        return R.quantize(y, step, zero, -1, "int8")

    found, _ = run(module([(x.shape, "int8")], body), native(), [x])
    assert (found[:, 3] == 127).all()
    assert (np.delete(found, 3, 1) == 0).all()


def test_resize_to_a_finer_scale_does_not_wrap():
    x = codes(RNG, (1, 5, 5, 8), "int8")
    coarse, fine, zero = (relax.const(v) for v in (np.float32(0.1), np.float32(0.05), np.int8(0)))

    def body(emit, v):
        y = emit(R.dequantize(v, coarse, zero, -1, "float32"))
        y = emit(
            R.image.resize2d(
                y, (10, 10), layout="NHWC", method="nearest_neighbor",
                coordinate_transformation_mode="asymmetric", rounding_method="floor",
            )
        )  # fmt: skip
        return R.quantize(y, fine, zero, -1, "int8")

    found, _ = run(module([(x.shape, "int8")], body), native(), [x])
    expected = np.clip(2 * x.astype(int).repeat(2, 1).repeat(2, 2), -128, 127)
    np.testing.assert_array_equal(found, expected)


def test_a_weight_shared_by_a_quantised_and_a_float_branch():
    """One reader multiplies codes, the other floats: the float one gets the weight's dequantised values."""
    a, x = codes(RNG, (6, 96), "uint8"), RNG.standard_normal((6, 96)).astype(np.float32)
    w = codes(RNG, (96, 64), "int8")
    step, half = relax.const(np.float32(0.02)), relax.const(np.uint8(128))

    def body(emit, v, f):
        weight = emit(R.dequantize(relax.const(w), step, relax.const(np.int8(0)), -1, "float32"))
        left = emit(R.matmul(emit(R.dequantize(v, step, half, -1, "float32")), weight))
        return R.add(left, emit(R.matmul(f, weight)))

    mod = module([(a.shape, "uint8"), (x.shape, "float32")], body)
    found, rules = run(mod, native(), [a, x])
    scaled = w.astype(np.float64) * 0.02
    expected = ((a.astype(np.float64) - 128) * 0.02) @ scaled + x.astype(np.float64) @ scaled
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    assert "cpu.dot_matmul" in rules
