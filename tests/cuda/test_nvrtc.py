"""NVRTC in nvcc's place: the same kernels, no toolkit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cuda.test_sass import first_program
from tests.schedules.cuda.products import Convolution, Product
from tvmx.cuda import nvcc as module
from tvmx.cuda.nvcc import compile_cubin, cuda_compiler
from tvmx.cuda.nvrtc import nvrtc
from tvmx.cuda.sass import disassembler, inspect_program
from tvmx.errors import CompileError
from tvmx.target import PRESETS

needs_nvrtc = pytest.mark.skipif(
    nvrtc() is None, reason="needs NVRTC: pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt"
)

CASES = {
    "mma": ("cuda-sm90", Product((64, 64), (64, 64)), "HMMA.16816.F32"),
    "bf16": ("cuda-sm80", Product((64, 64), (64, 64), dtype="bfloat16"), "HMMA.16816.F32.BF16"),
    "wmma": ("cuda-sm75", Convolution((1, 8, 8, 32), 32, dtype="int8"), "IMMA.8816.S8.S8"),
}


@needs_nvrtc
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_without_nvcc(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    preset, case, instruction = CASES[name]
    monkeypatch.setattr(module, "nvcc", lambda: None)
    assert str(cuda_compiler()).startswith("NVRTC ")
    _, program = first_program(case, preset)
    if disassembler() is None:
        pytest.skip("reading machine code needs cuobjdump")
    (code,) = inspect_program(program, PRESETS[preset].gpu)
    assert instruction in code.shapes
    assert (code.spills, code.stack) == (0, 0)
    assert code.registers > 0


@needs_nvrtc
def test_an_error_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "nvcc", lambda: None)
    with pytest.raises(CompileError, match=r'k: NVRTC for sm_80 says: .*"nothing" is undefined'):
        compile_cubin('extern "C" __global__ void k(int* a) { *a = nothing; }', "sm_80", "k")


def test_with_neither_there_is_source_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "nvcc", lambda: None)
    monkeypatch.setattr(module, "nvrtc", lambda: None)
    assert cuda_compiler() is None
    _, program = first_program(Product((16, 32), (32, 16)), "cuda-sm80")
    assert "__global__" in program.source
    with pytest.raises(CompileError, match="nvidia-cuda-nvrtc"):
        compile_cubin(program.source, "sm_80")


@needs_nvrtc
def test_a_machine_without_a_toolkit_on_its_path() -> None:
    code = (
        "import tvmx.cuda.nvcc as m; import os; found = m.cuda_compiler(); print(found); "
        "print(len(m.compile_cubin('extern \"C\" __global__ void k(int* a) { *a = 1; }', 'sm_86').data) > 0)"
    )
    env = {**os.environ, "PATH": "/nowhere", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    env.pop("CUDACXX", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("NVRTC") or first == "/usr/local/cuda/bin/nvcc"  # which finds no host compiler
    assert second == "True"
