"""Kernels on the CPU: a candidate's own library, called without TVM. Carried along in offline bundles."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

COLD_BYTES = 64 << 20  # reading this much evicts the caches of most CPUs
_TYPE_DLTENSOR = 7  # kTVMFFIDLTensorPtr
_CODES = {"bool": 6, "int": 0, "uint": 1, "float": 2, "bfloat": 4}


class RunError(Exception):
    """The kernel returned an error, or is none."""


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Any(ctypes.Structure):
    _fields_ = (("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", ctypes.c_uint64))


class Kernel:
    """A candidate's library: its `main`, and the thread pool linked into it."""

    def __init__(self, path: str, threads: int) -> None:
        self.library = ctypes.CDLL(path)
        try:
            self.function = self.library["__tvm_ffi_main"]
        except AttributeError:
            raise RunError(f"{path} holds no kernel for a CPU") from None
        self.function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
        self.result = _Any()
        self.library.tvmx_pool_new.restype = ctypes.c_void_p
        for name in ("enter", "free", "backwards"):
            getattr(self.library, f"tvmx_pool_{name}").argtypes = (ctypes.c_void_p,)
        self.library.tvmx_last_error.restype = ctypes.c_char_p
        self.pool = self.library.tvmx_pool_new(ctypes.c_int(threads), None)
        if not self.pool:
            raise RunError(f"cannot start {threads} threads")
        self.enter()

    def __call__(self, packed: Packed) -> None:
        if self.function(None, packed.address, packed.count, ctypes.addressof(self.result)):
            raise RunError((self.library.tvmx_last_error() or b"it returned an error").decode(errors="replace"))

    def run_backwards(self, packed: Packed) -> None:
        """Call it with the parallel tasks one by one from the last to the first, which shows tasks that overlap."""
        pool = self.library.tvmx_pool_new(ctypes.c_int(1), None)
        if not pool:
            raise RunError("cannot make a pool")
        self.library.tvmx_pool_backwards(pool)
        self.library.tvmx_pool_enter(pool)
        try:
            self(packed)
        finally:
            self.enter()
            self.library.tvmx_pool_free(pool)

    def enter(self) -> None:
        """Have parallel loops run on this library's threads from now on."""
        self.library.tvmx_pool_enter(self.pool)

    def close(self) -> None:
        self.library.tvmx_pool_enter(None)
        self.library.tvmx_pool_free(self.pool)


class Packed:
    """Arrays as the argument list of a packed call. Keeps what it points to alive."""

    def __init__(self, arrays: Sequence[np.ndarray], dtypes: Sequence[str]) -> None:
        self.arrays = list(arrays)
        self.tensors = []
        for array, dtype in zip(arrays, dtypes):
            kind = dtype.rstrip("0123456789")
            bits = int(dtype[len(kind) :] or 8)
            shape = (ctypes.c_int64 * array.ndim)(*array.shape)
            tensor = _DLTensor(array.ctypes.data, 1, 0, array.ndim, _CODES[kind], bits, 1, shape, None, 0)
            self.tensors.append(tensor)
        self.args = (_Any * len(self.arrays))(*(_Any(_TYPE_DLTENSOR, 0, ctypes.addressof(t)) for t in self.tensors))
        self.address, self.count = ctypes.addressof(self.args), len(self.arrays)

    def poison(self, index: int) -> None:
        """What a kernel does not write is wrong."""
        self.arrays[index].reshape(-1).view(np.uint8).fill(0x5A)

    def read(self, index: int) -> np.ndarray:
        out: np.ndarray = self.arrays[index].copy()
        return out

    def free(self) -> None:
        self.arrays.clear()


class CpuDevice:
    """The machine's cores. `threads` are those of the kernels."""

    first_calls = 1  # of the sample that tells how many calls the others take
    cold_calls = 1  # of a sample whose every call must find cold caches
    warmup_s = 0.0

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._flush: np.ndarray | None = None

    def facts(self) -> dict[str, Any]:
        return {"name": f"{_cpu_model()} | {os.cpu_count()} cores", "kind": "cpu", "arch": platform.machine()}

    def load(self, path: str) -> Kernel:
        return Kernel(path, self.threads)

    def place(self, arrays: Sequence[np.ndarray], dtypes: Sequence[str]) -> Packed:
        return Packed(arrays, dtypes)

    def runs(self, kernel: Kernel) -> list[tuple[str, Callable[[Packed], None]]]:
        """The ways to run a kernel that must agree, each with what to say when it does not."""
        ways: list[tuple[str, Callable[[Packed], None]]] = [("", kernel)]
        return [*ways, ("tasks overlap: ", kernel.run_backwards)] if self.threads > 1 else ways

    def sample(self, kernel: Kernel, sets: Sequence[Packed], calls: int, cold: bool) -> float:
        """Seconds a call, over `calls` calls on sets of arguments in turn."""
        if cold:
            if self._flush is None:
                self._flush = np.zeros(COLD_BYTES, np.uint8)
            self._flush += 1
        # One thread's own clock leaves out the time in which another process had its core.
        clock = time.thread_time if self.threads == 1 else time.perf_counter
        order = [sets[i % len(sets)] for i in range(calls)]
        begin = clock()
        for packed in order:
            kernel(packed)
        return (clock() - begin) / calls


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
