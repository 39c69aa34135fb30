"""The bundle runs from an empty tree: Python with numpy only, and C++ through CMake."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.executor.programs import build, entry_program, lowered
from tests.executor.test_vm_build import _head_program
from tvmx.errors import ConfigError
from tvmx.executor import build_artifact
from tvmx.executor.bundle import write_bundle
from tvmx.runtime import GraphExecutor
from tvmx.target import resolve


def _softmax(rows):
    from tvm import relax

    def body(b, x):
        y = b.emit(relax.op.nn.softmax(x))
        return b.emit(relax.op.nn.softmax(b.emit(relax.op.multiply(y, relax.const(np.float32(3))))))

    return lowered([("x", (rows, 16), "float32")], body)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(_softmax(8), ['y "quoted"'], tmp_path_factory.mktemp("b") / "m.so", scheduled=True).path


def _bare_python(tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """This Python with numpy and nothing else to import, in an empty environment."""
    site = tmp_path / "site"
    site.mkdir()
    folder = Path(np.__file__).parent
    (site / "numpy").symlink_to(folder)
    if (folder.parent / "numpy.libs").exists():
        (site / "numpy.libs").symlink_to(folder.parent / "numpy.libs")
    return [sys.executable, "-S", "-s"], {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"}


def test_python_loader_needs_numpy_only(library, tmp_path):
    bundle = write_bundle(library, tmp_path / "bundle")
    assert bundle.bytes - bundle.parameter_bytes < 1_000_000
    moved = tmp_path / "elsewhere"
    shutil.move(bundle.folder, moved)
    x = np.random.default_rng(0).standard_normal((8, 16)).astype("float32")
    np.save(tmp_path / "x.npy", x)
    python, env = _bare_python(tmp_path)
    probe = [*python, "-c", "import tvm"]
    assert subprocess.run(probe, env=env, capture_output=True, check=False).returncode != 0
    done = subprocess.run(
        [*python, str(moved / "python" / "run_model.py"), str(tmp_path / "x.npy")],
        env=env, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with GraphExecutor(library) as ex:
        first = ex({"x": x})['y "quoted"'].ravel()[:4].tolist()
    assert str(first) in done.stdout


def test_library_needs_no_library_beyond_libc(library):
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("no readelf on this machine")
    out = subprocess.run([readelf, "-d", str(library)], capture_output=True, text=True, check=True).stdout
    needed = {l.split("[")[1].rstrip("]") for l in out.splitlines() if "NEEDED" in l}
    assert needed <= {"libc.so.6", "libm.so.6", "libpthread.so.0", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}


def test_cpp_example_builds_and_agrees(library, tmp_path):
    if shutil.which("cmake") is None or shutil.which("g++") is None:
        pytest.skip("no cmake or g++ on this machine")
    bundle = write_bundle(library, tmp_path / "bundle")
    assert bundle.cpp
    x = np.random.default_rng(1).standard_normal((8, 16)).astype("float32")
    x.tofile(tmp_path / "x.bin")
    for command in (
        ["cmake", "-S", "bundle/cpp", "-B", "build"],
        ["cmake", "--build", "build"],
        ["build/run_model", "--threads", "2", "x.bin"],
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    got = np.fromfile(tmp_path / "output_0.bin", "float32").reshape(8, 16)
    with GraphExecutor(library) as ex:
        np.testing.assert_array_equal(got, ex({"x": x})['y "quoted"'])
    short = tmp_path / "short.bin"
    short.write_bytes(b"123")
    done = subprocess.run(["build/run_model", str(short)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "expected 512 bytes" in done.stderr


def test_entries_are_listed_in_the_header(tmp_path):
    target = resolve("native", 1)
    programs = [entry_program(_softmax(n), ["y"], target, entry=f"b{n}") for n in (1, 4)]
    path = build_artifact(programs, target, tmp_path / "m.so").path
    header = (write_bundle(path, tmp_path / "bundle").folder / "include" / "tvmx_model.h").read_text()
    assert "tvmx_run_b1" in header
    assert '{"b4", tvmx_run_b4, 1, TVMX_INPUTS_b4, 1, TVMX_OUTPUTS_b4, 256}' in header


def test_symbolic_model_brings_the_planner_and_no_cpp(tmp_path):
    path = build(_softmax("N"), ["y"], tmp_path / "m.so").path
    bundle = write_bundle(path, tmp_path / "bundle")
    assert not bundle.cpp
    assert "symbolic" in (bundle.folder / "README.md").read_text()
    python, env = _bare_python(tmp_path)
    np.save(tmp_path / "x.npy", np.ones((5, 16), "float32"))
    run = [*python, str(bundle.folder / "python" / "run_model.py"), str(tmp_path / "x.npy")]
    done = subprocess.run(run, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "float32[5, 16] [0.0625" in done.stdout


def test_vm_model_brings_its_runtime(tmp_path):
    path = build_artifact([_head_program()], resolve("native", 1), tmp_path / "m.so").path
    bundle = write_bundle(path, tmp_path / "bundle")
    names = {f.name for f in bundle.files}
    assert {"libtvm_runtime.so", "libtvm_ffi.so"} <= names
    python, env = _bare_python(tmp_path)
    np.save(tmp_path / "x.npy", np.arange(8, dtype="float32"))
    np.save(tmp_path / "count.npy", np.array([3]))
    env = {**env, "PYTHONPATH": env["PYTHONPATH"] + os.pathsep + _typing_extensions(tmp_path)}
    run = [
        *python,
        str(bundle.folder / "python" / "run_model.py"),
        *(str(tmp_path / f) for f in ("x.npy", "count.npy")),
    ]
    done = subprocess.run(run, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "y: float32[3] [0.0, 1.0, 2.0]" in done.stdout


def _typing_extensions(tmp_path: Path) -> str:
    """tvm_ffi's one dependency."""
    import typing_extensions

    folder = tmp_path / "extensions"
    folder.mkdir()
    shutil.copy(typing_extensions.__file__, folder)
    return str(folder)


def test_a_folder_in_use_is_refused(library, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        write_bundle(library, tmp_path / "full")
