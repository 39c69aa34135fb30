"""Integers computed on the way through float kernels, and run-time quantisers: equal to the definition, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from tests.onnx_models import model
from tests.run_model import run_model


@pytest.mark.parametrize("shape", [(1, 28, 28, 32), (1, 9, 13, 4)], ids=str)
def test_conv_integer_is_exact_at_sizes_that_winograd_would_take(tmp_path, shape):
    """Winograd leaves 4.9999 for 5, and the cast to int32 makes 4 of it."""
    rng = np.random.default_rng(0)
    n, h, w, c = shape
    x = rng.integers(0, 256, (n, c, h, w), dtype=np.uint8)
    weight = rng.integers(-128, 128, (16, c, 3, 3), dtype=np.int8)
    zero = np.array(117, np.uint8)
    proto = model(
        [helper.make_node("ConvInteger", ["x", "w", "z"], ["y"], pads=[1, 1, 1, 1])],
        {"x": (x.shape, TensorProto.UINT8), "z": ((), TensorProto.UINT8)},
        {"y": ((n, 16, h, w), TensorProto.INT32)},
        {"w": weight},
    )
    got = run_model(proto, {"x": x, "z": zero}, tmp_path)["y"]
    wide = np.pad(x.astype(np.int64) - 117, ((0, 0), (0, 0), (1, 1), (1, 1)))
    patches = np.lib.stride_tricks.sliding_window_view(wide, (3, 3), (2, 3))
    np.testing.assert_array_equal(got, np.einsum("nchwij,ocij->nohw", patches, weight.astype(np.int64)))


@pytest.mark.parametrize("seed", range(4))
def test_run_time_quantiser_equals_its_definition(tmp_path, seed):
    """A scale off by one ulp, as range * (1 / 255) makes it, moves values across the rounding of every layer after."""
    x = np.random.default_rng(seed).standard_normal((3, 4000)).astype(np.float32) * np.float32(1.7)
    proto = model(
        [helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])],
        {"x": x.shape},
        {"y": (x.shape, TensorProto.UINT8), "s": (), "z": ((), TensorProto.UINT8)},
    )
    got = run_model(proto, {"x": x}, tmp_path)
    scale = (np.maximum(x.max(), np.float32(0)) - np.minimum(x.min(), np.float32(0))) / np.float32(255)
    zero = np.clip(np.rint(-x.min() / scale), 0, 255)
    assert got["s"] == scale
    assert got["z"] == zero
    np.testing.assert_array_equal(got["y"], np.clip(np.rint(x / scale) + zero, 0, 255).astype(np.uint8))
