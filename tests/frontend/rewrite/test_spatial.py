"""ReverseSequence, Col2Im and DeformConv."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.frontend.rewrite.check import assert_same, backend_cases, check_backend_case, one_node, run_anywhere
from tvmx.errors import ModelError
from tvmx.frontend.rewrite import rewrite_all

RNG = np.random.default_rng(2)


@pytest.mark.parametrize("time", [0, 1])
@pytest.mark.parametrize("const", [True, False])
@pytest.mark.parametrize("rest", [(), (3,), (2, 2)])
def test_reverse_sequence(time, const, rest):
    x = RNG.standard_normal((5, 4, *rest) if time == 0 else (4, 5, *rest)).astype(np.float32)
    lens = np.array([1, 5, 3, 2])
    fixed = {"lens": lens} if const else {}
    model = one_node("ReverseSequence", {"x": x, "lens": lens}, constants=fixed, time_axis=time, batch_axis=1 - time)
    assert_same(model, {"x": x, "lens": lens}, ["ReverseSequence"], rtol=0, atol=0)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    image=st.tuples(st.integers(5, 9), st.integers(5, 9)),
    block=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilations=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    pads=st.lists(st.integers(0, 1), min_size=4, max_size=4),
)
def test_col2im(image, block, strides, dilations, pads):
    """Against ONNX Runtime; strides that leave rows of the image uncovered are included."""
    counts = [
        (i + pads[k] + pads[k + 2] - d * (b - 1) - 1) // s + 1
        for k, (i, b, s, d) in enumerate(zip(image, block, strides, dilations))
    ]
    x = np.random.default_rng(0).standard_normal((2, 3 * block[0] * block[1], counts[0] * counts[1]))
    fixed = {"image": np.array(image), "block": np.array(block)}
    inputs = {"x": x.astype(np.float32), **fixed}
    attrs = {"strides": strides, "dilations": dilations, "pads": pads}
    model = one_node("Col2Im", inputs, constants=fixed, version=18, **attrs)
    assert_same(model, inputs, ["Col2Im"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("shifts", [1, 2])
@pytest.mark.parametrize("extras", [True, False])
def test_deform_conv(group, shifts, extras):
    """Against onnx.reference: groups, offset groups, mask, bias, strides, pads, dilations."""
    x = RNG.standard_normal((2, 4, 7, 6)).astype(np.float32)
    w = RNG.standard_normal((6, 4 // group, 3, 2)).astype(np.float32)
    attrs = {"strides": [2, 1], "pads": [1, 0, 1, 1], "dilations": [1, 2]} if extras else {}
    out = (4, 5) if extras else (5, 5)
    inputs = {
        "x": x,
        "w": w,
        "offset": (RNG.standard_normal((2, shifts * 12, *out)) * 1.5).astype(np.float32),
        "b": RNG.standard_normal(6).astype(np.float32) if extras else None,
        "mask": RNG.random((2, shifts * 6, *out)).astype(np.float32) if extras else None,
    }
    model = one_node("DeformConv", inputs, version=19, group=group, offset_group=shifts, **attrs)
    feeds = {k: v for k, v in inputs.items() if v is not None}
    assert_same(model, feeds, ["DeformConv"], rtol=1e-4, atol=1e-4, run=run_anywhere)


BOUND = ["image_shape", "block_shape"]


@pytest.mark.parametrize("case", backend_cases("reversesequence", "col2im", "basic_deform_conv", "deform_conv"))
def test_onnx_node_tests(case):
    if "bfloat16" in case.name:
        pytest.skip("numpy and ONNX Runtime do not exchange bfloat16")
    check_backend_case(case, ["ReverseSequence", "Col2Im", "DeformConv"], bound=BOUND, atol=1e-5)


def test_col2im_of_a_computed_shape_is_refused():
    inputs = {"x": np.zeros((1, 4, 4), np.float32), "image": np.array([3, 3]), "block": np.array([2, 2])}
    with pytest.raises(ModelError, match=r"the image shape \('image'\) is not a constant; bind"):
        rewrite_all(one_node("Col2Im", inputs, version=18))
