"""Integer convolutions and products with everything that joins them, against ONNX's meaning in exact arithmetic.

A code may differ from the exact one by one step, and only where the exact value lies within the rounding of a float32
scale of the middle between two codes; everywhere else it is equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op as R

from tests.passes.qdq.helpers import codes, conv_sums, module, native, passes, run
from tvmx.passes.qdq import _rewrite
from tvmx.pipeline import layout

QUICK = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SLACK = 2e-4  # of a step, times the codes' size: what float32 products may move a value


@dataclass(frozen=True)
class Case:
    """One quantised convolution: NHWC data, HWIO weights, what follows it."""

    size: tuple[int, int]
    kernel: tuple[int, int]
    channels: int  # per group
    out: int  # per group
    groups: int
    strides: tuple[int, int]
    pads: tuple[int, int, int, int]
    dilation: tuple[int, int]
    data: str
    zero: int
    per_channel: bool
    near_zero: bool  # one channel's weights and scale are tiny
    bias: int  # its size in steps, 0 for none
    residual: bool
    activation: str  # "none" | "relu" | "clip"
    output: str
    seed: int


def pair(low, high):
    return st.tuples(st.integers(low, high), st.integers(low, high))


@st.composite
def cases(draw):
    kernel, dilation = draw(pair(1, 3)), draw(pair(1, 2))
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation)]
    size = draw(st.tuples(st.integers(reach[0], 9), st.integers(reach[1], 9)))
    depthwise = draw(st.booleans())
    groups = draw(st.integers(2, 20)) if depthwise else draw(st.sampled_from([1, 1, 2]))
    data = draw(st.sampled_from(["uint8", "int8"]))
    low, high = (0, 255) if data == "uint8" else (-128, 127)
    return Case(
        size=size,
        kernel=kernel,
        channels=1 if depthwise else draw(st.integers(1, 9)),
        out=1 if depthwise else draw(st.integers(1, 19)),
        groups=groups,
        strides=draw(pair(1, 2)),
        pads=draw(st.tuples(*[st.integers(0, 2)] * 4)),
        dilation=dilation,
        data=data,
        zero=draw(st.sampled_from([low, high, 0 if low < 0 else 128, draw(st.integers(low, high))])),
        per_channel=draw(st.booleans()),
        near_zero=draw(st.booleans()),
        bias=draw(st.sampled_from([0, 5000, 1 << 28])),
        residual=draw(st.booleans()),
        activation=draw(st.sampled_from(["none", "relu", "clip"])),
        output=draw(st.sampled_from(["uint8", "int8"])),
        seed=draw(st.integers(0, 1000)),
    )


@dataclass(frozen=True)
class Values:
    """The arrays of a case, and the exact float64 result before it is rounded."""

    x: np.ndarray
    w: np.ndarray
    w_scale: np.ndarray  # [] or [channels]
    bias: np.ndarray | None
    other: np.ndarray | None
    exact: np.ndarray
    scale: np.float32
    zero: int
    bound: float


X_SCALE, OTHER_SCALE, OTHER_ZERO = np.float32(0.043), np.float32(0.071), 97


def values_of(case: Case) -> Values:
    rng = np.random.default_rng(case.seed)
    total = case.out * case.groups
    x = codes(rng, (1, *case.size, case.channels * case.groups), case.data)
    w = codes(rng, (*case.kernel, case.channels, total), "int8")
    w_scale = rng.uniform(0.001, 0.02, total if case.per_channel else ()).astype(np.float32)
    if case.near_zero and case.per_channel:
        w_scale[0] = 1e-9
    sums = conv_sums(x.astype(np.int64) - case.zero, w, case.strides, case.pads, case.dilation, case.groups)
    bias = rng.integers(-case.bias, case.bias, total).astype(np.int32) if case.bias else None
    real = (sums + (0 if bias is None else bias)) * (np.float64(X_SCALE) * w_scale.astype(np.float64))
    other = None
    if case.residual:
        other = codes(rng, sums.shape, "uint8")
        real = real + (other.astype(np.float64) - OTHER_ZERO) * np.float64(OTHER_SCALE)
    bound = float(np.float32(np.abs(real).max() / 2 + 0.01))
    if case.activation != "none":
        real = np.maximum(real, 0)
    if case.activation == "clip":
        real = np.minimum(real, bound)
    scale = np.float32(max(np.abs(real).max(), 0.01) / 150)
    zero = int(rng.integers(100, 156)) - (0 if case.output == "uint8" else 128)
    return Values(x, w, w_scale, bias, other, real, scale, zero, bound)


def program(case: Case, v: Values):
    """quantize(activation(conv(dequantize(x), dequantize(w)) + bias + dequantize(other)))"""
    const = relax.const

    def body(emit, x, *rest):
        data = emit(R.dequantize(x, const(X_SCALE), const(np.dtype(case.data).type(case.zero)), -1, "float32"))
        zeros = const(np.zeros(v.w_scale.shape, np.int8))
        weight = emit(R.dequantize(const(v.w), const(v.w_scale), zeros, 3, "float32"))
        y = emit(
            R.nn.conv2d(
                data, weight, strides=case.strides, padding=case.pads, dilation=case.dilation, groups=case.groups,
                data_layout="NHWC", kernel_layout="HWIO",
            )
        )  # fmt: skip
        if v.bias is not None:
            scale = const(np.asarray(X_SCALE * v.w_scale, np.float32))
            zeros = const(np.zeros(v.w_scale.shape, np.int32))
            y = emit(R.add(y, emit(R.dequantize(const(v.bias), scale, zeros, 0, "float32"))))
        if rest:
            added = emit(R.dequantize(rest[0], const(OTHER_SCALE), const(np.uint8(OTHER_ZERO)), -1, "float32"))
            y = emit(R.add(y, added))
        if case.activation == "relu":
            y = emit(R.nn.relu(y))
        elif case.activation == "clip":
            y = emit(R.clip(y, 0, v.bound))
        return R.quantize(y, const(v.scale), const(np.dtype(case.output).type(v.zero)), -1, case.output)

    params = [(v.x.shape, case.data)] + ([(v.other.shape, "uint8")] if v.other is not None else [])
    return module(params, body)


def check(found: np.ndarray, exact: np.ndarray, scale: np.float32, zero: int) -> None:
    """Equal to round-half-to-even and saturation but near ties, where one step is allowed."""
    steps = exact / np.float64(scale)
    info = np.iinfo(found.dtype)
    expected = np.clip(np.rint(steps) + zero, info.min, info.max)
    gap = np.abs(found.astype(np.int64) - expected)
    assert gap.max(initial=0) <= 1
    to_tie = np.abs(np.abs(steps - np.floor(steps)) - 0.5)
    assert to_tie[gap > 0].max(initial=0) <= SLACK


@QUICK
@given(cases())
def test_convolutions(case):
    v = values_of(case)
    arrays = [v.x] + ([v.other] if v.other is not None else [])
    found, rules = run(program(case, v), native(), arrays)
    check(found, v.exact, v.scale, v.zero)
    assert any(r in ("cpu.dot_conv", "cpu.dot_matmul", "cpu.depthwise_conv2d") for r in rules), rules


@QUICK
@given(
    rows=st.integers(1, 9), depth=st.integers(1, 70), width=st.integers(1, 40), per_column=st.booleans(),
    data=st.sampled_from(["uint8", "int8"]), weight=st.sampled_from(["uint8", "int8"]), computed=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_products(rows, depth, width, data, weight, per_column, computed, seed):
    """QLinearMatMul, a scale and a zero point per column of a constant right operand included."""
    rng = np.random.default_rng(seed)
    per_column = per_column and not computed
    a, b = codes(rng, (2, rows, depth), data), codes(rng, (2, depth, width) if computed else (depth, width), weight)
    za = int(rng.integers(0, 100))
    scale = rng.uniform(0.001, 0.02, width if per_column else ()).astype(np.float32)
    zero = rng.integers(0, 100, width if per_column else ()).astype(weight)
    real = np.matmul(a.astype(np.int64) - za, b.astype(np.int64) - zero) * (np.float64(X_SCALE) * scale)
    out = np.float32(max(np.abs(real).max(), 0.01) / 120)
    const = relax.const

    def body(emit, x, *rest):
        left = emit(R.dequantize(x, const(X_SCALE), const(np.dtype(data).type(za)), -1, "float32"))
        right = emit(R.dequantize(rest[0] if rest else const(b), const(scale), const(zero), -1, "float32"))
        return R.quantize(emit(R.matmul(left, right)), const(out), const(np.uint8(128)), -1, "uint8")

    params = [(a.shape, data)] + ([(b.shape, weight)] if computed else [])
    found, rules = run(module(params, body), native(), [a, b] if computed else [a])
    check(found, real, out, 128)
    assert "cpu.dot_matmul" in rules


def nchw(emit, x):
    """Two convolutions with a transpose, a pool and a residual between, channels first, as a model has them."""
    rng = np.random.default_rng(5)
    one, half = relax.const(np.float32(0.05)), relax.const(np.uint8(128))

    def rounded(v):
        return emit(R.dequantize(emit(R.quantize(v, one, half, -1, "uint8")), one, half, -1, "float32"))

    def conv(v, out):
        w = relax.const(codes(rng, (out, 8, 3, 3), "int8"))
        scale, zero = relax.const(rng.uniform(1e-3, 4e-3, out).astype("float32")), relax.const(np.zeros(out, np.int8))
        return emit(R.nn.conv2d(v, emit(R.dequantize(w, scale, zero, 0, "float32")), padding=[1] * 4))

    x = rounded(x)
    y = rounded(emit(R.nn.relu(conv(x, 8))))
    y = rounded(emit(R.add(rounded(conv(y, 8)), x)))
    y = rounded(emit(R.nn.max_pool2d(y, [2, 2], [2, 2])))
    return rounded(emit(R.permute_dims(conv(y, 8), [0, 2, 3, 1])))


def test_layout_and_quantisation_passes_commute():
    """The rules before the layout pass as well as after it: the same kernels and the same bits."""
    x = np.random.default_rng(8).uniform(-6, 6, (1, 8, 12, 12)).astype(np.float32)
    target = native()
    mod = module([(x.shape, "float32")], nchw)
    after = passes(mod, target, layout)
    both = passes(mod, target, lambda t: [_rewrite(t)], layout)
    results = [run(m, target, [x]) for m in (after, both)]
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert sorted(results[0][1]) == sorted(results[1][1])
    assert results[0][1].count("cpu.dot_conv") == 3
