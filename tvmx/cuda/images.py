"""CUDA source → what a library embeds of a kernel: machine code for one architecture, and PTX for newer devices."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tvmx.cuda.nvcc import Cubin, nvcc, parse_ptxas
from tvmx.errors import CompileError


@dataclass(frozen=True)
class Image:
    """One compiled source: its cubin, and the PTX that the driver compiles for devices of a newer major version."""

    cubin: Cubin
    ptx: bytes  # ends with a zero byte, as the driver wants it


def compile_image(source: str, arch: str, name: str = "kernel") -> Image:
    """Compile once for `arch` ("sm_80"), keeping both. Raises CompileError without nvcc, or with its first error."""
    tool = nvcc()
    if tool is None:
        raise CompileError("no CUDA compiler found: install nvcc, or name it in CUDACXX")
    virtual = arch.replace("sm_", "compute_")
    with tempfile.TemporaryDirectory(prefix="tvmx-nvcc-") as folder:
        given = Path(folder) / "kernel.cu"
        given.write_text(source)
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
        return Image(cubin, texts[0].read_bytes().rstrip(b"\0") + b"\0")
