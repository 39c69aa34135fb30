"""CUDA source → cubin, with nvcc or, where there is none, NVRTC. Needs no GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tvmx.cuda.nvrtc import Nvrtc, compile_with, nvrtc
from tvmx.errors import CompileError


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of one kernel, per thread or (static shared memory) per block; bytes."""

    kernel: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture such as "sm_80", and its kernels' resources."""

    data: bytes
    arch: str
    kernels: tuple[Resources, ...]


def nvcc() -> str | None:
    """The compiler: $CUDACXX, nvcc on the PATH, or /usr/local/cuda's; None when there is none."""
    named = os.environ.get("CUDACXX")
    for candidate in (named, "nvcc", "/usr/local/cuda/bin/nvcc"):
        found = shutil.which(candidate) if candidate else None
        if found:
            return found
    return None


def cuda_compiler() -> str | None:
    """What `compile_cubin` uses: nvcc's path, "NVRTC 13.0", or None where neither is there."""
    tool = nvcc()
    if tool is not None:
        return tool
    found = nvrtc()
    return f"NVRTC {found.version[0]}.{found.version[1]}" if found is not None else None


def exact_arch(source: str, arch: str) -> str:
    """The architecture that a source needs: `wgmma` exists on sm_90a alone."""
    return "sm_90a" if arch == "sm_90" and "wgmma." in source else arch


def compile_cubin(source: str, arch: str, name: str = "kernel") -> Cubin:
    """Compile for `arch` ("sm_80"). Raises CompileError without a compiler, or with its first error.

    Code with Hopper's `wgmma` is compiled for sm_90a, the only architecture that has it.
    """
    arch = exact_arch(source, arch)
    tool = nvcc()
    if tool is None:
        found = nvrtc()
        if found is None:
            raise CompileError(
                "no CUDA compiler found: install nvcc, name it in CUDACXX, or "
                "pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt"
            )
        return _by_nvrtc(found, source, arch, name)
    with tempfile.TemporaryDirectory(prefix="tvmx-nvcc-") as folder:
        given, made = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
        given.write_text(source)
        command = [tool, "-cubin", f"-arch={arch}", "-O3", "-std=c++17", "-Xptxas", "-v", "-o", str(made), str(given)]
        done = subprocess.run(command, capture_output=True, text=True)
        rescue = nvrtc() if done.returncode and "nvcc fatal" in done.stderr else None
        if rescue is not None:  # nvcc without its host compiler, or too old for the architecture
            return _by_nvrtc(rescue, source, arch, name)
        if done.returncode:
            lines = [l for l in (done.stderr + done.stdout).splitlines() if "error" in l or "fatal" in l]
            raise CompileError(f"{name}: nvcc for {arch} says: {lines[0] if lines else done.stderr.strip()[:300]}")
        return Cubin(made.read_bytes(), arch, tuple(parse_ptxas(done.stderr + done.stdout)))


def _by_nvrtc(found: Nvrtc, source: str, arch: str, name: str) -> Cubin:
    data, log = compile_with(found, source, arch, name)
    return Cubin(data, arch, tuple(parse_ptxas(log)))


_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


def parse_ptxas(text: str) -> list[Resources]:
    """The resources that `ptxas -v` prints."""
    found: list[Resources] = []
    kernel, frame = "", (0, 0, 0)
    for line in text.splitlines():
        if m := _ENTRY.search(line):
            kernel = m[1]
        elif m := _STACK.search(line):
            frame = (int(m[1]), int(m[2]), int(m[3]))
        elif (m := _USED.search(line)) and kernel:
            found.append(Resources(kernel, int(m[1]), *frame, int(m[2] or 0)))
            kernel, frame = "", (0, 0, 0)
    return found
