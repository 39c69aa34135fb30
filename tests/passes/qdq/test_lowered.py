"""Kernels that stand for several operators: tables of codes, look-ups, the first layer's image, transposes."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op as R

from tests.passes.qdq.helpers import HOSTS, codes, conv_sums, module, native, run
from tvmx.target import PRESETS, cpu_features


def q(emit, x, scale, zero, dtype="uint8"):
    return emit(R.quantize(x, relax.const(np.float32(scale)), relax.const(np.array(zero, dtype)), -1, dtype))


def dq(emit, x, scale, zero, axis=-1):
    zero = np.asarray(zero, "uint8" if str(x.ty.dtype) == "uint8" else "int8")
    return emit(R.dequantize(x, relax.const(np.asarray(scale, np.float32)), relax.const(zero), axis, "float32"))


def rounded(x, scale, zero, low=0, high=255):
    return np.clip(np.rint(x / np.float32(scale)) + zero, low, high)


@pytest.mark.parametrize("target", [native(), *HOSTS], ids=lambda t: t.name)
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("shape", [(1, 16, 16, 16), (3, 11, 131)])
def test_a_chain_of_roundings_is_one_table(shape, dtype, target):
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    array = codes(np.random.default_rng(0), shape, dtype)
    three, sixth = relax.const(np.float32(3)), relax.const(np.float32(1 / 6))

    def body(emit, v):
        x = dq(emit, v, 0.05, 7)
        gate = q(emit, emit(R.clip(emit(R.add(x, three)), 0, 6)), 6 / 255, low, dtype)
        product = q(emit, emit(R.multiply(x, dq(emit, gate, 6 / 255, low))), 0.2, 3, dtype)
        scaled = emit(R.multiply(dq(emit, product, 0.2, 3), sixth))
        return dq(emit, q(emit, scaled, 0.04, 5, dtype), 0.04, 5)

    found, rules = run(module([(shape, dtype)], body), target, [array])
    x = (array.astype(np.float32) - 7) * np.float32(0.05)
    gate = rounded(np.clip(x + np.float32(3), 0, 6), 6 / 255, low, low, high)
    product = x * ((gate - low) * np.float32(6 / 255)).astype(np.float32)
    product = rounded(product, 0.2, 3, low, high)
    scaled = ((product - 3) * np.float32(0.2)).astype(np.float32) * np.float32(1 / 6)
    expected = (rounded(scaled, 0.04, 5, low, high) - 5) * np.float32(0.04)
    np.testing.assert_array_equal(found, expected.astype(np.float32))
    assert "cpu.written" in rules  # the look-up
    assert len(rules) <= 2  # and what widens its codes for the output


def test_two_tensors_are_no_table():
    a, b = (codes(np.random.default_rng(s), (1, 8, 8, 32), "uint8") for s in (1, 2))

    def body(emit, v, w):
        return q(emit, emit(R.add(dq(emit, v, 0.5, 1), dq(emit, w, 0.25, 2))), 0.5, 3)

    found, rules = run(module([((1, 8, 8, 32), "uint8")] * 2, body), native(), [a, b])
    value = (a.astype(np.float32) - 1) * np.float32(0.5) + (b.astype(np.float32) - 2) * np.float32(0.25)
    np.testing.assert_array_equal(found, rounded(value, 0.5, 3).astype(np.uint8))
    assert "cpu.written" not in rules


@pytest.mark.parametrize("target", HOSTS, ids=lambda t: t.name)
@pytest.mark.parametrize(
    ("kernel", "stride", "pads", "extra", "zero"),
    [((2, 2), 2, (0, 0, 0, 0), 0, 9), ((3, 3), 2, (1, 1, 1, 1), 1, 130), ((4, 3), 1, (0, 1, 2, 1), 0, 255)],
)
def test_transposed_convolution(target, kernel, stride, pads, extra, zero):
    rng = np.random.default_rng(3)
    array = codes(rng, (1, 5, 6, 10), "uint8")
    weights = codes(rng, (*kernel, 10, 12), "int8")
    scale = rng.uniform(0.01, 0.1, 12).astype(np.float32)

    def body(emit, v):
        x, w = dq(emit, v, 0.5, zero), dq(emit, relax.const(weights), scale, np.zeros(12, np.int8), 3)
        return R.nn.conv2d_transpose(
            x, w, strides=(stride, stride), padding=pads, output_padding=(extra, extra), data_layout="NHWC",
            kernel_layout="HWIO",
        )  # fmt: skip

    found, rules = run(module([((1, 5, 6, 10), "uint8")], body), target, [array])
    x = array.astype(np.int64) - zero
    full = np.zeros((1, 4 * stride + kernel[0] + extra, 5 * stride + kernel[1] + extra, 12), np.int64)
    for i in range(5):
        for j in range(6):
            part = np.einsum("k,abko->abo", x[0, i, j], weights.astype(np.int64))
            full[0, i * stride : i * stride + kernel[0], j * stride : j * stride + kernel[1]] += part
    sums = full[:, pads[0] : full.shape[1] - pads[2], pads[1] : full.shape[2] - pads[3]]
    np.testing.assert_allclose(found, sums * (0.5 * scale.astype(np.float64)), rtol=1e-6)
    assert rules == ["cpu.dot_conv"]


@pytest.mark.parametrize("channels", [2, 3, 4])
@pytest.mark.parametrize(("width", "pad", "stride"), [(16, 1, 2), (37, 0, 1), (50, 3, 2)])
def test_the_first_layer_reads_quantised_planes(channels, width, pad, stride):
    rng, zero = np.random.default_rng(4), 77 if pad < 3 else 200
    x = rng.standard_normal((2, channels, 9, width)).astype(np.float32) * 40
    x.reshape(-1)[:7] = [0.5, 1.5, -0.5, 1e9, -1e9, 127.5, 2.5]
    weights = codes(rng, (3, 3, channels, 20), "int8")

    def body(emit, v):
        data = dq(emit, q(emit, emit(R.permute_dims(v, [0, 2, 3, 1])), 0.5, zero), 0.5, zero)
        w = dq(emit, relax.const(weights), np.ones(20), np.zeros(20, np.int8), 3)
        return R.nn.conv2d(
            data, w, strides=(stride, stride), padding=[pad] * 4, data_layout="NHWC", kernel_layout="HWIO"
        )

    found, rules = run(module([((2, channels, 9, width), "float32")], body), native(), [x])
    codes_ = rounded(x.transpose(0, 2, 3, 1), 0.5, zero).astype(np.int64) - zero
    padded = np.pad(codes_, [(0, 0), (pad, pad), (pad, pad), (0, 0)])
    oh, ow = ((d + 2 * pad - 3) // stride + 1 for d in (9, width))
    sums = np.zeros((2, oh, ow, 20), np.int64)
    for i in range(3):
        for j in range(3):
            part = padded[:, i : i + (oh - 1) * stride + 1 : stride, j : j + (ow - 1) * stride + 1 : stride]
            sums += part @ weights[i, j].astype(np.int64)
    np.testing.assert_array_equal(found, (sums * 0.5).astype(np.float32))
    if native().vector_bytes == 64:
        assert rules.count("cpu.written") == 1
        assert len(rules) == 2


@pytest.mark.parametrize("per_row", [True, False])
def test_embedding_rows_are_widened_after_the_look_up(per_row):
    import onnx
    from onnx import helper, numpy_helper

    import tvmx
    from tvmx.config import CompileConfig
    from tvmx.runtime import GraphExecutor

    rng = np.random.default_rng(5)
    table = codes(rng, (20000, 64), "int8")
    scale = rng.uniform(0.01, 0.1, (20000, 1) if per_row else (1, 1)).astype(np.float32)
    nodes = [
        helper.make_node("Cast", ["t"], ["f"], to=1),
        helper.make_node("Mul", ["f", "s"], ["w"]),
        helper.make_node("Gather", ["w", "i"], ["y"], axis=0),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("i", 7, [2, 5])],
        [helper.make_tensor_value_info("y", 1, [2, 5, 64])],
        [numpy_helper.from_array(table, "t"), numpy_helper.from_array(scale, "s")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    index = np.array([[0, 19999, -1, 5, 5], [7, -20000, 3, 2, 1]])
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.so"
        result = tvmx.compile(model, path, threads=1, config=CompileConfig(use_shipped_logs=False))
        with GraphExecutor(path, threads=1) as executor:
            found = executor({"i": index})["y"]
    np.testing.assert_array_equal(found, (table.astype(np.float32) * scale)[index])
    assert result.report["parameter_bytes"] < 1.1 * (table.size + scale.nbytes)
    assert len(result.graph.nodes) == 1


def test_means_and_concatenations_of_codes():
    """A mean sums codes, parts of one scale are joined as codes."""
    a, b = (codes(np.random.default_rng(s), (1, 6, 7, c), "uint8") for s, c in ((6, 24), (7, 5)))

    def body(emit, v, w):
        joined = emit(R.concat([dq(emit, v, 0.5, 3), dq(emit, w, 0.5, 3)], 3))
        return R.mean(joined, [1, 2], True)

    found, rules = run(module([((1, 6, 7, 24), "uint8"), ((1, 6, 7, 5), "uint8")], body), native(), [a, b])
    expected = (np.concatenate([a, b], 3).astype(np.int64) - 3).sum((1, 2), keepdims=True) * (0.5 / 42)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert sorted(rules) == ["cpu.generic", "cpu.written"]


@pytest.mark.parametrize("axes", [([0, 2, 1, 3], [0, 2, 3, 1]), ([0, 2, 1, 3], [0, 2, 1, 3]), (None, [0, 1, 3, 2])])
def test_attention_products_read_codes_through_their_transposes(axes):
    rng = np.random.default_rng(8)
    a, b = codes(rng, (1, 6, 6, 8), "uint8"), codes(rng, (1, 6, 6, 6 if axes[1][-1] == 3 else 8), "uint8")
    if axes[0] is None:
        b = codes(rng, (1, 6, 5, 8), "uint8")

    def body(emit, v, w):
        left = dq(emit, v, 0.5, 3) if axes[0] is None else emit(R.permute_dims(dq(emit, v, 0.5, 3), axes[0]))
        return R.matmul(left, emit(R.permute_dims(dq(emit, w, 0.25, 130), axes[1])))

    if axes[1] == [0, 2, 1, 3]:
        a, b = codes(rng, (1, 8, 6, 6), "uint8"), codes(rng, (1, 6, 6, 5), "uint8")
    found, rules = run(module([(a.shape, "uint8"), (b.shape, "uint8")], body), native(threads=2), [a, b])
    x, y = (a.astype(np.int64) - 3), (b.astype(np.int64) - 130)
    x = x if axes[0] is None else x.transpose(axes[0])
    np.testing.assert_allclose(found, np.matmul(x, y.transpose(axes[1])) * 0.125, rtol=1e-6)
    assert "cpu.dot_matmul" in rules


@pytest.mark.parametrize("name", ["x86_64-avx2", "x86_64-avx512-vnni"])
def test_a_convolution_stays_in_float_where_winograd_is_faster(name):
    target = PRESETS[name]
    if not target.features <= cpu_features():
        pytest.skip(f"this machine is no {name}")
    rng = np.random.default_rng(9)
    array, weights = codes(rng, (1, 28, 28, 64), "uint8"), codes(rng, (3, 3, 64, 64), "int8")

    def body(emit, v):
        w = dq(emit, relax.const(weights), np.full(64, 0.01), np.zeros(64, np.int8), 3)
        made = R.nn.conv2d(dq(emit, v, 0.02, 7), w, padding=[1] * 4, data_layout="NHWC", kernel_layout="HWIO")
        return q(emit, emit(made), 3.0, 128)

    found, rules = run(module([((1, 28, 28, 64), "uint8")], body), target, [array])
    exact = conv_sums(array.astype(np.int64) - 7, weights, pads=(1, 1, 1, 1)) * (0.01 * 0.02 / 3.0)
    assert np.abs(found.astype(int) - rounded(exact, 1, 128)).max() <= 1
    assert ("cpu.conv2d_winograd" in rules) == (name == "x86_64-avx2")
    assert ("cpu.dot_conv" in rules) == (name != "x86_64-avx2")
