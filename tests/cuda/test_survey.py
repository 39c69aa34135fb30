"""Whole programs for CUDA targets: every kernel scheduled, nearly all work on Tensor Cores, each kernel right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import networks
from tvmx import api, cli
from tvmx.debug.emulate import compiler
from tvmx.errors import ConfigError


def small(name: str, quantized: bool) -> bytes:
    if name == "resnet":
        model = networks.resnet50(size=64, depths=(1, 1), width=32, quantized=quantized)
    else:
        model = networks.bert(length=32, layers=1, width=64, heads=2, quantized=quantized)
    return bytes(model.SerializeToString())


@pytest.mark.parametrize(
    ("target", "name", "quantized"),
    [
        ("cuda-sm80", "resnet", False),
        ("cuda-sm90", "resnet", True),
        ("cuda-sm75", "bert", False),
        ("cuda-sm86", "bert", True),
    ],
)
def test_work_is_on_tensor_cores(target: str, name: str, quantized: bool) -> None:
    found = api.survey(small(name, quantized), target, precision="fp16", code=False)
    assert found.tensor_core_share >= 0.95, found
    assert {k.rule for k in found.kernels} <= {"cuda.mma", "cuda.wmma", "cuda.elementwise", "cuda.dlight"}
    wanted = "cuda.wmma" if target == "cuda-sm75" else "cuda.mma"
    assert any(k.rule == wanted for k in found.kernels)
    assert any("int8" in k.name for k in found.kernels) == quantized


@pytest.mark.skipif(compiler() is None, reason="the emulator needs a C++ compiler")
def test_verify_emulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(small("bert", True))
    arguments = ["verify", str(path), "--emulate", "--target", "cuda-sm86", "--precision", "fp16", "--json"]
    assert cli.main(arguments) == 0
    checks = json.loads(capsys.readouterr().out)
    assert len(checks) > 8
    assert all(c["ok"] and not c["conflicts"] for c in checks)


def test_a_cpu_target_is_refused() -> None:
    with pytest.raises(ConfigError, match="no CUDA target"):
        api.survey(b"", "x86_64-avx2")


def test_what_needs_a_cpu_says_so() -> None:
    with pytest.raises(ConfigError, match="--emulate"):
        api.verify(small("bert", False), target="cuda-sm80")
