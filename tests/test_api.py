"""The whole path on small models: import → passes → schedules → memory → .so → run, against ONNX Runtime."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import tvmx
from tests.onnx_models import assert_close, convnet, mlp, model, reference
from tvmx.config import CompileConfig, Dim
from tvmx.errors import ConfigError, InputError, ModelError, TvmxError
from tvmx.runtime import GraphExecutor


def _compile(proto, path, **options):
    return tvmx.compile(proto, path, threads=1, config=CompileConfig(use_shipped_logs=False), **options)


def test_convnet_agrees_with_onnxruntime(tmp_path):
    proto = convnet()
    result = _compile(proto, tmp_path / "m.so")
    x = np.random.default_rng(1).standard_normal((1, 3, 12, 12)).astype(np.float32)
    with GraphExecutor(result.path, threads=1) as executor:
        assert_close(executor({"x": x}), reference(proto, {"x": x}))
        assert executor.arena_bytes >= executor.arena_lower_bound > 0
    assert result.graph is not None
    assert result.report["vm_reason"] is None


def test_names_and_symbolic_batch_survive(tmp_path):
    proto = mlp()
    path = _compile(proto, tmp_path / "m.so", shapes={"x.in": (Dim("N", 1, 8), 16)}).path
    with GraphExecutor(path, threads=1) as executor:
        assert [i.name for i in executor.inputs] == ["x.in"]
        assert [o.name for o in executor.outputs] == ["y:out"]
        for n in (1, 8, 3, 8):
            x = np.random.default_rng(n).standard_normal((n, 16)).astype(np.float32)
            assert_close(executor({"x.in": x}), reference(proto, {"x.in": x}))
        with pytest.raises(InputError, match="8"):
            executor({"x.in": np.zeros((9, 16), np.float32)})


def test_constants_bind_an_input(tmp_path):
    proto = model(
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        {"x": (2, 6), "shape": ((2,), TensorProto.INT64)},
        {"y": ("a", "b")},
    )
    path = _compile(proto, tmp_path / "m.so", constants={"shape": np.array([3, 4])}).path
    with GraphExecutor(path, threads=1) as executor:
        assert [i.name for i in executor.inputs] == ["x"]
        x = np.arange(12, dtype=np.float32).reshape(2, 6)
        np.testing.assert_array_equal(executor({"x": x})["y"], x.reshape(3, 4))


def test_constant_input_and_repeated_outputs_are_copies(tmp_path):
    proto = model(
        [
            helper.make_node("Relu", ["x"], ["r"]),
            helper.make_node("Identity", ["r"], ["r2"]),
            helper.make_node("Identity", ["x"], ["same"]),
            helper.make_node("Identity", ["c"], ["const"]),
        ],
        {"x": (4,)},
        {"r": (4,), "r2": (4,), "same": (4,), "const": (2,)},
        {"c": np.array([1, 2], np.float32)},
    )
    x = np.array([-1, 2, -3, 4], np.float32)
    with GraphExecutor(_compile(proto, tmp_path / "m.so").path, threads=1) as executor:
        outputs = executor({"x": x})
        assert_close(outputs, reference(proto, {"x": x}))
        outputs["r"][:] = 7
        outputs["const"][:] = 7
        assert_close(executor({"x": x}), reference(proto, {"x": x}))
        assert outputs["r2"][1] == 2


def test_entries_share_one_file(tmp_path):
    proto = mlp()
    entries = {"b1": {"x.in": (1, 16)}, "b4": {"x.in": (4, 16)}}
    path = _compile(proto, tmp_path / "m.so", entries=entries).path
    for entry, n in (("b1", 1), ("b4", 4), (None, 4), (None, 1)):
        x = np.random.default_rng(n).standard_normal((n, 16)).astype(np.float32)
        with GraphExecutor(path, threads=1, entry=entry) as executor:
            assert_close(executor({"x.in": x}), reference(proto, {"x.in": x}))


def test_a_run_time_if_becomes_two_programs(tmp_path):
    def branch(op, name):
        return helper.make_graph(
            [helper.make_node(op, ["x"], [name])],
            op,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, (4,))],
        )

    proto = model(
        [
            helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
            helper.make_node("Greater", ["s", "zero"], ["positive"]),
            helper.make_node("If", ["positive"], ["y"], then_branch=branch("Exp", "a"), else_branch=branch("Neg", "b")),
        ],
        {"x": (4,)},
        {"y": (4,)},
        {"zero": np.float32(0)},
    )
    with GraphExecutor(_compile(proto, tmp_path / "m.so").path, threads=1) as executor:
        for sign in (1, -1, 1):
            x = np.full(4, sign * 0.5, np.float32)
            assert_close(executor({"x": x}), reference(proto, {"x": x}))
            executor.set_input("x", x)
            executor.run()
            assert_close({"y": executor.get_output(0)}, reference(proto, {"x": x}))


def test_dump_ir_writes_each_phase(tmp_path):
    config = CompileConfig(use_shipped_logs=False, dump_ir=str(tmp_path / "ir"))
    tvmx.compile(mlp(2), tmp_path / "m.so", threads=1, config=config)
    names = sorted(p.name for p in (tmp_path / "ir").iterdir())
    assert names[0] == "01_canonicalize.py"
    assert len(names) >= 4


def test_a_failed_compile_keeps_the_old_output(tmp_path):
    path = tmp_path / "m.so"
    path.write_bytes(b"old")
    broken = convnet()
    broken.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(ModelError, match="NoSuchOperator"):
        _compile(broken, path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"target": "pentium"}, ConfigError),
        ({"shapes": {"nope": (1, 2)}}, TvmxError),
        ({"shapes": {"x": (1, 3, 12)}}, TvmxError),
        ({"constants": {"nope": np.zeros(1)}}, TvmxError),
        ({"log": "/nonexistent/folder/of/logs"}, TvmxError),
    ],
)
def test_bad_options_are_one_clear_error(tmp_path, options, error):
    with pytest.raises(error):
        _compile(convnet(), tmp_path / "m.so", **options)
    assert not (tmp_path / "m.so").exists()


def test_an_imported_model_takes_no_shapes_again():
    imported = tvmx.import_onnx(convnet())
    with pytest.raises(ConfigError, match="imported already"):
        tvmx.import_onnx(imported, shapes={"x": (2, 3, 12, 12)})


def test_verify_lists_every_pass():
    checks = tvmx.verify(convnet(), threads=1)
    assert len(checks) > 4
    assert all(check.ok for check in checks), [str(c) for c in checks if not c.ok]


def test_cli_compile_run_inspect(tmp_path, capsys):
    from tvmx.cli import main

    onnx.save(mlp(), tmp_path / "m.onnx")
    so = str(tmp_path / "m.so")
    assert (
        main(["compile", str(tmp_path / "m.onnx"), "-o", so, "--shape", "x.in=3,16", "--threads", "1", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["path"] == so
    x = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    assert main(["run", so, "--input", f"x.in={tmp_path / 'x.npy'}", "-o", str(tmp_path / "y.npz"), "--json"]) == 0
    capsys.readouterr()
    with np.load(tmp_path / "y.npz") as outputs:
        assert_close(dict(outputs), reference(mlp(), {"x.in": x}))
    assert main(["inspect", so, "--json", "--memory", str(tmp_path / "m.svg")]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"]
    assert (tmp_path / "m.svg").read_text().startswith("<svg")
    assert main(["bench", so, "--repeat", "3", "--json"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["compile", "missing.onnx", "-o", "x.so"],
        ["run", "missing.so"],
        ["inspect", "missing.so"],
        ["memory", "plan", "missing.csv"],
        ["log", "show", "missing-folder"],
    ],
)
def test_cli_errors_are_one_line_and_status_1(arguments, capsys, tmp_path, monkeypatch):
    from tvmx.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith("tvmx: ")
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
