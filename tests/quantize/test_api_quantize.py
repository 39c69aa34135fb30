"""The public calls and the command line, with tvmx's own programs doing the calibration runs."""

import json

import numpy as np
import onnx
import pytest

import tvmx
from tests.onnx_models import assert_close, convnet, reference
from tvmx.cli import main
from tvmx.errors import ConfigError
from tvmx.runtime import GraphExecutor

ROWS = np.random.default_rng(0).standard_normal((20, 3, 12, 12)).astype(np.float32)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantize")
    onnx.save(convnet(), folder / "m.onnx")
    np.savez(folder / "x.npz", x=ROWS)
    return folder


def test_quantize_save_compile_run(tmp_path):
    model = tvmx.quantize(convnet(), {"x": ROWS}, scheme=tvmx.Scheme(prefer="size"))
    model.save(tmp_path / "q.onnx")
    tvmx.compile(model, tmp_path / "q.so", threads=1)
    feed = {"x": ROWS[:1]}
    with GraphExecutor(tmp_path / "q.so") as program:
        got = program(feed)
    expected = reference(onnx.load(tmp_path / "q.onnx"), feed)
    # One step of the last integer tensor may round the other way.
    assert_close(got, expected, share=0.02)
    with pytest.raises(ConfigError, match="already"):
        tvmx.quantize(model, {"x": ROWS})
    with pytest.raises(ConfigError, match=r"\.onnx"):
        model.save(tmp_path / "q.so")


def test_command_line(files, capsys):
    def run(*arguments):
        status = main([str(a) for a in arguments])
        return status, capsys.readouterr()

    model, ranges, q = files / "m.onnx", files / "r.json", files / "q.onnx"
    assert run("calibrate", model, "--calib", files / "x.npz", "-o", ranges, "--json")[0] == 0
    options = ["--prefer", "size", "--json"]
    status, out = run("quantize", model, "--ranges", ranges, "--observer", "all", "-o", q, *options)
    assert status == 0
    report = json.loads(out.out)
    assert len(report["layers"]) == 6
    assert set(report["observers"]) == {"minmax", "ema", "percentile", "entropy", "mse"}
    direct = files / "direct.onnx"
    assert "rounded to nearest" in " ".join(report["warnings"])  # ranges hold no inputs to round by
    options += ["--rounding", "nearest"]
    assert run("quantize", model, "--calib", files / "x.npz", "-o", direct, *options)[0] == 0
    assert direct.read_bytes() == q.read_bytes()
    status, out = run("quantize", model, "--ranges", ranges, "-o", q, "--override", "op:Cnov=float")
    assert status == 1
    assert "Conv" in out.err
    status, out = run("quantize", model, "--ranges", ranges, "-o", files / "q.txt")
    assert status == 1
    assert ".so" in out.err


def test_options_from_toml(files, capsys):
    config = files / "q.toml"
    config.write_text(
        '[quantize]\nobserver = "mse"\n[quantize.scheme]\nprefer = "size"\nper_channel = false\n'
        '[quantize.overrides]\n"op:Gemm" = "float"\n'
    )
    q = files / "toml.onnx"
    arguments = ["quantize", files / "m.onnx", "--calib", files / "x.npz", "-o", q, "--config", config, "--json"]
    assert main([str(a) for a in arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["observer"] == "mse"
    assert ["y/Gemm", "Gemm", "an override says float"] in report["kept"]
    config.write_text("[quantize.scheme]\nper_chanel = false\n")
    assert main([str(a) for a in arguments]) == 1
    assert "per_channel" in capsys.readouterr().err


def test_every_option_at_once_runs_through_our_own_programs():
    scheme = tvmx.Scheme(equalize=True, bias_correction=True, overrides=(tvmx.quantize.parse_override("op:*=int8"),))
    result = tvmx.quantize(convnet(), {"x": ROWS}, "all", scheme, max_drop=1e-7, metric="sqnr", threads=1)
    facts = result.report.accuracy
    assert facts["metric"] == "sqnr"
    assert facts["quantized"] < facts["with layers in float"]
    assert facts["layers in float"]
    assert all(la.name not in facts["layers in float"] for la in result.report.layers)
    assert json.loads(json.dumps(result.report.to_json()))["accuracy"] == facts
    ranges = tvmx.calibrate(convnet(), {"x": ROWS[:2]}, threads=1)
    with pytest.raises(ConfigError, match="real inputs"):
        tvmx.quantize(convnet(), ranges, max_drop=0.01)
