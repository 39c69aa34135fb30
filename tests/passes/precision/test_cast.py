"""Where casts go: on every boundary, merged, above moves, in front of their readers."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from onnx import TensorProto, helper

from tests.onnx_models import convnet, mlp, model, reference
from tests.passes.precision.helpers import CPU, assigned, casts, imported, run
from tvmx.passes.precision.operators import list_operators
from tvmx.precision import Assignment, PrecisionRules

node = helper.make_node
FP16, BF16, FP32 = Assignment("fp16"), Assignment("bf16"), Assignment("fp32")
rng = np.random.default_rng(0)


def _weight(*shape):
    return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


def _close(found, want, share):
    assert found.dtype == want.dtype
    assert found.shape == want.shape
    np.testing.assert_allclose(found.astype("f8"), want.astype("f8"), rtol=0, atol=share * max(1.0, np.abs(want).max()))


def test_an_all_float32_plan_is_the_identity():
    mod = imported(convnet())
    same, plan = assigned(mod, PrecisionRules("fp32", operators={"*": FP32}))
    assert plan.is_identity
    assert tvm_ffi.structural_equal(same["main"], mod["main"])


def test_products_accumulate_in_float32_and_epilogues_stay_wide():
    proto = model(
        [node("MatMul", ["x", "w"], ["m"]), node("Add", ["m", "b"], ["a"]), node("Relu", ["a"], ["r"]),
         node("MatMul", ["r", "w"], ["y"])],
        {"x": (4, 8)}, {"y": (4, 8)}, {"w": _weight(8, 8), "b": _weight(8)},
    )  # fmt: skip
    mod, _ = assigned(imported(proto), PrecisionRules("fp16"))
    assert casts(mod) == ["→float16", "matmul", "add", "nn.relu", "→float16", "matmul"]
    constants = {str(c.value.dtype) for c in _constants(mod) if len(c.value.shape) == 2}
    assert constants == {"float16"}  # cast now, not while running
    x = rng.standard_normal((4, 8)).astype("f4")
    _close(run(mod, x)[0], reference(proto, {"x": x})["y"], 4e-3)


def test_one_narrow_value_serves_all_readers_and_each_widens_for_itself():
    proto = model(
        [node("Sigmoid", ["x"], ["s"]), node("Add", ["s", "s"], ["a"]), node("Mul", ["s", "a"], ["b"]),
         node("MatMul", ["b", "w"], ["m"]), node("MatMul", ["b", "v"], ["n"]), node("Add", ["m", "n"], ["y"])],
        {"x": (4, 8)}, {"y": (4, 8)}, {"w": _weight(8, 8), "v": _weight(8, 8)},
    )  # fmt: skip
    mod, _ = assigned(imported(proto), PrecisionRules("fp16"))
    found = casts(mod)
    assert found.count("→float16") == 2  # s and b; the rest is used once and stays in its kernel
    x = rng.standard_normal((4, 8)).astype("f4")
    _close(run(mod, x)[0], reference(proto, {"x": x})["y"], 3e-2)


def test_narrowing_goes_above_moves():
    proto = model(
        [node("Softmax", ["x"], ["s"]), node("Transpose", ["s"], ["t"], perm=[1, 0]),
         node("Reshape", ["t", "shape"], ["r"]), node("MatMul", ["r", "w"], ["y"])],
        {"x": (4, 8)}, {"y": (2, 2, 8)}, {"w": _weight(8, 8), "shape": np.array([2, 2, 8])},
    )  # fmt: skip
    mod, plan = assigned(imported(proto), PrecisionRules("fp16"))
    assert casts(mod) == ["nn.softmax", "→float16", "permute_dims", "reshape", "matmul"]
    assert plan["t"].reason == "moves data: as its readers want it"


def test_split_concat_and_gather_carry_16_bits():
    proto = model(
        [node("Gather", ["table", "ids"], ["g"]), node("Split", ["g"], ["a", "b"], axis=1),
         node("Concat", ["b", "a"], ["c"], axis=1), node("MatMul", ["c", "w"], ["y"])],
        {"ids": ((4,), TensorProto.INT64)}, {"y": (4, 8)}, {"table": _weight(5000, 8), "w": _weight(8, 8)},
    )  # fmt: skip
    mod, plan = assigned(imported(proto), PrecisionRules("fp16"))
    assert plan["g"].kind == "take"
    assert {e.precision for e in plan.entries} == {"fp16"}
    assert not [c for c in casts(mod) if c == "→float32"]
    ids = np.array([0, -1, 4999, 17])
    _close(run(mod, ids)[0], reference(proto, {"ids": ids})["y"], 4e-3)
    for rules in (PrecisionRules("fp16", prefer="size"), PrecisionRules(operators={"g": BF16})):
        mod, _ = assigned(imported(proto), rules, CPU)
        assert {str(c.value.dtype) for c in _constants(mod) if c.value.shape[0] == 5000} <= {"float16", "bfloat16"}
        _close(run(mod, ids)[0], reference(proto, {"ids": ids})["y"], 3e-2)


def test_storage_keeps_activations_wide_and_weights_short():
    mod, plan = assigned(imported(convnet()), PrecisionRules("fp16", prefer="size"), CPU)
    assert not [c for c in casts(mod) if c.startswith("→")]
    assert {e.precision for e in plan.entries if e.storage} == {"fp16"}
    assert {str(c.value.dtype) for c in _constants(mod) if len(c.value.shape) == 4} >= {"float16"}
    x = rng.standard_normal((1, 3, 12, 12)).astype("f4")
    _close(run(mod, x)[0], reference(convnet(), {"x": x})["y"], 4e-3)


def test_an_accumulator_of_16_bits_on_request():
    proto = model([node("MatMul", ["x", "w"], ["y"])], {"x": (4, 8)}, {"y": (4, 8)}, {"w": _weight(8, 8)})
    rules = PrecisionRules(operators={"y": Assignment("fp16", "fp16")})
    mod, _ = assigned(imported(proto), rules)
    assert casts(mod) == ["→float16", "matmul", "→float32"]
    x = rng.standard_normal((4, 8)).astype("f4")
    _close(run(mod, x)[0], reference(proto, {"x": x})["y"], 1e-2)


@pytest.mark.parametrize("io", ["fp16", "bf16"])
def test_inputs_and_outputs_change_only_when_asked(io):
    mod = imported(mlp(4))
    kept, _ = assigned(mod, PrecisionRules("fp16"))
    assert str(kept["main"].params[0].ty.dtype) == "float32"
    changed, plan = assigned(mod, PrecisionRules("fp16", io=io))
    dtype = {"fp16": "float16", "bf16": "bfloat16"}[io]
    assert str(changed["main"].params[0].ty.dtype) == dtype
    assert str(changed["main"].ret_ty.fields[0].dtype) == dtype
    assert plan.io == io
    x = rng.standard_normal((4, 16)).astype("f4")
    if io == "fp16":
        _close(run(changed, x.astype("f2"))[0].astype("f4"), reference(mlp(4), {"x.in": x})["y:out"], 1e-2)


def test_adding_a_constant_beyond_float16_runs_in_float32():
    proto = model(
        [node("MatMul", ["x", "w"], ["m"]), node("Add", ["m", "big"], ["a"]), node("Sqrt", ["a"], ["b"]),
         node("MatMul", ["b", "w"], ["y"])],
        {"x": (4, 8)}, {"y": (4, 8)}, {"w": _weight(8, 8), "big": np.float32(1e5)},
    )  # fmt: skip
    mod, plan = assigned(imported(proto), PrecisionRules("fp16"))
    assert [plan[n].precision for n in ("m", "a", "b", "y")] == ["fp16", "fp32", "fp32", "fp32"]
    x = rng.standard_normal((4, 8)).astype("f4")
    _close(run(mod, x)[0], reference(proto, {"x": x})["y"], 1e-6)


def test_float16_models_keep_their_casts_and_accumulate_in_float32():
    width = 4096
    proto = model(
        [node("Cast", ["x"], ["h"], to=TensorProto.FLOAT16), node("LayerNormalization", ["h", "g", "c"], ["n"]),
         node("ReduceSum", ["h", "axes"], ["s"]), node("MatMul", ["n", "w"], ["m"]), node("Add", ["m", "s"], ["y"])],
        {"x": (2, width)}, {"y": ((2, 1), TensorProto.FLOAT16)},
        {"g": np.ones(width, "f2"), "c": np.zeros(width, "f2"), "w": np.full((width, 1), 1 / 64, "f2"),
         "axes": np.array([1])},
    )  # fmt: skip
    mod, plan = assigned(imported(proto), PrecisionRules("bf16"))
    assert {e.precision for e in plan.entries} == {"fp16", "fp32"}
    assert plan["m"].precision == "fp16"
    assert casts(mod) == casts(imported(proto))
    assert {str(c.value.dtype) for c in _constants(mod) if c.value.shape == (width, 1)} == {"float16"}
    x = np.abs(rng.standard_normal((2, width))).astype("f4")
    want = x.astype("f2").astype("f8")
    normal = (want - want.mean(1, keepdims=True)) / want.std(1, keepdims=True)
    exact = normal.sum(1, keepdims=True) / 64 + want.sum(1, keepdims=True)
    # a float16 accumulator would be off by units: its step at 3000 is 2
    np.testing.assert_allclose(run(mod, x)[0].astype("f8"), exact, atol=2.5)


def test_nodes_that_were_merged_are_known_by_their_own_names():
    proto = model(
        [node("Conv", ["x", "w"], ["c"], name="/conv", kernel_shape=[1, 1]),
         node("BatchNormalization", ["c", "s", "z", "z", "s"], ["y"], name="/bn")],
        {"x": (1, 3, 4, 4)}, {"y": (1, 5, 4, 4)},
        {"w": _weight(5, 3, 1, 1), "s": np.full(5, 2, "f4"), "z": np.zeros(5, "f4")},
    )  # fmt: skip
    mod = imported(proto)
    for name in ("/conv", "/bn", "/c*"):
        _, plan = assigned(mod, PrecisionRules(operators={name: BF16}))
        assert {e.precision for e in plan.entries if e.kind == "nn.conv2d"} == {"bf16"}


def test_every_operator_has_one_name():
    names = [op.name for _, op in list_operators(imported(convnet()))]
    assert len(names) == len(set(names))
    assert "c0:conv2d" in names


def _constants(mod):
    found = []
    tvm.relax.analysis.post_order_visit(
        mod["main"], lambda e: found.append(e) if isinstance(e, tvm.ir.GenericConst) else None
    )
    return found


def test_other_inputs_than_float32_keep_their_dtype():
    proto = model(
        [node("Gather", ["x", "ids"], ["g"]), node("Where", ["mask", "g", "zero"], ["y"])],
        {"x": (4, 8), "ids": ((2,), TensorProto.INT64), "mask": ((8,), TensorProto.BOOL)}, {"y": (2, 8)},
        {"zero": np.float32(0)},
    )  # fmt: skip
    mod, _ = assigned(imported(proto), PrecisionRules("fp16", io="fp16"))
    assert [str(p.ty.dtype) for p in mod["main"].params] == ["float16", "int64", "bool"]
    x, ids, mask = rng.standard_normal((4, 8)).astype("f2"), np.array([3, 0]), np.arange(8) > 3
    np.testing.assert_array_equal(run(mod, x, ids, mask)[0], np.where(mask, x[ids], np.float16(0)))
