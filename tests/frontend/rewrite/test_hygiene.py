"""No-ops, Gemm attributes, duplicate initializers."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from tests.frontend.rewrite.check import assert_same, one_node, ops_of
from tvmx.frontend.rewrite import hygiene, rewrite_all

RNG = np.random.default_rng(8)
X = RNG.standard_normal((3, 4)).astype(np.float32)


def model_of(text):
    return parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{text}')


def test_identity_and_dropout_leave():
    text = """
    agraph (float[3,4] x) => (float[3,4] y) <float r = {0.3}> {
        a = Identity(x)
        b, mask = Dropout(a, r)
        c = Identity(b)
        y = Neg(c)
    }
    """
    rewritten = assert_same(model_of(text), {"x": X})
    assert ops_of(rewritten) == {"Neg"}
    assert rewritten.graph.node[0].input[0] == "x"


def test_an_output_keeps_its_identity():
    text = "agraph (float[3,4] x) => (float[3,4] y, float[3,4] z) { y = Identity(x) z = Dropout(y) }"
    assert ops_of(assert_same(model_of(text), {"x": X})) == {"Identity"}


@pytest.mark.parametrize(
    "text",
    [
        "agraph (float[3,4] x) => (float[3,4] y, bool[3,4] m) { y, m = Dropout(x) }",
        "agraph (float[3,4] x, bool t) => (float[3,4] y) <float r = {0.3}> { y = Dropout(x, r, t) }",
    ],
)
def test_dropout_that_matters_stays(text):
    assert "Dropout" in ops_of(rewrite_all(model_of(text)))


@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("bias", [None, (5,), (3, 1), ()])
def test_gemm_becomes_plain(trans_a, trans_b, beta, bias):
    inputs = {
        "a": X.T.copy() if trans_a else X,
        "b": RNG.standard_normal((5, 4) if trans_b else (4, 5)).astype(np.float32),
        "c": None if bias is None else np.asarray(RNG.standard_normal(bias), np.float32),
    }
    fixed = {k: v for k, v in inputs.items() if k != "a" and v is not None}
    attrs = {"transA": trans_a, "transB": trans_b, "alpha": 0.7, "beta": beta}
    rewritten = assert_same(one_node("Gemm", inputs, constants=fixed, **attrs), {"a": inputs["a"]}, rtol=1e-4)
    gemm = next(n for n in rewritten.graph.node if n.op_type == "Gemm")
    assert not gemm.attribute


def test_gemm_of_two_inputs_stays():
    b = np.ones((5, 4), np.float32)
    rewritten = assert_same(one_node("Gemm", {"a": X, "b": b}, transB=1, alpha=0.5), {"a": X, "b": b})
    assert {a.name for a in rewritten.graph.node[0].attribute} == {"transB", "alpha"}


def test_equal_initializers_are_merged():
    constants = {"a": X, "b": X.copy(), "c": X.reshape(4, 3), "d": X.astype(np.float64), "e": X + 1}
    names = ["a", "b", "e"]
    nodes = [helper.make_node("Sum", ["x", *names], ["s"], "sum"), helper.make_node("MatMul", ["s", "c"], ["y"], "m")]
    graph = helper.make_graph(
        nodes,
        "twins",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None), helper.make_tensor_value_info("d", 11, None)],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    rewritten = assert_same(model, {"x": X})
    assert {t.name for t in rewritten.graph.initializer} == {"a", "c", "d", "e"}
    assert hygiene.merge_initializers(rewritten) == 0


@pytest.mark.parametrize(
    ("indices", "left"),
    [
        ([[0, 1], [2, 3], [-1, -4]], {"Reshape", "Gather"}),
        ([[[2]], [[0]]], {"Reshape", "Gather"}),
        (np.stack(np.indices((3, 4)), -1), {"Reshape"}),
        (np.stack(np.indices((3, 4)), -1).reshape(12, 2), {"Reshape"}),
        ([[0], [1], [2]], {"Reshape"}),
    ],
)
def test_gather_nd_with_constant_indices(indices, left):
    indices = np.asarray(indices, np.int64)
    model = one_node("GatherND", {"x": X, "i": indices}, constants={"i": indices})
    assert ops_of(assert_same(model, {"x": X}, ["GatherND"], rtol=0, atol=0)) <= left


def test_gather_nd_out_of_range_or_computed_stays():
    wrong = np.array([[3, 0]])
    assert ops_of(rewrite_all(one_node("GatherND", {"x": X, "i": wrong}, constants={"i": wrong}))) == {"GatherND"}
    right = np.array([[2, 0]])
    assert ops_of(assert_same(one_node("GatherND", {"x": X, "i": right}), {"x": X, "i": right})) == {"GatherND"}
