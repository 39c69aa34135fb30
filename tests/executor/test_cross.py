"""Cross-compilation: aarch64 runs under qemu-user, x86-64 levels below this machine's run here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.executor.programs import build, lowered
from tvmx.errors import ArtifactError, CompileError
from tvmx.executor import link
from tvmx.executor.bundle import write_bundle
from tvmx.runtime import GraphExecutor
from tvmx.runtime.artifact import read_artifact
from tvmx.target import resolve

HERE = Path(__file__).parent


def _program():
    from tvm import relax

    weights = np.random.default_rng(0).standard_normal((48, 40)).astype("float32")

    def body(b, x):
        y = b.emit(relax.op.nn.relu(b.emit(relax.op.matmul(x, relax.const(weights)))))
        return [b.emit(relax.op.nn.softmax(y)), y]

    def reference(x):
        y = np.maximum(x @ weights, 0)
        e = np.exp(y - y.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True), y

    return lowered([("x", (20, 48), "float32")], body), reference


@pytest.mark.parametrize("preset", ["aarch64-neon", "aarch64-dotprod"])
def test_aarch64_under_qemu(tmp_path, preset):
    gcc, qemu = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if gcc is None or qemu is None:
        pytest.skip("needs gcc-aarch64-linux-gnu and qemu-user")
    mod, reference = _program()
    path = build(mod, ["p", "y"], tmp_path / "m.so", resolve(preset, 2), scheduled=True).path
    assert read_artifact(path).manifest.arch == "aarch64"
    with pytest.raises(ArtifactError, match="compiled for aarch64"):
        GraphExecutor(path)
    bundle = write_bundle(path, tmp_path / "bundle").folder
    x = np.random.default_rng(1).standard_normal((20, 48)).astype("float32")
    x.tofile(tmp_path / "x.bin")
    command = [gcc, "-O1", f"-I{bundle / 'include'}", str(HERE / "harness.c"), "-o", "run", str(path), "-Wl,-rpath,."]
    subprocess.run(command, cwd=tmp_path, check=True)
    command = [qemu, "-L", "/usr/aarch64-linux-gnu", "-cpu", "max", "./run", "x.bin"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    for index, want in enumerate(reference(x)):
        got = np.fromfile(tmp_path / f"output_{index}.bin", "float32").reshape(want.shape)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("preset", ["x86_64-sse", "x86_64-avx2", "x86_64-avx512"])
def test_x86_levels_run_where_the_machine_has_them(tmp_path, preset):
    mod, reference = _program()
    path = build(mod, ["p", "y"], tmp_path / "m.so", resolve(preset, 2), scheduled=True).path
    x = np.random.default_rng(1).standard_normal((20, 48)).astype("float32")
    try:
        executor = GraphExecutor(path)
    except ArtifactError as error:
        pytest.skip(f"this machine lacks the features: {error}")
    with executor:
        for got, want in zip(executor({"x": x}).values(), reference(x)):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_a_missing_compiler_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(link.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(CompileError, match="apt-get install gcc-aarch64-linux-gnu"):
        link.Toolchain.of(resolve("aarch64-neon"))
    with pytest.raises(CompileError, match="apt-get install gcc`"):
        link.Toolchain.of(resolve("x86_64-sse"))
