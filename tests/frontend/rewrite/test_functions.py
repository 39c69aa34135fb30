"""Operators replaced by ONNX's own function body: ONNX's node tests, and the attributes' defaults."""

from __future__ import annotations

import numpy as np
import pytest

from tests.frontend.rewrite.check import assert_same, backend_cases, check_backend_case, one_node, run_anywhere
from tvmx.frontend.rewrite import rewrite_all
from tvmx.frontend.rewrite.functions import OPS

PREFIXES = (
    "blackmanwindow",
    "causal_conv_with_state",
    "celu",
    "center_crop_pad",
    "hammingwindow",
    "hannwindow",
    "linear_attention",
    "nllloss",
    "rotary_embedding",
    "sce",
    "swiglu",
    "swish",
)
CASES = [c for p in PREFIXES for c in backend_cases(p, required=False)]


@pytest.mark.parametrize("case", CASES)
def test_onnx_node_tests(case):
    if "bfloat16" in case.name:
        pytest.skip("numpy and ONNX Runtime do not exchange bfloat16")
    check_backend_case(case, OPS, bound=["shape"], atol=1e-5)


@pytest.mark.parametrize("attrs", [{}, {"alpha": 0.3}])
def test_celu_with_and_without_alpha(attrs):
    x = np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)
    assert_same(one_node("Celu", {"x": x}, version=14, **attrs), {"x": x}, ["Celu"])


def test_window_of_a_constant_size_is_a_constant():
    model = one_node("HannWindow", {"n": np.array(16)}, constants={"n": np.array(16)}, periodic=0)
    rewritten = rewrite_all(model)
    assert len(rewritten.graph.node) <= 1  # an output must have a producer
    np.testing.assert_allclose(run_anywhere(rewritten, {})[0], np.hanning(16), atol=1e-6)
