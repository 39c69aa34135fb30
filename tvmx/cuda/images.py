"""CUDA source → what a library embeds of a kernel: machine code for one architecture, and PTX for newer devices."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tvmx.cuda.nvcc import Cubin, compile_cubin, exact_arch, nvcc, parse_ptxas
from tvmx.cuda.nvrtc import compile_with, nvrtc
from tvmx.errors import CompileError


@dataclass(frozen=True)
class Image:
    """One compiled source: its cubin, and the PTX that the driver compiles for devices of a newer major version."""

    cubin: Cubin
    ptx: bytes  # ends with a zero byte, as the driver wants it


def compile_image(source: str, arch: str, name: str = "kernel") -> Image:
    """Compile for `arch` ("sm_80"). Raises CompileError without a compiler, or with its first error.

    Code with Hopper's `wgmma` is compiled for sm_90a; neither its cubin nor its PTX runs on another device.
    """
    arch = exact_arch(source, arch)
    tool = nvcc()
    if tool is None:
        cubin = compile_cubin(source, arch, name)
        found = nvrtc()
        assert found is not None, "what compiled the cubin"
        text, _ = compile_with(found, source, _virtual(arch), name)
        return Image(cubin, _terminated(text))
    with tempfile.TemporaryDirectory(prefix="tvmx-nvcc-") as folder:
        given = Path(folder) / "kernel.cu"
        given.write_text(source)
        virtual = _virtual(arch)
        # One run of the front end serves both; what nvcc keeps is what a fat binary would hold.
        command = [
            tool, "-fatbin", "-gencode", f"arch={virtual},code=[{arch},{virtual}]", "-O3", "-std=c++17", "-w",
            "-Xptxas", "-v", "--keep", "--keep-dir", folder, "-o", str(Path(folder) / "kernel.fatbin"), str(given),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode:
            lines = [l for l in (done.stderr + done.stdout).splitlines() if "error" in l or "fatal" in l]
            raise CompileError(f"{name}: nvcc for {arch} says: {lines[0] if lines else done.stderr.strip()[:300]}")
        cubins, texts = sorted(Path(folder).glob("*.cubin")), sorted(Path(folder).glob("*.ptx"))
        if len(cubins) != 1 or len(texts) != 1:
            raise CompileError(f"{name}: nvcc for {arch} left {len(cubins)} cubins and {len(texts)} PTX files, not one")
        cubin = Cubin(cubins[0].read_bytes(), arch, tuple(parse_ptxas(done.stderr + done.stdout)))
        return Image(cubin, _terminated(texts[0].read_bytes()))


def _virtual(arch: str) -> str:
    return arch.replace("sm_", "compute_")


def _terminated(text: bytes) -> bytes:
    return text.rstrip(b"\0") + b"\0"
