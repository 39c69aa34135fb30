"""The whole path: compile and run with a precision, the command line, quantised models."""

import json

import numpy as np
import pytest
from onnx import TensorProto, helper

import tvmx
from tests.onnx_models import assert_close, convnet, mlp, model, reference
from tvmx.cli import main
from tvmx.config import CompileConfig
from tvmx.errors import ConfigError
from tvmx.precision import Assignment, PrecisionRules
from tvmx.runtime import GraphExecutor

node = helper.make_node
rng = np.random.default_rng(0)


def _compile(proto, path, **options):
    return tvmx.compile(proto, path, threads=1, config=CompileConfig(use_shipped_logs=False), **options)


def _run(path, **inputs):
    with GraphExecutor(path, threads=1) as executor:
        return {k: v.copy() for k, v in executor(inputs).items()}


def test_all_float32_compiles_to_the_same_bits(tmp_path):
    x = rng.standard_normal((1, 3, 12, 12)).astype("f4")
    plain = _compile(convnet(), tmp_path / "a.so")
    same = _compile(convnet(), tmp_path / "b.so", precision=PrecisionRules(operators={"*": Assignment("fp32")}))
    assert plain.precision is None
    assert same.precision.is_identity
    assert same.report["parameter_bytes"] == plain.report["parameter_bytes"]
    np.testing.assert_array_equal(_run(plain.path, x=x)["y"], _run(same.path, x=x)["y"])


@pytest.mark.parametrize(("precision", "share"), [("fp16", 2e-3), ("bf16", 2e-2)])
def test_short_weights_halve_the_parameters(tmp_path, precision, share):
    proto = mlp(width=256)
    x = rng.standard_normal((3, 256)).astype("f4")
    plain = _compile(proto, tmp_path / "a.so").report["parameter_bytes"]
    result = _compile(proto, tmp_path / "m.so", precision=precision, prefer="size")
    assert result.report["parameter_bytes"] < 0.55 * plain
    assert any(precision in reason for reason in result.report["precision"])
    assert_close(_run(result.path, **{"x.in": x}), reference(proto, {"x.in": x}), share)


def test_plan_objects_and_files_apply(tmp_path):
    proto = convnet()
    plan = tvmx.plan_precision(proto, "bf16", prefer="size")
    plan.save(tmp_path / "plan.toml")
    for given in (plan, str(tmp_path / "plan.toml")):
        assert plan.diff(_compile(proto, tmp_path / "m.so", precision=given).precision) == []


def test_inputs_and_outputs_in_float16(tmp_path):
    result = _compile(mlp(4), tmp_path / "m.so", precision="fp16", io_precision="fp16")
    x = rng.standard_normal((4, 16)).astype("f2")
    with GraphExecutor(result.path, threads=1) as executor:
        assert executor.inputs[0].dtype == executor.outputs[0].dtype == "float16"
        y = executor({"x.in": x})["y:out"]
    want = reference(mlp(4), {"x.in": x.astype("f4")})["y:out"]
    np.testing.assert_allclose(y.astype("f4"), want, atol=2e-3 * np.abs(want).max())


def test_unknown_names_are_errors_with_neighbours(tmp_path):
    with pytest.raises(ConfigError, match=r"no operator is named 'c3'; did you mean 'c1'"):
        _compile(convnet(), tmp_path / "m.so", precision=PrecisionRules(operators={"c3": Assignment("fp16")}))
    assert not (tmp_path / "m.so").exists()


def _qdq(seed=0):
    """x → Q/DQ → MatMul with int8 weights → Relu → Q/DQ → MatMul with int8 weights per channel."""
    values = np.random.default_rng(seed)
    q0, q1 = (values.integers(-127, 128, (8, 8)).astype(np.int8) for _ in range(2))
    pairs = []
    for name, out in (("x", "xd"), ("r", "rd")):
        pairs.append([node("QuantizeLinear", [name, "s", "z"], [f"{name}q"], name=f"{name}_q"),
                      node("DequantizeLinear", [f"{name}q", "s", "z"], [out], name=f"{name}_dq")])  # fmt: skip
    return model(
        [
            *pairs[0],
            node("DequantizeLinear", ["q0", "ws", "wz"], ["w0"], name="w0_dq"),
            node("MatMul", ["xd", "w0"], ["m0"], name="/first"),
            node("Relu", ["m0"], ["r"], name="/relu"),
            *pairs[1],
            node("DequantizeLinear", ["q1", "cs", "cz"], ["w1"], name="w1_dq", axis=1),
            node("MatMul", ["rd", "w1"], ["y"], name="/second"),
        ],
        {"x": (4, 8)}, {"y": (4, 8)},
        {"s": np.float32(0.05), "z": np.uint8(128), "ws": np.float32(0.01), "wz": np.int8(0), "q0": q0, "q1": q1,
         "cs": np.linspace(0.01, 0.02, 8, dtype="f4"), "cz": np.zeros(8, np.int8)},
    )  # fmt: skip


