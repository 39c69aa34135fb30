"""Compile an emulated kernel with g++ and run its launches on numpy arrays."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tvmx.cuda.lower import DeviceProgram, Launch, lower_kernel
from tvmx.cuda.symbolic import SymbolicProgram
from tvmx.debug.emulate.source import to_cpp
from tvmx.errors import CompileError, InputError

FIGURES = ("conflicts", "matrix_loads", "barriers", "copies", "mmas", "copy_conflicts")
HERE = Path(__file__).parent


class KernelFault(CompileError):
    """An emulated kernel did what would be undefined on a GPU; the message names block, thread and reason."""


@dataclass(frozen=True)
class Emulation:
    """Outputs of a program and what its launches did, in all.

    `conflicts` are extra shared-memory wavefronts of `matrix_loads` 8×8 ldmatrix reads: 0 is conflict-free.
    `copy_conflicts` are those of cp.async: a warp's copies beyond one wavefront per 128 bytes.
    """

    outputs: tuple[np.ndarray, ...]
    conflicts: int
    matrix_loads: int
    barriers: int
    copies: int  # cp.async issued by all threads
    mmas: int  # matrix instructions of all warps
    copy_conflicts: int = 0


class _Figures(ctypes.Structure):
    _fields_ = [(n, ctypes.c_long) for n in FIGURES]


def emulate(
    func: Any, target: Any, inputs: Sequence[np.ndarray], reverse: bool = False, races: bool = True
) -> Emulation:
    """Lower a scheduled PrimFunc for `target` (kind "cuda") and run it on `inputs`, its first tensor parameters.

    The other parameters are outputs. `reverse` runs the threads of a block in reverse order; `races` False leaves
    out the race checks (about three times as fast). Raises KernelFault, or CompileError where it does not lower.
    """
    return run_program(lower_kernel(func, target), inputs, reverse, races)


def run_program(
    program: DeviceProgram, inputs: Sequence[np.ndarray], reverse: bool = False, races: bool = True
) -> Emulation:
    """Run the launches of a lowered program in order. Raises KernelFault, InputError."""
    tensors = [np.ascontiguousarray(a) for a in inputs]
    for array, parameter in zip(tensors, program.parameters):
        if array.shape != parameter.shape or _storage(parameter.dtype).itemsize != array.dtype.itemsize:
            raise InputError(
                f"tensor {parameter.index} is {array.dtype}{list(array.shape)}; "
                f"the kernel takes {parameter.dtype}{list(parameter.shape)}"
            )
    for parameter in program.parameters[len(tensors) :]:
        tensors.append(_poisoned(parameter.shape, parameter.dtype))
    library = _library(to_cpp(program.source))
    return _run_launches(library, program, tensors, len(inputs), reverse, races)


def run_symbolic(
    program: SymbolicProgram, inputs: Sequence[Sequence[np.ndarray]], reverse: bool = False, races: bool = True
) -> list[Emulation]:
    """Run one symbolic program on several sets of inputs, whose shapes say the dims; it is compiled once."""
    library = _library(to_cpp(program.source))
    outcomes = []
    for arrays in inputs:
        bound = program.bind(program.dims_of([a.shape for a in arrays]))
        tensors = [np.ascontiguousarray(a) for a in arrays]
        tensors += [_poisoned(p.shape, p.dtype) for p in bound.parameters[len(arrays) :]]
        outcomes.append(_run_launches(library, bound, tensors, len(arrays), reverse, races))
    return outcomes


def _run_launches(
    library: Any, program: DeviceProgram, tensors: list[np.ndarray], given: int, reverse: bool, races: bool
) -> Emulation:
    spaces: dict[int, np.ndarray] = {}
    total = [0] * len(FIGURES)
    for launch in program.launches:
        for argument in launch.arguments:
            if argument.value is None and argument.index < 0 and argument.index not in spaces:
                spaces[argument.index] = _poisoned(argument.shape, argument.dtype)
        arrays = [
            a.value if a.value is not None else tensors[a.index] if a.index >= 0 else spaces[a.index]
            for a in launch.arguments
        ]
        figures = _run(library, launch, arrays, reverse, races)
        total = [t + getattr(figures, n) for t, n in zip(total, FIGURES)]
    return Emulation(tuple(tensors[given:]), *total)


def _run(library: Any, launch: Launch, arrays: list[np.ndarray | int], reverse: bool, races: bool) -> _Figures:
    """`arrays` in the order of the kernel's arguments; a number is a scalar, and travels as a pointer's bits."""
    entry = ctypes.cast(getattr(library, f"tvmx_entry_{launch.kernel}"), ctypes.c_void_p)
    # Copies in memory of their own, 256-byte aligned as on a device, apart from each other so that bounds are seen.
    homes = [a if isinstance(a, int) else _aligned(a) for a in arrays]
    pointers = (ctypes.c_void_p * max(1, len(arrays)))(*[h if isinstance(h, int) else h.ctypes.data for h in homes])
    sizes = (ctypes.c_uint64 * max(1, len(arrays)))(*[0 if isinstance(a, int) else a.nbytes for a in arrays])
    reason = ctypes.create_string_buffer(512)
    figures = _Figures()
    failed = library.tvmx_emulate(
        entry, pointers, sizes, len(arrays), (ctypes.c_uint * 3)(*launch.grid), (ctypes.c_uint * 3)(*launch.block),
        ctypes.c_uint(launch.shared_bytes), int(reverse), int(races), ctypes.byref(figures), reason,
    )  # fmt: skip
    for array, home in zip(arrays, homes):
        if not isinstance(array, int):
            array[...] = home
    if failed:
        raise KernelFault(f"{launch.kernel}: {reason.value.decode(errors='replace')}")
    return figures


def _aligned(array: np.ndarray) -> np.ndarray:
    guard = 8192
    raw = np.empty(array.nbytes + 2 * guard + 256, np.uint8)
    start = guard + (-(raw.ctypes.data + guard)) % 256
    home = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    home[...] = array
    return home


def _storage(dtype: str) -> Any:
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)


def _poisoned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Memory as a kernel finds it: all bits set, which is a NaN in every float type."""
    kind = _storage(dtype)
    raw = np.full(int(np.prod(shape)) * kind.itemsize, 0xFF, np.uint8)
    poisoned: np.ndarray = raw.view(kind).reshape(shape)
    return poisoned


