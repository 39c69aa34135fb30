"""Integer kernels are exact over the whole range of their operands, on every x86 path that this machine has."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op as R

from tests.passes.qdq.helpers import HOSTS, codes, conv_sums, module, native, passes, run
from tvmx.passes.constants import as_array
from tvmx.pipeline import lower, qdq
from tvmx.target import resolve

CONVS = {
    "padded": dict(x=(1, 14, 14, 32), w=(3, 3, 32, 64), pads=(1, 1, 1, 1), fill=7),
    "three channels, strided": dict(x=(1, 15, 13, 3), w=(3, 3, 3, 20), strides=(2, 2), pads=(1, 1, 1, 1), fill=200),
    "1x1, signed": dict(x=(2, 7, 7, 16), w=(1, 1, 16, 24), data="int8"),
    "1x1, odd channels": dict(x=(2, 7, 7, 18), w=(1, 1, 18, 17)),
    "grouped, dilated, signed": dict(
        x=(1, 9, 9, 12), w=(3, 3, 6, 10), groups=2, dilation=(2, 2), pads=(2, 1, 2, 1), fill=-5, data="int8"
    ),
    "depthwise": dict(x=(1, 9, 9, 16), w=(3, 3, 1, 16), groups=16, pads=(1, 1, 1, 1), fill=3),
    "one channel, strided": dict(x=(2, 11, 13, 1), w=(3, 5, 1, 20), strides=(2, 3), pads=(1, 2, 0, 1), fill=9),
    "one channel, signed": dict(x=(1, 1, 64, 1), w=(1, 16, 1, 24), strides=(1, 8), data="int8"),
    "nine-bit weights": dict(x=(1, 9, 9, 16), w=(5, 3, 16, 16), weight="int16"),
}


def _conv(
    target, x, w, data="uint8", weight="int8", strides=(1, 1), pads=(0, 0, 0, 0), dilation=(1, 1), groups=1, fill=0
):
    rng = np.random.default_rng(0)
    weights = codes(rng, w, "int8")
    if weight == "int16":
        weights = (weights.astype(np.int16) * 2).clip(-255, 255)
    array = codes(rng, x, data)
    depthwise = groups > 1 and w[2] == 1

    def body(emit, v):
        widths = [0, 0, pads[0], pads[2], pads[1], pads[3], 0, 0]
        padded = emit(R.nn.pad(v, widths, "constant", float(fill))) if any(pads) else v
        return R.nn.conv2d(
            padded,
            relax.const(weights),
            strides=strides,
            dilation=dilation,
            groups=groups,
            data_layout="NHWC",
            kernel_layout="HWIO",
            out_dtype="float32" if depthwise else "int32",
        )

    found, rules = run(module([(x, data)], body), target, [array])
    expected = conv_sums(array, weights, strides, pads, dilation, groups, fill)
    np.testing.assert_array_equal(found, expected)
    assert rules == ["cpu.depthwise_conv2d" if depthwise else "cpu.dot_matmul" if w[:2] == (1, 1) else "cpu.dot_conv"]


@pytest.mark.parametrize("case", CONVS)
def test_conv(case):
    _conv(native(threads=2), **CONVS[case])


@pytest.mark.parametrize("target", HOSTS, ids=lambda t: t.name)
def test_conv_on_each_path(target):
    _conv(target, **CONVS["grouped, dilated, signed"])
    _conv(target, **CONVS["padded"])


@pytest.mark.parametrize(
    ("case", "size"), [("depthwise", 3 * 3 * 16), ("three channels, strided", (3 * 3 * 20 + 12) * 4)], ids=str
)
def test_weights_are_stored_in_eight_bits_without_padding(case, size):
    """Depthwise ones are widened in the kernel; a panel that its channels do not fill is cut."""
    conv = CONVS[case]
    body = lambda emit, v: R.nn.conv2d(  # noqa: E731
        v,
        relax.const(np.ones(conv["w"], np.int8)),
        groups=conv.get("groups", 1),
        data_layout="NHWC",
        kernel_layout="HWIO",
        out_dtype="float32" if "groups" in conv else "int32",
    )
    lowered = passes(module([(conv["x"], "uint8")], body), resolve("x86_64-avx512-vnni", threads=1), qdq, lower)
    found: list[np.ndarray] = []
    relax.analysis.post_order_visit(lowered["main"], lambda e: found.extend(a for a in [as_array(e)] if a is not None))
    assert [(a.dtype, a.nbytes) for a in found] == [(np.int8, size)]


@pytest.mark.parametrize("target", HOSTS, ids=lambda t: t.name)
@pytest.mark.parametrize("sign", [1, -1])
def test_worst_case_is_exact(target, sign):
    """All operands at their ends: a unit that saturates 16-bit pairs would be off by thousands."""
    weights = np.full((64, 32), 127 if sign > 0 else -128, np.int8)
    array = np.full((9, 64), 255, np.uint8)
    mod = module([((9, 64), "uint8")], lambda emit, v: R.matmul(v, relax.const(weights), "int32"))
    found, rules = run(mod, target, [array])
    np.testing.assert_array_equal(found, array.astype(np.int64) @ weights.astype(np.int64))
    assert rules == ["cpu.dot_matmul"]


@pytest.mark.parametrize("target", HOSTS, ids=lambda t: t.name)
def test_small_weights_reach_the_pair_unit_exactly(target):
    rng = np.random.default_rng(3)
    weights = rng.choice([-64, 63], (64, 32)).astype(np.int8)
    array = np.full((9, 64), 255, np.uint8)
    mod = module([((9, 64), "uint8")], lambda emit, v: R.matmul(v, relax.const(weights), "int32"))
    found, _ = run(mod, target, [array])
    np.testing.assert_array_equal(found, array.astype(np.int64) @ weights.astype(np.int64))


@pytest.mark.parametrize(
    ("a", "b", "data", "weight"),
    [
        ((7, 33), (33, 50), "uint8", "int8"),
        ((2, 5, 64), (64, 96), "int8", "int8"),
        ((3, 8, 64), (64, 8), "uint8", "uint8"),
    ],
)
def test_matmul_by_a_constant(a, b, data, weight):
    rng = np.random.default_rng(1)
    array, matrix = codes(rng, a, data), codes(rng, b, weight)
    mod = module([(a, data)], lambda emit, v: R.matmul(v, relax.const(matrix), "int32"))
    found, rules = run(mod, native(), [array])
    np.testing.assert_array_equal(found, np.matmul(array.astype(np.int64), matrix.astype(np.int64)))
    assert rules == ["cpu.dot_matmul"]


@pytest.mark.parametrize(("a", "b"), [((2, 12, 16), (2, 16, 20)), ((1, 8), (8, 5)), ((2, 3, 9, 17), (2, 3, 17, 6))])
def test_matmul_of_two_computed_operands(a, b):
    rng = np.random.default_rng(2)
    x, y = codes(rng, a, "uint8"), codes(rng, b, "int8")
    mod = module([(a, "uint8"), (b, "int8")], lambda emit, v, w: R.matmul(v, w, "int32"))
    found, rules = run(mod, native(threads=2), [x, y])
    np.testing.assert_array_equal(found, np.matmul(x.astype(np.int64), y.astype(np.int64)))
    assert rules == ["cpu.dot_matmul"]


def test_quantize_rounds_half_to_even_and_saturates():
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 300, -300, 0.25, 127.5], np.float32)
    scale, zero = relax.const(np.float32(0.5)), relax.const(np.int8(3))
    mod = module([((9,), "float32")], lambda emit, v: R.quantize(v, scale, zero, 0, "int8"))
    found, _ = run(mod, native(), [x])
    expected = np.clip(np.rint(x / np.float32(0.5)) + 3, -128, 127).astype(np.int8)
    np.testing.assert_array_equal(found, expected)


def test_a_long_chain_of_quantize_and_dequantize_builds():
    """TVM's simplifier once took four times as long for each further pair: this chain would have taken hours."""
    rng = np.random.default_rng(4)
    x = rng.uniform(-3, 3, 64).astype(np.float32)
    zeros, scales = rng.integers(1, 255, 14), rng.uniform(0.01, 0.02, 14).astype(np.float32)

    def body(emit, v):
        for zero, scale in zip(zeros, scales):
            params = relax.const(scale), relax.const(np.uint8(zero))
            v = emit(R.dequantize(emit(R.quantize(v, *params, 0, "uint8")), *params, 0, "float32"))
        return v

    found, _ = run(module([((64,), "float32")], body), native(), [x])
    expected = x
    for zero, scale in zip(zeros.astype(np.float32), scales):
        expected = (np.clip(np.rint(expected / scale) + zero, 0, 255) - zero) * scale
    np.testing.assert_array_equal(found, expected)