def test_a_quantised_model_says_int8_and_float32_takes_its_qdq_away(tmp_path):
    proto = _qdq()
    plan = tvmx.plan_precision(proto)
    assert plan["/first"].precision == plan["/second"].precision == "int8"
    assert plan["/first"].assignment.accumulate == "int32"
    x = rng.standard_normal((4, 8)).astype("f4")
    rules = PrecisionRules(operators={"/*": Assignment("fp32")})
    result = _compile(proto, tmp_path / "m.so", precision=rules)
    assert {e.precision for e in result.precision.entries} == {"fp32"}
    assert not any("quantize" in n.op for n in result.graph.nodes)
    arrays = {t.name: np.frombuffer(t.raw_data, np.int8).reshape(8, 8) for t in proto.graph.initializer
              if t.name in ("q0", "q1")}  # fmt: skip
    first = np.maximum(x @ (arrays["q0"] * np.float32(0.01)), 0)
    want = first @ (arrays["q1"] * np.linspace(0.01, 0.02, 8, dtype="f4"))
    assert_close(_run(result.path, x=x), {"y": want}, 1e-5)
    # one in float32 leaves the other its integers
    mixed = tvmx.plan_precision(proto, PrecisionRules("int8", operators={"/second": Assignment("fp16")}), prefer="size")
    assert [mixed[n].precision for n in ("/first", "/second")] == ["int8", "fp16"]
    result = _compile(proto, tmp_path / "n.so", precision=mixed)
    assert_close(_run(result.path, x=x), {"y": want}, 0.05)


def test_int8_without_ranges_says_to_calibrate(tmp_path):
    with pytest.raises(ConfigError, match="tvmx quantize"):
        _compile(convnet(), tmp_path / "m.so", precision="int8")


def test_bf16_gather_and_opset_casts_run(tmp_path):
    table = rng.standard_normal((5000, 8)).astype("f4")
    proto = model(
        [node("Gather", ["table", "ids"], ["g"]), node("Softmax", ["g"], ["y"])],
        {"ids": ((6,), TensorProto.INT64)}, {"y": (6, 8)}, {"table": table},
    )  # fmt: skip
    result = _compile(proto, tmp_path / "m.so", precision="bf16")
    assert result.precision["g"].precision == "bf16"  # fewer bytes to read, nothing to convert twice
    assert result.report["parameter_bytes"] < table.nbytes * 0.6
    ids = np.array([0, 4999, 3, -1, 7, 7])
    assert_close(_run(result.path, ids=ids), reference(proto, {"ids": ids}), 2e-2)


def test_command_line(tmp_path, capsys):
    path = tmp_path / "m.onnx"
    path.write_bytes(convnet().SerializeToString())
    assert main(["precision", str(path), "--precision", "bf16", "--prefer", "size"]) == 0
    assert "c0:conv2d" in capsys.readouterr().out
    saved = str(tmp_path / "plan.toml")
    assert main(["precision", str(path), "--precision", "bf16", "--prefer", "size", "--save", saved]) == 0
    assert main(["precision", str(path), "--diff", saved, "--json"]) == 0
    out = capsys.readouterr().out
    assert "c0:conv2d: fp32 -> bf16" in json.loads(out.splitlines()[-1])
    so = str(tmp_path / "m.so")
    assert main(["compile", str(path), "-o", so, "--precision", saved, "--threads", "1", "--json"]) == 0
    assert "precision" in json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(["compile", str(path), "-o", so, "--precision", "fp15"]) == 1
    assert "did you mean" in capsys.readouterr().err


def test_rules_may_speak_of_the_other_branch_of_a_model(tmp_path):
    def branch(kind, name):
        out = helper.make_tensor_value_info(name, TensorProto.FLOAT, (2, 8))
        return helper.make_graph([node("MatMul", ["x", "w"], [f"{name}m"], name=f"/{name}"),
                                  node(kind, [f"{name}m"], [name])], name, [], [out])  # fmt: skip

    proto = model(
        [node("ReduceSum", ["x"], ["s"], keepdims=0), node("Greater", ["s", "zero"], ["c"]),
         node("If", ["c"], ["y"], then_branch=branch("Relu", "a"), else_branch=branch("Neg", "b"))],
        {"x": (2, 8)}, {"y": (2, 8)}, {"w": rng.standard_normal((8, 8)).astype("f4"), "zero": np.float32(0)},
    )  # fmt: skip
    rules = PrecisionRules(operators={"*/a*": Assignment("fp16"), "*/b*": Assignment("fp32")})
    path = _compile(proto, tmp_path / "m.so", precision=rules).path
    for sign in (1, -1):
        x = sign * np.abs(rng.standard_normal((2, 8))).astype("f4")
        assert_close(_run(path, x=x), reference(proto, {"x": x}), 2e-3)
