"""Convolutions whose zero point is computed at run time (ConvInteger) run on integer kernels, exactly."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op as R

from tests.passes.qdq.helpers import HOSTS, codes, conv_sums, module, native, passes, run
from tvmx.passes.qdq.report import read_report
from tvmx.pipeline import qdq

CASES = {
    "padded": dict(x=(1, 9, 8, 16), w=(3, 3, 16, 20), pads=(1, 1, 1, 1)),
    "one side, strided": dict(x=(2, 9, 8, 5), w=(3, 2, 5, 7), pads=(0, 2, 1, 0), strides=(2, 1)),
    "pointwise": dict(x=(1, 5, 5, 24), w=(1, 1, 24, 18)),
    "depthwise": dict(x=(1, 9, 9, 16), w=(3, 3, 1, 16), pads=(1, 1, 1, 1), groups=16),
    "grouped, dilated": dict(x=(1, 9, 9, 8), w=(3, 3, 4, 6), pads=(2, 2, 2, 2), groups=2, dilation=(2, 2)),
    "signed": dict(x=(1, 6, 6, 8), w=(3, 3, 8, 8), pads=(1, 1, 1, 1), data="int8", zero=-7),
    "weights with zero points": dict(x=(1, 6, 6, 8), w=(3, 3, 8, 8), pads=(1, 1, 1, 1), weight="uint8"),
    "lowest": dict(x=(1, 6, 6, 8), w=(3, 3, 8, 8), pads=(1, 1, 1, 1), zero=0),
    "highest": dict(x=(1, 6, 6, 8), w=(3, 3, 8, 8), pads=(1, 1, 1, 1), zero=255),
}


def program(
    x, w, pads=(0, 0, 0, 0), strides=(1, 1), dilation=(1, 1), groups=1, data="uint8", weight="int8", zero=113, moved=()
):
    """(module over codes and their zero point, its arguments, what it computes)"""
    rng = np.random.default_rng(4)
    array, weights = codes(rng, x, data), codes(rng, w, weight)
    low = np.zeros(w[3], weight) if weight == "int8" else rng.integers(100, 150, w[3]).astype(weight)
    ones = relax.const(np.ones(w[3], np.float32))
    order = list(moved) or [0, 1, 2, 3]

    def body(emit, v, z):
        real = emit(R.dequantize(v, relax.const(np.float32(1)), z, -1, "float32"))
        real = emit(R.permute_dims(real, order)) if moved else real
        y = R.nn.conv2d(
            real,
            emit(R.dequantize(relax.const(weights), ones, relax.const(low), 3, "float32")),
            strides=strides,
            padding=pads,
            dilation=dilation,
            groups=groups,
            data_layout="NHWC",
            kernel_layout="HWIO",
        )
        return R.astype(emit(y), "int32")

    given = array.transpose(np.argsort(order))
    mod = module([(given.shape, data), ((), data)], body)
    wide = weights.astype(np.int64) - low.astype(np.int64)
    expected = conv_sums(array.astype(np.int64) - zero, wide, strides, pads, dilation, groups)
    return mod, [np.ascontiguousarray(given), np.array(zero, data)], expected


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", [native(2), *HOSTS[:2]], ids=lambda t: t.name)
def test_it_is_exact(case, target):
    mod, arguments, expected = program(**CASES[case])
    found, rules = run(mod, target, arguments)
    np.testing.assert_array_equal(found, expected)
    kinds = {"cpu.depthwise_conv2d"} if case == "depthwise" else {"cpu.dot_conv", "cpu.dot_matmul"}
    assert kinds & set(rules)


def test_codes_are_transposed_in_place_of_floats():
    mod, arguments, expected = program(**CASES["padded"], moved=(0, 2, 3, 1))
    found, rules = run(mod, native(), arguments)
    np.testing.assert_array_equal(found, expected)
    assert "cpu.dot_conv" in rules


def test_explain_names_the_rule():
    mod, _, _ = program(**CASES["padded"])
    report = read_report(passes(mod, native(), qdq))
    assert any("dynamic_conv2d" in entry.detail for entry in report.entries)
