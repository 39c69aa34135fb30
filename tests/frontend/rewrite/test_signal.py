"""DFT against numpy.fft, STFT against framed FFTs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.frontend.rewrite.check import backend_cases, check_backend_case, one_node, ort_run
from tvmx.errors import ModelError
from tvmx.frontend.rewrite import rewrite_all


def packed(x):
    return np.stack([x.real, x.imag], -1).astype(np.float32)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 99),
    length=st.integers(2, 20),
    points=st.sampled_from([None, 5, 8, 16]),
    kind=st.sampled_from(["fft", "ifft", "rfft", "complex rfft", "irfft"]),
    axis=st.sampled_from([0, 1, -2, -3]),
    version=st.sampled_from([17, 20]),
)
def test_dft_is_numpys(seed, length, points, kind, axis, version):
    rng = np.random.default_rng(seed)
    real, onesided = kind == "rfft", "rfft" in kind
    shape = [3, 3]
    shape[axis if axis >= 0 else axis + 1] = length  # numpy's axis, without the complex parts
    np_axis = axis if axis >= 0 else axis + 1
    x = rng.standard_normal(shape) + (0 if real else 1j * rng.standard_normal(shape))
    if kind == "irfft":
        np.moveaxis(x, np_axis, 0)[0] = np.moveaxis(x, np_axis, 0)[0].real
    n = points or (2 * (length - 1) if kind == "irfft" else length)
    if kind == "irfft" and n // 2 + 1 <= length:  # the bin in the middle of a real signal is real
        np.moveaxis(x, np_axis, 0)[n // 2] = np.moveaxis(x, np_axis, 0)[n // 2].real
    feed = x.real[..., None].astype(np.float32) if real else packed(x)
    inputs = {"x": feed, "n": None if points is None else np.array(points)}
    attrs = {"onesided": int(onesided), "inverse": int(kind in ("ifft", "irfft"))}
    if version >= 20:
        inputs["axis"] = np.array(axis)
    else:
        attrs["axis"] = axis
    fixed = {k: v for k, v in inputs.items() if k != "x" and v is not None}
    got = ort_run(rewrite_all(one_node("DFT", inputs, constants=fixed, version=version, **attrs)), {"x": feed})[0]
    if kind == "irfft":
        want = np.fft.irfft(x, n, np_axis)[..., None]
    elif kind == "ifft":
        want = packed(np.fft.ifft(x, n, np_axis))
    else:
        want = np.fft.fft(x, n, np_axis)
        want = packed(np.take(want, np.arange(n // 2 + 1 if onesided else n), np_axis))
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("window", [True, False])
@pytest.mark.parametrize("complex_in", [True, False])
@pytest.mark.parametrize("onesided", [True, False])
def test_stft(window, complex_in, onesided):
    rng = np.random.default_rng(1)
    length, frame, step = 50, 16, 6
    x = rng.standard_normal((2, length)) + (1j * rng.standard_normal((2, length)) if complex_in else 0)
    onesided = onesided and not complex_in
    w = np.hanning(frame).astype(np.float32)
    inputs = {
        "x": packed(x) if complex_in else x.real[..., None].astype(np.float32),
        "step": np.array(step),
        "w": w if window else None,
        "frame": np.array(frame),
    }
    fixed = {"step": inputs["step"], "frame": inputs["frame"]}
    model = one_node("STFT", inputs, constants=fixed, onesided=int(onesided))
    got = ort_run(rewrite_all(model), {k: v for k, v in inputs.items() if v is not None})[0]
    starts = range(0, length - frame + 1, step)
    frames = np.stack([x[:, s : s + frame] for s in starts], 1) * (w if window else 1)
    want = np.fft.fft(frames)[..., : frame // 2 + 1 if onesided else frame]
    np.testing.assert_allclose(got, packed(want), atol=1e-4)


@pytest.mark.parametrize("case", backend_cases("dft", "stft", "melweightmatrix"))
def test_onnx_node_tests(case):
    parameters = ["axis", "dft_length", "frame_step", "frame_length"]
    mel = ["num_mel_bins", "dft_length", "sample_rate", "lower_edge_hertz", "upper_edge_hertz"]
    check_backend_case(case, ["DFT", "STFT", "MelWeightMatrix"], bound=[*parameters, *mel], atol=1e-4)


def test_long_transform_is_refused():
    x = np.zeros((1, 5000, 1), np.float32)
    with pytest.raises(ModelError, match=r"\(DFT\): a transform of 5000 points; use 1 to 4096"):
        rewrite_all(one_node("DFT", {"x": x}))
