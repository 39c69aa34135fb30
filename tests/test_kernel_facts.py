"""Names of fused kernels for people (what is read from kernels is tested in test_graph.py)."""

from __future__ import annotations

import pytest

from tvmx.kernel_facts import readable_op


@pytest.mark.parametrize(
    ("kernel", "op"),
    [
        ("fused_conv2d1_add2_relu", "conv2d+add+relu"),
        ("fused_conv2d_1x1_add_tir_sigmoid3_multiply", "conv2d_1x1+add+sigmoid+multiply"),
        ("layer_norm4", "layer_norm"),
        ("softmax", "softmax"),
        ("fused_strided_slice1_strided_slice2_add", "strided_slice+strided_slice+add"),
        ("winograd_tile_thing", "winograd+tile+thing"),
        ("123", "123"),
    ],
)
def test_readable_op(kernel, op):
    assert readable_op(kernel) == op
