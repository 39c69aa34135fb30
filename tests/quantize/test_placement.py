"""Where Q and DQ go, and where they stay out and why."""

import numpy as np
import onnx
import pytest
from onnx import helper

import tvmx
from tests.onnx_models import model, reference
from tests.quantize.helpers import TARGET, constants, normal_feeds, ops, plan_of, quantized, sqnr
from tvmx.errors import ConfigError
from tvmx.quantize import Override, Scheme, make_plan, parse_override
from tvmx.target import PRESETS

node = helper.make_node
RNG = np.random.default_rng(0)


def weight(*shape):
    return (RNG.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


def between(nodes, shape=(1, 4, 8, 8), extra=None, out=(1, 4, 8, 8), second=(4, 4, 1, 1)):
    """conv → `nodes` (from "a" to "z") → conv."""
    return model(
        [
            node("Conv", ["x", "w0"], ["a"], "first"),
            *nodes,
            node("Conv", ["z", "w1"], ["y"], "last"),
        ],
        {"x": shape},
        {"y": out},
        {"w0": weight(4, 4, 1, 1), "w1": weight(*second), **(extra or {})},
    )


def ints(*values):
    return np.array(values, np.int64)


CASES = {
    "residual": ([node("Relu", ["a"], ["r"]), node("Conv", ["r", "w0"], ["c"]), node("Add", ["c", "r"], ["z"])], {}),
    "gate": ([node("GlobalAveragePool", ["a"], ["p"]), node("Conv", ["p", "w0"], ["c"]), node("Sigmoid", ["c"], ["s"]),
              node("Mul", ["a", "s"], ["z"])], {}),
    "max pool": ([node("MaxPool", ["a"], ["z"], kernel_shape=[3, 3], pads=[1, 1, 1, 1])], {}),
    "average pool": ([node("AveragePool", ["a"], ["z"], kernel_shape=[3, 3], pads=[1, 1, 1, 1])], {}),
    "concat": ([node("Relu", ["a"], ["r"]), node("Concat", ["a", "r"], ["k"], axis=1),
                node("Slice", ["k", "from", "to", "axis"], ["z"])],
               {"from": ints(2), "to": ints(6), "axis": ints(1)}),
    "views": ([node("Transpose", ["a"], ["t"], perm=[0, 1, 3, 2]), node("Reshape", ["t", "flat"], ["f"]),
               node("Reshape", ["f", "back"], ["z"])], {"flat": ints(1, 4, 64), "back": ints(1, 4, 8, 8)}),
    "pad": ([node("Pad", ["a", "pads"], ["p"]), node("MaxPool", ["p"], ["z"], kernel_shape=[3, 3])],
            {"pads": ints(0, 0, 1, 1, 0, 0, 1, 1)}),
    "resize": ([node("MaxPool", ["a"], ["m"], kernel_shape=[2, 2], strides=[2, 2]),
                node("Resize", ["m", "", "by"], ["z"], mode="nearest", coordinate_transformation_mode="asymmetric")],
               {"by": np.array([1, 1, 2, 2], np.float32)}),
    "activations": ([node("HardSwish", ["a"], ["h"]), node("Clip", ["h", "lo", "hi"], ["z"])],
                    {"lo": np.float32(0), "hi": np.float32(6)}),
    "transposed": ([node("ConvTranspose", ["a", "wt", "bt"], ["u"], strides=[2, 2]),
                    node("AveragePool", ["u"], ["z"], kernel_shape=[2, 2], strides=[2, 2])],
                   {"wt": weight(4, 4, 2, 2), "bt": weight(4, 1)[:, 0]}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_everything_between_integer_kernels_is_integer(case):
    nodes, extra = CASES[case]
    proto = between(nodes, extra=extra)
    data = normal_feeds(proto)
    result = quantized(proto, data)
    onnx.checker.check_model(result.proto, full_check=True)
    assert not result.report.kept
    assert sqnr(proto, result.proto, data) > 28
    makers = {o: n for n in result.proto.graph.node for o in n.output}
    for reader in result.proto.graph.node:
        if reader.op_type in ("Conv", "ConvTranspose", "Add", "Mul", "MaxPool", "AveragePool", "Concat", "Reshape",
                              "Transpose", "Pad", "Resize", "Slice", "GlobalAveragePool"):  # fmt: skip
            assert makers[reader.input[0]].op_type == "DequantizeLinear", reader.op_type
            if reader.op_type in ("Concat", "Add", "Mul"):
                assert makers[reader.input[1]].op_type == "DequantizeLinear"


@pytest.mark.parametrize("case", ["max pool", "concat", "views", "pad", "resize"])
def test_what_hands_values_on_has_one_scale(case):
    nodes, extra = CASES[case]
    plan = plan_of(between(nodes, extra=extra))
    roots = {plan.placement.tensors[t] for t in plan.placement.tensors if t not in ("x", "y")}
    assert len(roots) == 1


def test_an_activation_with_many_readers_is_quantised_once():
    proto = between(
        [node("Conv", ["a", "w0"], ["b"]), node("Conv", ["a", "w1"], ["c"]), node("Add", ["b", "c"], ["z"])]
    )
    result = quantized(proto).proto
    quantised = [n.input[0] for n in result.graph.node if n.op_type == "QuantizeLinear"]
    assert sorted(quantised) == ["a", "b", "c", "x", "z"]


def test_softmax_norms_and_gelu_stay_in_float():
    proto = model(
        [
            node("LayerNormalization", ["x", "s", "b"], ["n"]),
            node("MatMul", ["n", "w"], ["q"]),
            node("Gelu", ["q"], ["g"]),
            node("Transpose", ["n"], ["k"], perm=[0, 2, 1]),
            node("MatMul", ["g", "k"], ["scores"]),
            node("Softmax", ["scores"], ["p"]),
            node("MatMul", ["p", "n"], ["o"]),
            node("Add", ["o", "x"], ["y"]),
        ],
        {"x": (2, 6, 16)},
        {"y": (2, 6, 16)},
        {"s": np.ones(16, np.float32), "b": np.zeros(16, np.float32), "w": weight(16, 16)},
        opset=20,
    )
    data = normal_feeds(proto)
    result = quantized(proto, data)
    assert sqnr(proto, result.proto, data) > 28
    makers = {o: n.op_type for n in result.proto.graph.node for o in n.output}
    for n in result.proto.graph.node:
        if n.op_type == "MatMul":
            assert [makers[i] for i in n.input] == ["DequantizeLinear"] * 2
        if n.op_type in ("Softmax", "LayerNormalization", "Gelu"):
            assert makers.get(n.input[0]) != "DequantizeLinear"
    assert ["Add"] == [op for _, op, _ in result.report.kept if op == "Add"]


def test_second_operands_of_products_are_symmetric():
    proto = model(
        [node("Relu", ["x"], ["a"]), node("Relu", ["z"], ["b"]), node("MatMul", ["a", "b"], ["y"])],
        {"x": (4, 8), "z": (8, 4)},
        {"y": (4, 4)},
    )
    result = constants(quantized(proto).proto)
    assert result["a_zero_point"].dtype == np.uint8
    assert result["b_zero_point"].dtype == np.int8
    assert result["b_zero_point"] == 0


def test_embedding_rows_are_int8_with_a_scale_each():
    table = weight(100, 64) * RNG.uniform(0.01, 10, (100, 1)).astype(np.float32)
    proto = model(
        [node("Gather", ["t", "ids"], ["e"]), node("MatMul", ["e", "w"], ["y"])],
        {"ids": ((1, 7), onnx.TensorProto.INT64)},
        {"y": (1, 7, 8)},
        {"t": table, "w": weight(64, 8)},
    )
    data = [{"ids": RNG.integers(0, 100, (1, 7))} for _ in range(8)]
    result = quantized(proto, data)
    assert sqnr(proto, result.proto, data) > 30
    arrays = constants(result.proto)
    assert arrays["t_quantized"].dtype == np.int8
    assert arrays["t_scale"].shape == (100, 1)
    assert "t" not in arrays
    assert result.report.bytes_after < 0.3 * result.report.bytes_before
    kept = quantized(proto, data, scheme=Scheme(prefer="size", embeddings=False))
    assert "t" in constants(kept.proto)


def test_parts_of_very_different_range_are_not_concatenated_in_integers():
    proto = between(
        [node("Mul", ["a", "tiny"], ["r0"]), node("Relu", ["r0"], ["r"]), node("Concat", ["a", "r"], ["z"], axis=1)],
        extra={"tiny": np.full((1, 4, 1, 1), 1e-3, np.float32)}, second=(4, 8, 1, 1),
    )  # fmt: skip
    report = quantized(proto).report
    assert any(op == "Concat" and "differ" in reason for _, op, reason in report.kept)


def test_overrides_by_name_kind_and_glob():
    proto = between([node("Relu", ["a"], ["z"])])
    for text, kept in (("first=float", ["first"]), ("op:Conv=float", ["first", "last"]), ("?ast=float", ["last"])):
        result = quantized(proto, scheme=Scheme(overrides=(parse_override("op:*=int8"), parse_override(text))))
        names = [name for name, _, reason in result.report.kept if reason == "an override says float"]
        assert [n for n in names if n in ("first", "last")] == kept
    for text, near in (("frist=float", "first"), ("op:Cnov=float", "Conv")):
        with pytest.raises(ConfigError, match=near):
            plan_of(proto, Scheme(overrides=(parse_override(text),)))
    with pytest.raises(ConfigError, match="NAME="):
        parse_override("first")
    with pytest.raises(ConfigError, match="weight"):
        Override("first", "int4")


def test_weight_only_by_override_and_by_size():
    proto = between([node("Relu", ["a"], ["z"])])
    result = quantized(proto, scheme=Scheme(prefer="size", overrides=(parse_override("first=weight"),)))
    assert ("first", "Conv") in result.report.weight_only
    first = next(n for n in result.proto.graph.node if n.name == "first")
    assert first.input[0] == "x"
    assert first.input[1].endswith("_dequantized")


def test_first_and_last_layer_by_option():
    proto = between([node("Conv", ["a", "w0"], ["z"])])
    plan = plan_of(proto, Scheme(keep_first=True, keep_last=True, overrides=(parse_override("op:*=int8"),)))
    assert [la.name for la in plan.placement.layers] == ["z"]


def test_the_cost_hook_decides_and_its_reason_is_reported():
    proto = between([node("Relu", ["a"], ["z"])])
    seen = []

    def hook(cost, target):
        seen.append(cost)
        return "measured slower" if len(seen) == 1 else None

    plan = make_plan(proto, "m", Scheme().for_target(TARGET), TARGET, cost=hook)
    assert [(k.name, k.reason) for k in plan.placement.kept] == [("first", "measured slower")]
    assert seen[0].macs == 4 * 4 * 64
    assert seen[0].rounded_elements == 4 * 64
    # What follows a layer in float has to round its input by itself.
    assert seen[-1].rounded_elements == 4 * 64
    assert not make_plan(proto, "m", Scheme(prefer="size").for_target(TARGET), TARGET, cost=hook).placement.kept


def test_explain_says_what_the_quantiser_left_in_float():
    scheme = Scheme(prefer="size", overrides=(parse_override("first=float"),))
    result = quantized(between([node("Relu", ["a"], ["z"])]), scheme=scheme)
    report = tvmx.explain(result)
    assert [row[:2] for row in report.kept] == [(k[0], k[1]) for k in result.report.kept]
    assert f"first: {report.kept[0][2]}" in str(report)
    assert report.to_json()["kept_in_float"][0]["name"] == "first"
    result.proto.metadata_props[-1].value = "{1"
    assert tvmx.explain(result.proto).kept == ()


def test_the_target_chooses_types_and_range():
    scheme = Scheme()
    assert scheme.for_target(PRESETS["aarch64-dotprod"]).activations == "int8"
    assert scheme.for_target(PRESETS["x86_64-avx512-vnni"]).weight_limit == 127
    assert scheme.for_target(PRESETS["x86_64-avx2"]).weight_limit == 64
    assert Scheme(reduce_range=False).for_target(PRESETS["x86_64-avx2"]).weight_limit == 127
    proto = between([node("Relu", ["a"], ["z"])])
    plan = plan_of(proto, Scheme(activations="int8", prefer="size"))
    assert plan.scheme.symmetric


@pytest.mark.parametrize("activations", ["uint8", "int8"])
def test_both_activation_types_run(activations):
    proto = between(CASES["gate"][0])
    data = normal_feeds(proto)
    result = quantized(proto, data, scheme=Scheme(prefer="size", activations=activations)).proto
    assert {c.dtype for n, c in constants(result).items() if n.endswith("zero_point") and c.ndim == 0} == {
        np.dtype(activations)
    }
    assert sqnr(proto, result, data) > 28


def test_a_model_without_anything_to_quantise_is_left_alone():
    proto = model([node("Softmax", ["x"], ["y"])], {"x": (2, 4)}, {"y": (2, 4)})
    result = quantized(proto)
    assert ops(result.proto) == ["Softmax"]
    feed = normal_feeds(proto, 1)[0]
    np.testing.assert_array_equal(reference(result.proto, feed)["y"], reference(proto, feed)["y"])


def test_a_cheap_convolution_of_the_input_stays_in_float():
    rng = np.random.default_rng(0)
    proto = model(
        [node("Conv", ["x", "w1"], ["a"], "first"), node("Conv", ["a", "w2"], ["y"], "second")],
        {"x": (1, 3, 8, 8)},
        {"y": (1, 128, 8, 8)},
        {
            "w1": rng.standard_normal((32, 3, 1, 1)).astype(np.float32),
            "w2": rng.standard_normal((128, 32, 1, 1)).astype(np.float32),
        },
    )
    layers = [la.name for la in plan_of(proto).placement.layers]
    assert layers == ["second"]
    assert [la.name for la in plan_of(proto, Scheme(keep_first=False, prefer="size")).placement.layers] == [
        "first",
        "second",
    ]
    forced = Scheme(prefer="size", overrides=(parse_override("first=int8"),))
    assert [la.name for la in plan_of(proto, forced).placement.layers] == ["first", "second"]
