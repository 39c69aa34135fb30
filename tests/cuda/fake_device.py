"""A CUDA device for tests where there is none: `fake_driver.c`, whose kernels are the emulator's."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

from tvmx.cuda.lower import DeviceProgram
from tvmx.debug.emulate.run import build_library
from tvmx.debug.emulate.source import to_cpp

SOURCE = Path(__file__).parent / "fake_driver.c"


def available() -> bool:
    """Is there a C compiler?"""
    return shutil.which("gcc") is not None and shutil.which("g++") is not None


def build_driver(folder: Path) -> Path:
    """The driver's library, to be named in TVMX_CUDA_DRIVER; kernels lie in `folder`, named in TVMX_FAKE_KERNELS."""
    output = folder / "libfakecuda.so"
    command = ["gcc", "-O1", "-w", "-shared", "-fPIC", "-o", str(output), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return output


def cubin_of(candidate: Path) -> bytes:
    """The machine code in a candidate's library."""
    library = ctypes.CDLL(str(candidate))
    start = ctypes.addressof(ctypes.c_char.in_dll(library, "tvmx_cubin"))
    head = ctypes.string_at(start, 64)
    size = int.from_bytes(head[40:48], "little")
    size += int.from_bytes(head[58:60], "little") * int.from_bytes(head[60:62], "little")
    return ctypes.string_at(start, size)


def register(folder: Path, program: DeviceProgram, cubin: bytes) -> None:
    """Let the driver run `program` where it is given `cubin`."""
    value = 0xCBF29CE484222325
    for byte in cubin:
        value = ((value ^ byte) * 0x100000001B3) & (2**64 - 1)
    counts = [f'extern "C" int tvmx_count_{l.kernel} = {len(l.arguments)};' for l in program.launches]
    build_library("\n".join([to_cpp(program.source), *counts]), folder / f"{value:016x}.so")
