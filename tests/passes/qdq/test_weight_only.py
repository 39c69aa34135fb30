"""Float activations times 8- and 4-bit weights: the codes stay codes, the numbers are those of the float weights."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op as R

from tests.passes.qdq.helpers import HOSTS, module, native, run


def _per_channel(emit, codes, scale, zero):
    return emit(R.dequantize(relax.const(codes), relax.const(scale), relax.const(zero), 1, "float32"))


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_per_channel(rows, dtype):
    rng = np.random.default_rng(0)
    codes = rng.integers(*((-128, 128) if dtype == "int8" else (0, 256)), (96, 80)).astype(dtype)
    scale = rng.uniform(0.01, 0.1, 80).astype(np.float32)
    zero = rng.integers(0, 100, 80).astype(dtype)
    x = rng.standard_normal((2, rows, 96)).astype(np.float32)
    mod = module([((2, rows, 96), "float32")], lambda e, v: R.matmul(v, _per_channel(e, codes, scale, zero)))
    found, rules = run(mod, native(threads=2), [x])
    expected = x.astype(np.float64) @ ((codes.astype(np.float64) - zero) * scale)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert rules == ["cpu.weight_only"]


@pytest.mark.parametrize("target", HOSTS, ids=lambda t: t.name)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_groups_of_four_bits(group, target):
    rng = np.random.default_rng(group)
    blocks, width = 256 // group, 48
    codes = rng.integers(0, 16, (blocks, group, width)).astype(np.uint8)
    scale = rng.uniform(0.01, 0.1, (blocks, 1, width)).astype(np.float32)
    zero = rng.integers(0, 16, (blocks, 1, width)).astype(np.float32)
    x = rng.standard_normal((5, 256)).astype(np.float32)

    def body(emit, v):
        cut = emit(R.subtract(emit(R.astype(relax.const(codes), "float32")), relax.const(zero)))
        return R.matmul(v, emit(R.reshape(emit(R.multiply(cut, relax.const(scale))), (256, width))))

    found, rules = run(module([((5, 256), "float32")], body), target, [x])
    expected = x.astype(np.float64) @ ((codes - zero.astype(np.float64)) * scale).reshape(256, width)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert rules == ["cpu.weight_only"]


@pytest.mark.parametrize(("depth", "width", "group"), [(100, 50, 32), (129, 65, 64), (333, 33, 128), (97, 61, 16)])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("high", [16, 256])
def test_a_short_last_group(depth, width, group, rows, high):
    """K and N odd, K no multiple of the group: two codes to a byte where they fit, the last byte half used."""
    rng = np.random.default_rng(depth)
    codes = rng.integers(0, high, (depth, width)).astype(np.uint8)
    blocks = -(-depth // group)
    scale, zero = rng.uniform(0.01, 0.1, (blocks, width)), rng.integers(0, high, (blocks, width))
    full = [np.repeat(a, group, 0)[:depth].astype(np.float32) for a in (scale, zero)]
    x = rng.standard_normal((rows, depth)).astype(np.float32)

    def body(emit, v):
        centred = emit(R.subtract(emit(R.astype(relax.const(codes), "float32")), relax.const(full[1])))
        return R.matmul(v, emit(R.multiply(centred, relax.const(full[0]))))

    found, rules = run(module([((rows, depth), "float32")], body), native(), [x])
    expected = x.astype(np.float64) @ ((codes - full[1].astype(np.float64)) * full[0])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert rules == ["cpu.weight_only"]


def test_weights_written_as_a_cast_and_a_transpose():
    rng = np.random.default_rng(1)
    codes = rng.integers(-128, 128, (80, 96)).astype(np.int8)
    scale = rng.uniform(0.01, 0.1, (80, 1)).astype(np.float32)
    x = rng.standard_normal((7, 96)).astype(np.float32)

    def body(emit, v):
        scaled = emit(R.multiply(emit(R.astype(relax.const(codes), "float32")), relax.const(scale)))
        return R.matmul(v, emit(R.permute_dims(scaled)))

    found, rules = run(module([((7, 96), "float32")], body), native(), [x])
    expected = x.astype(np.float64) @ (codes * scale.astype(np.float64)).T
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert rules == ["cpu.weight_only"]


def test_odd_groups_become_floats():
    """No usual group size: one float constant instead of scaling the weights at every run."""
    rng = np.random.default_rng(2)
    codes = rng.integers(-128, 128, (96, 64)).astype(np.int8)
    scale = rng.uniform(0.01, 0.1, (96, 64)).astype(np.float32)
    x = rng.standard_normal((7, 96)).astype(np.float32)

    def body(emit, v):
        return R.matmul(v, emit(R.multiply(emit(R.astype(relax.const(codes), "float32")), relax.const(scale))))

    found, rules = run(module([((7, 96), "float32")], body), native(), [x])
    expected = x.astype(np.float64) @ (codes * scale.astype(np.float64))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert rules == ["cpu.matmul"]
