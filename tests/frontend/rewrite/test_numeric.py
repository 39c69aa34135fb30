"""LpNormalization, CumProd, Det, com.microsoft RotaryEmbedding."""

from __future__ import annotations

import numpy as np
import pytest

from tests.frontend.rewrite.check import assert_same, backend_cases, check_backend_case, one_node, ort_run
from tvmx.errors import ModelError
from tvmx.frontend.rewrite import rewrite_all

RNG = np.random.default_rng(4)
PREFIXES = ("cumprod", "det", "group_normalization", "l1normalization", "l2normalization", "lpnormalization", "mvn")


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("version", [12, 18])
def test_lp_normalization_keeps_zero_vectors(p, axis, version):
    x = RNG.standard_normal((3, 4)).astype(np.float32)
    x[1] = 0
    x[:, 2] = 0
    model = one_node("LpNormalization", {"x": x}, version=version, p=p, axis=axis)
    assert_same(model, {"x": x}, ["LpNormalization"])


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_det(n):
    x = RNG.standard_normal((2, 3, n, n)).astype(np.float32)
    assert_same(one_node("Det", {"x": x}), {"x": x}, ["Det"], rtol=1e-4, atol=1e-5)


def test_large_det_is_refused():
    with pytest.raises(ModelError, match=r"\(Det\)"):
        rewrite_all(one_node("Det", {"x": np.zeros((5, 5), np.float32)}))


@pytest.mark.parametrize("case", backend_cases(*PREFIXES))
def test_onnx_node_tests(case):
    gone = ["CumProd", "Det", "LpNormalization", "GroupNormalization", "MeanVarianceNormalization"]
    check_backend_case(case, gone, bound=["axis"], atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_cum_prod_reversed_and_exclusive(length):
    x = RNG.standard_normal((2, length)).astype(np.float32)
    inputs = {"x": x, "axis": np.array(1)}
    model = one_node("CumProd", inputs, constants={"axis": inputs["axis"]}, version=26, reverse=1, exclusive=1)
    got = ort_run(rewrite_all(model), {"x": x})[0]
    want = np.concatenate([np.cumprod(x[:, ::-1], 1)[:, ::-1][:, 1:], np.ones((2, 1))], 1)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("four", [False, True])
@pytest.mark.parametrize("offset", [False, True])
def test_contrib_rotary_embedding(interleaved, four, offset):
    batch, heads, steps, size = 2, 3, 4, 8
    shape = (batch, heads, steps, size) if four else (batch, steps, heads * size)
    angles = RNG.standard_normal((10, size // 2)).astype(np.float32)
    inputs = {
        "x": RNG.standard_normal(shape).astype(np.float32),
        "positions": np.array([2]) if offset else RNG.integers(0, 10, (batch, steps)),
        "cos": np.cos(angles),
        "sin": np.sin(angles),
    }
    model = one_node("RotaryEmbedding", inputs, domain="com.microsoft", interleaved=interleaved)
    assert_same(model, inputs, ["RotaryEmbedding"])


def grouped(x, groups):
    """Group normalisation without scale and bias, in float64."""
    parts = x.astype(np.float64).reshape(x.shape[0], groups, -1)
    mean, var = parts.mean(2, keepdims=True), parts.var(2, keepdims=True)
    return ((parts - mean) / np.sqrt(var + 1e-5)).reshape(x.shape)


@pytest.mark.parametrize("version", [18, 21])
@pytest.mark.parametrize("shape", [(2, 6, 5), (2, 6, 4, 3), (1, 6, 2, 3, 2)])
def test_group_normalization_far_from_zero(version, shape):
    x = (RNG.standard_normal(shape) + 1000).astype(np.float32)
    per = 3 if version == 18 else 6
    scale, bias = (RNG.standard_normal(per).astype(np.float32) for _ in range(2))
    inputs = {"x": x, "scale": scale, "bias": bias}
    model = one_node("GroupNormalization", inputs, version=version, num_groups=3)
    got = ort_run(rewrite_all(model), inputs)[0]
    channels = [1, 6, *[1] * (len(shape) - 2)]
    spread = [np.repeat(v, 6 // per).reshape(channels) for v in (scale, bias)]
    np.testing.assert_allclose(got, grouped(x, 3) * spread[0] + spread[1], atol=2e-3)


def test_mean_variance_normalization_over_any_axes():
    x = (RNG.standard_normal((3, 4, 5)) + 100).astype(np.float32)
    got = ort_run(rewrite_all(one_node("MeanVarianceNormalization", {"x": x}, axes=[1])), {"x": x})[0]
    want = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    np.testing.assert_allclose(got, want, atol=1e-3)
