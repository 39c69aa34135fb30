"""Convolutions and pools of images of unknown size or count."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

import tvmx
from tests.onnx_models import assert_close, model, reference
from tests.run_model import run_model
from tvmx.errors import ModelError
from tvmx.runtime import GraphExecutor

RNG = np.random.default_rng(0)


def weight(*shape):
    return (RNG.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


def check(proto, shapes, sizes, folder):
    path = tvmx.compile(proto, folder / "m.so", threads=1, shapes=shapes).path
    with GraphExecutor(path) as executor:
        for size in sizes:
            x = RNG.standard_normal(size).astype(np.float32)
            assert_close(executor({"x": x}), reference(proto, {"x": x}))


def pool(op="MaxPool", **attrs):
    attrs = {"kernel_shape": [2, 2], "strides": [2, 2], **attrs}
    return model([helper.make_node(op, ["x"], ["y"], **attrs)], {"x": ("n", 3, "h", "w")}, {"y": list("abcd")})


def test_a_window_that_is_cut_at_the_border_with_a_symbolic_batch(tmp_path):
    proto = pool(kernel_shape=[3, 3], ceil_mode=1)
    check(proto, {"x": ("N", 3, 22, 22)}, [(1, 3, 22, 22), (3, 3, 22, 22)], tmp_path)


@pytest.mark.parametrize(("k", "s"), [(2, 2), (3, 2), (4, 2)])
@pytest.mark.parametrize("side", ["SAME_UPPER", "SAME_LOWER"])
def test_same_padding_of_a_symbolic_size(tmp_path, side, k, s):
    proto = pool(kernel_shape=[k, k], strides=[s, s], auto_pad=side)
    if (side == "SAME_UPPER") == (k == 3):  # the first pad depends on whether the size is odd
        with pytest.raises(ModelError, match="auto_pad with stride 2 needs a fixed size"):
            tvmx.import_onnx(proto)
        return
    check(proto, {"x": (1, 3, "H", "W")}, [(1, 3, 8, 9), (1, 3, 13, 6), (1, 3, 1, 2)], tmp_path)


def nested():
    node = helper.make_node
    return model(
        [
            node("Conv", ["x", "w0", "b0"], ["c0"]),
            node("PRelu", ["c0", "a"], ["r0"]),
            node("MaxPool", ["r0"], ["p"], kernel_shape=[2, 2], strides=[2, 2], auto_pad="SAME_UPPER"),
            node("Conv", ["p", "w1", "b0"], ["c1"]),
            node("PRelu", ["c1", "a"], ["y"]),
        ],
        {"x": ("n", 3, "h", "w")},
        {"y": ("n", 8, "i", "j")},
        {"w0": weight(8, 3, 3, 3), "w1": weight(8, 8, 3, 3), "b0": weight(8, 1)[:, 0], "a": weight(8, 1, 1)},
    )


def test_sizes_are_written_alike_all_the_way(tmp_path, caplog):
    """FuseTIR refused to join kernels that wrote H - 3 + 1 and H - 2."""
    check(nested(), {"x": ("N", 3, "H", "W")}, [(1, 3, 12, 15), (2, 3, 21, 8)], tmp_path)
    assert "unfused" not in caplog.text


def test_kernels_that_cannot_be_joined_are_left_apart(tmp_path, monkeypatch, caplog):
    from tvm import relax

    def fail():
        raise RuntimeError("planted")

    monkeypatch.setattr(relax.transform, "FuseTIR", fail)
    x = RNG.standard_normal((1, 3, 12, 15)).astype(np.float32)
    proto = nested()
    assert_close(run_model(proto, {"x": x}, tmp_path, shapes={"x": x.shape}), reference(proto, {"x": x}))
    assert "unfused" in caplog.text
    assert "planted" in caplog.text
