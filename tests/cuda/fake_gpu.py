"""A GPU for tests where there is none: `fake_gpu.c`, whose kernels are the emulator's."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvmx import api
from tvmx.cuda import lower
from tvmx.cuda.lower import DeviceProgram
from tvmx.cuda.nvcc import cuda_compiler
from tvmx.debug.emulate.run import build_library
from tvmx.debug.emulate.source import to_cpp
from tvmx.executor import cuda_kernels

SOURCE = Path(__file__).parent / "fake_gpu.c"

needs_gpu_tools = pytest.mark.skipif(
    cuda_compiler() is None or shutil.which("gcc") is None or shutil.which("g++") is None,
    reason="needs nvcc or NVRTC, and gcc and g++ for the emulated device",
)


@dataclass
class FakeGpu:
    """The driver's library and the folder of its kernels."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    programs: list[DeviceProgram] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.driver = self.folder / "libfakegpu.so"
        command = ["gcc", "-O1", "-w", "-shared", "-fPIC", "-o", str(self.driver), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        self.library = ctypes.CDLL(str(self.driver))
        self.monkeypatch.setenv("TVMX_FAKE_KERNELS", str(self.folder))

    def order(self, text: str) -> None:
        """How the streams' work is interleaved: "forward", "backward" or a seed."""
        self.monkeypatch.setenv("TVMX_FAKE_ORDER", text)
        libc = ctypes.CDLL(None)
        libc.setenv(b"TVMX_FAKE_ORDER", text.encode(), 1)

    def calls(self, name: str) -> int:
        return int(self.library.fake_calls(name.encode()))

    def fail(self, name: str, code: int, nth: int = 1) -> None:
        self.library.fake_fail(name.encode(), nth, code)

    @property
    def live(self) -> list[int]:
        """Live memory, modules, streams, events, graphs, contexts."""
        return [int(self.library.fake_live(i)) for i in range(6)]

    def compile(self, model: bytes, name: str = "m", **options: Any) -> Path:
        """`tvmx.compile` into the folder; the kernels' emulations go beside it."""
        programs: list[DeviceProgram] = []

        def remember(*arguments: Any) -> DeviceProgram:
            programs.append(lower.lower_kernel(*arguments))
            return programs[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_kernels, "lower_kernel", remember)
            result = api.compile(model, self.folder / f"{name}.so", **{"target": "cuda-sm80", **options})
        for program in programs:
            self.register(program)
        self.report = result.report
        return result.path

    def register(self, program: DeviceProgram) -> None:
        sizes = [
            f'extern "C" unsigned long long tvmx_sizes_{l.kernel}[] = {{{len(l.arguments)}, '
            f"{', '.join(str(_nbytes(a.shape, a.dtype)) for a in l.arguments)}}};"
            for l in {l.kernel: l for l in program.launches}.values()
        ]
        first, *others = dict.fromkeys(l.kernel for l in program.launches)
        build_library("\n".join([to_cpp(program.source), *sizes]), self.folder / f"{first}.so")
        for other in others:
            (self.folder / f"{other}.so").symlink_to(self.folder / f"{first}.so")


def _nbytes(shape: Sequence[int], dtype: str) -> int:
    from tvmx.executor.lifetimes import dtype_bytes

    return int(np.prod(shape, dtype=np.int64)) * dtype_bytes(dtype)
