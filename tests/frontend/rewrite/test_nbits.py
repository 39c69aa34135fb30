"""MatMulNBits and GatherBlockQuantized against ONNX Runtime; their codes stay codes."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, numpy_helper

from tests.frontend.rewrite.check import assert_same, one_node, ort_run
from tvmx.errors import ModelError
from tvmx.frontend.rewrite import rewrite_all

RNG = np.random.default_rng(5)
MS = "com.microsoft"


def packed(codes, bits):
    """uint8 codes [.., n] → bytes [.., ceil(n · bits / 8)], the lowest bits first."""
    each = 8 // bits
    short = -codes.shape[-1] % each
    wide = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, short)]).reshape(*codes.shape[:-1], -1, each)
    return (wide << np.arange(0, 8, bits, dtype=np.uint8)).sum(-1).astype(np.uint8)


def nbits(depth, width, block, zero, bits=4, order=None, bias=False):
    blocks = -(-depth // block)
    codes = RNG.integers(0, 1 << bits, (width, blocks, block)).astype(np.uint8)
    scales = RNG.uniform(0.01, 0.1, width * blocks).astype(np.float32)
    points = RNG.integers(0, 1 << bits, (width, blocks)).astype(np.uint8)
    inputs = {
        "a": RNG.standard_normal((2, 3, depth)).astype(np.float32),
        "b": packed(codes, bits),
        "s": scales,
        "z": {"none": None, "packed": packed(points, bits).reshape(-1), "float": points.astype(np.float32).reshape(-1)}[
            zero
        ],
        "g": order,
        "c": RNG.standard_normal(width).astype(np.float32) if bias else None,
    }
    fixed = {k: v for k, v in inputs.items() if k != "a" and v is not None}
    attrs = {"K": depth, "N": width, "bits": bits, "block_size": block}
    return one_node("MatMulNBits", inputs, constants=fixed, domain=MS, **attrs), {"a": inputs["a"]}


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("zero", ["none", "packed", "float"])
def test_products(block, zero):
    model, feeds = nbits(256, 24, block, zero)
    rewritten = assert_same(model, feeds, ["MatMulNBits"], atol=1e-4)
    assert any(t.data_type == TensorProto.UINT8 and t.dims for t in rewritten.graph.initializer)


@pytest.mark.parametrize(("depth", "width", "block"), [(100, 7, 32), (33, 9, 16), (70, 5, 64)])
def test_a_short_last_block(depth, width, block):
    assert_same(*nbits(depth, width, block, "packed", bias=True), ["MatMulNBits"], atol=1e-4)


def test_eight_bits():
    assert_same(*nbits(64, 12, 32, "packed", bits=8), ["MatMulNBits"], atol=1e-3)


def test_blocks_in_another_order():
    """g_idx says to which block a row belongs (GPTQ with act-order); ONNX Runtime does not have that on every build."""
    order = (np.arange(64) % 2).astype(np.int32)
    model, feeds = nbits(64, 12, 32, "none", order=order)
    known = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    halves = known["b"].reshape(12, 32)
    codes = np.stack([halves & 15, halves >> 4], -1).reshape(12, 64).astype(np.float64)
    expected = feeds["a"] @ ((codes - 8) * known["s"].reshape(12, 2)[:, order]).T
    np.testing.assert_allclose(ort_run(rewrite_all(model), feeds)[0], expected, atol=1e-4)


def test_a_weight_of_the_wrong_size_is_refused():
    model, _ = nbits(64, 12, 32, "none")
    next(a for a in model.graph.node[0].attribute if a.name == "K").i = 96
    with pytest.raises(ModelError, match="the weight holds no 3 blocks of 32"):
        rewrite_all(model)


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("indices", [(3,), (2, 4)])
@pytest.mark.parametrize("width", [64, 48])
def test_lookups(zero, indices, width):
    codes = RNG.integers(0, 16, (20, width)).astype(np.uint8)
    blocks = -(-width // 32)
    inputs = {
        "d": packed(codes, 4),
        "i": RNG.integers(0, 20, indices),
        "s": RNG.uniform(0.01, 0.1, (20, blocks)).astype(np.float32),
        "z": packed(RNG.integers(0, 16, (20, blocks)).astype(np.uint8), 4) if zero else None,
    }
    fixed = {k: v for k, v in inputs.items() if k != "i" and v is not None}
    attrs = {"gather_axis": 0, "quantize_axis": 1, "block_size": 32, "bits": 4}
    model = one_node("GatherBlockQuantized", inputs, constants=fixed, domain=MS, version=21, **attrs)
    rewritten = assert_same(model, {"i": inputs["i"]}, ["GatherBlockQuantized"])
    table = next(t for t in rewritten.graph.initializer if list(t.dims) == [20, width // 2])
    assert table.data_type == TensorProto.UINT8, "the table stays packed"
