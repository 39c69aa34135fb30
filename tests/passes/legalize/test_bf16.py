"""Products of two bfloat16 operands on a CPU with VDPBF16PS: pairs of products, float32 sums."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op as R

from tests.passes.qdq.helpers import module, native, run
from tvmx.passes.legalize.dot_unit import bf16_unit

pytestmark = pytest.mark.skipif(bf16_unit(native()) is None, reason="this CPU has no AVX512_BF16")
BF16 = ml_dtypes.bfloat16


def values(seed, *shape):
    """float32 numbers that are no bfloat16."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def close(found, a, b, product):
    """Exact products of the rounded operands, summed in float32: each of the additions rounds once."""
    a, b = (x.astype(BF16).astype(np.float64) for x in (a, b))
    bound = product(np.abs(a), np.abs(b))
    assert (np.abs(found - product(a, b)) <= 2**-22 * bound + 1e-30).all()


def narrow(emit, x):
    return emit(R.astype(x, "bfloat16"))


@pytest.mark.parametrize(("a", "b"), [((9, 64), (64, 32)), ((2, 5, 33), (33, 50)), ((1, 7), (7, 3))])
def test_matmul_by_a_constant(a, b):
    x, w = values(0, *a), values(1, *b)
    weight = relax.const(tvm.runtime.tensor(w.astype(BF16)))
    mod = module([(a, "float32")], lambda emit, v: R.matmul(narrow(emit, v), weight, "float32"))
    found, rules = run(mod, native(threads=2), [x])
    assert "cpu.dot_matmul" in rules
    close(found, x, w, np.matmul)


@pytest.mark.parametrize(("a", "b"), [((2, 12, 16), (2, 16, 20)), ((2, 3, 9, 17), (2, 3, 17, 6))])
def test_matmul_of_two_computed_operands(a, b):
    x, y = values(2, *a), values(3, *b)
    mod = module(
        [(a, "float32"), (b, "float32")],
        lambda emit, v, w: R.matmul(narrow(emit, v), narrow(emit, w), "float32"),
    )
    found, rules = run(mod, native(threads=2), [x, y])
    assert "cpu.dot_matmul" in rules
    close(found, x, y, np.matmul)


@pytest.mark.parametrize(("channels", "kernel", "groups"), [(16, 1, 1), (7, 1, 1), (12, 1, 2)])
def test_conv(channels, kernel, groups):
    x, w = values(4, 1, 9, 10, channels), values(5, kernel, kernel, channels // groups, 24)
    weight = relax.const(tvm.runtime.tensor(w.astype(BF16)))
    pad = kernel // 2

    def body(emit, v):
        return R.nn.conv2d(
            narrow(emit, v), weight, padding=[pad] * 4, groups=groups, data_layout="NHWC", kernel_layout="HWIO",
            out_dtype="float32",
        )  # fmt: skip

    def conv(a, b):
        a = np.pad(a, [(0, 0), (pad, pad), (pad, pad), (0, 0)])
        out = np.zeros((1, 9, 10, 24))
        mine, each = channels // groups, 24 // groups
        for g in range(groups):
            for i in range(kernel):
                for j in range(kernel):
                    part = a[:, i : i + 9, j : j + 10, g * mine : (g + 1) * mine]
                    out[..., g * each : (g + 1) * each] += part @ b[i, j, :, g * each : (g + 1) * each]
        return out

    found, rules = run(module([((1, 9, 10, channels), "float32")], body), native(), [x])
    assert any(rule in rules for rule in ("cpu.dot_conv", "cpu.dot_matmul"))
    close(found, x, w, conv)


def test_a_fractional_padding_stays_what_it_is():
    x, w = values(6, 1, 5, 6, 8), values(7, 3, 3, 8, 16)
    weight = relax.const(tvm.runtime.tensor(w.astype(BF16)))

    def body(emit, v):
        padded = emit(R.nn.pad(narrow(emit, v), [0, 0, 1, 1, 1, 1, 0, 0], "constant", 1.5))
        return R.nn.conv2d(padded, weight, data_layout="NHWC", kernel_layout="HWIO", out_dtype="float32")

    def conv(a, b):
        a = np.pad(a, [(0, 0), (1, 1), (1, 1), (0, 0)], constant_values=1.5)
        return sum(a[:, i : i + 5, j : j + 6] @ b[i, j] for i in range(3) for j in range(3))

    found, _ = run(module([((1, 5, 6, 8), "float32")], body), native(), [x])
    close(found, x, w, conv)