def compiler() -> str | None:
    """The C++ compiler that the emulator uses, None when there is none."""
    return shutil.which(os.environ.get("CXX") or "g++")


@functools.cache
def _runtime_object() -> Path:
    """runtime.cpp compiled once per version of the sources, in the user's cache."""
    text = (HERE / "runtime.cpp").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tvmx" / "emulate"
    path = cache / f"runtime-{hashlib.sha256(text).hexdigest()[:16]}.o"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=cache, suffix=".o")
        os.close(handle)
        _compile(["-O2", "-fPIC", *_cpu_flags(), "-c", str(HERE / "runtime.cpp"), "-o", temporary])
        os.replace(temporary, path)
    return path


def _cpu_flags() -> list[str]:
    from tvmx.target import cpu_features

    return ["-mf16c"] if "f16c" in cpu_features() else []


def _library(code: str) -> Any:
    with tempfile.TemporaryDirectory(prefix="tvmx-emulate-") as folder:
        target = Path(folder) / "kernel.so"
        build_library(code, target)
        return ctypes.CDLL(str(target))


def build_library(code: str, output: Path) -> None:
    """Compile what `to_cpp` makes, and the emulator with it, into a shared object. Raises CompileError."""
    runtime = _runtime_object()
    with tempfile.TemporaryDirectory(prefix="tvmx-emulate-") as folder:
        source, built = Path(folder) / "kernel.cpp", Path(folder) / "kernel.o"
        source.write_text(code)
        # -fsanitize=thread only plants the hooks; runtime.cpp defines them, so libtsan is not linked.
        flags = ["-O1", "-w", "-std=c++17", "-fPIC", "-fpermissive", "-fsanitize=thread", f"-I{HERE}"]
        _compile([*flags, "-c", str(source), "-o", str(built)])
        _compile(["-shared", str(built), str(runtime), "-Wl,-Bsymbolic", "-o", str(output)])


def _compile(arguments: list[str]) -> None:
    chosen = compiler()
    if chosen is None:
        raise CompileError("the emulator needs a C++ compiler: install g++ or name one in CXX")
    done = subprocess.run([chosen, *arguments], capture_output=True, text=True)
    if done.returncode:
        lines = [l for l in done.stderr.splitlines() if "error" in l] or done.stderr.splitlines()
        raise CompileError(f"the emulator cannot compile this kernel: {lines[0] if lines else done.returncode}")
