"""Worker that times compiled kernels. Loads numpy and the kernel's own library only, so a crash costs little.

`{"op": "trial", ...}` runs one library against a reference; `{"op": "compare", ...}` times several, interleaved.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tvmx.tune.worker import serve

_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest error, as a fraction of the reference's largest magnitude."""
MAX_COPIES = 16
COLD_BYTES = 64 << 20  # reading this much evicts the caches of most CPUs


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


_TYPE_DLTENSOR = 7  # kTVMFFIDLTensorPtr
_CODES = {"bool": 6, "int": 0, "uint": 1, "float": 2, "bfloat": 4}


class RunError(Exception):
    """The kernel returned an error."""


class Kernel:
    """A candidate's library: its `main`, and the thread pool linked into it."""

    def __init__(self, path: str, threads: int) -> None:
        self.library = ctypes.CDLL(path)
        self.function = self.library["__tvm_ffi_main"]
        self.function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
        self.result = _Any()
        self.library.tvmx_pool_new.restype = ctypes.c_void_p
        for name in ("enter", "free", "backwards"):
            getattr(self.library, f"tvmx_pool_{name}").argtypes = (ctypes.c_void_p,)
        self.library.tvmx_last_error.restype = ctypes.c_char_p
        self.pool = self.library.tvmx_pool_new(ctypes.c_int(threads), None)
        if not self.pool:
            raise RunError(f"cannot start {threads} threads")
        self.library.tvmx_pool_enter(self.pool)

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
            self.library.tvmx_pool_enter(self.pool)
            self.library.tvmx_pool_free(pool)

    def close(self) -> None:
        self.library.tvmx_pool_enter(None)
        self.library.tvmx_pool_free(self.pool)


class Packed:
    """Arrays as the argument list of a packed call. Keeps what it points to alive."""

    def __init__(self, arrays: list[np.ndarray], dtypes: list[str]) -> None:
        self.arrays = arrays
        self.tensors = []
        for array, dtype in zip(arrays, dtypes):
            kind = dtype.rstrip("0123456789")
            bits = int(dtype[len(kind) :] or 8)
            shape = (ctypes.c_int64 * array.ndim)(*array.shape)
            tensor = _DLTensor(array.ctypes.data, 1, 0, array.ndim, _CODES[kind], bits, 1, shape, None, 0)
            self.tensors.append(tensor)
        self.args = (_Any * len(arrays))(*(_Any(_TYPE_DLTENSOR, 0, ctypes.addressof(t)) for t in self.tensors))
        self.address, self.count = ctypes.addressof(self.args), len(arrays)


def numpy_dtype(name: str) -> Any:
    """numpy's dtype for TVM's name, bfloat16 included."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A zeroed array whose data lies at a multiple of 64 bytes, as kernels assume."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out: np.ndarray = raw[start : start + size].view(dtype).reshape(shape)
    return out


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, positive: bool) -> np.ndarray:
    """Floats in (-1, 1) or (0.1, 1); 8-bit integers over their range; other integers 0 or 1, fit for an index."""
    out = aligned(shape, dtype)
    if dtype.kind in "iu" and dtype.itemsize == 1:
        info = np.iinfo(dtype)
        out[...] = rng.integers(info.min, info.max, shape, endpoint=True, dtype=dtype)
    elif dtype.kind in "iub":
        out[...] = rng.integers(0, 2, shape)
    else:
        out[...] = rng.uniform(0.1 if positive else -1.0, 1.0, shape).astype(np.float32)
    return out


def difference(got: np.ndarray, want: np.ndarray, dtype: str) -> str:
    """Why `got` is not `want` at the tolerance of its dtype; empty when it is."""
    if got.size == 0:
        return ""
    if dtype not in _TOLERANCE:
        wrong = int(np.count_nonzero(got != want))
        if wrong and numpy_dtype(dtype).itemsize == 1 and dtype != "bool" and wrong <= max(1, got.size // 1000):
            # a rounding of a float at the midpoint may fall to either side when its sum is taken in another order
            steps = np.abs(got.astype(np.int32) - want.astype(np.int32)).max()
            wrong = wrong if steps > 1 else 0
        return f"{wrong} of {got.size} {dtype} elements differ" if wrong else ""
    a, b = got.astype(np.float64).ravel(), want.astype(np.float64).ravel()
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return "infinities or NaNs differ"
    if not finite.any():
        return ""
    error = float(np.abs(a[finite] - b[finite]).max())
    scale = float(np.abs(b[finite]).max())
    if not error <= _TOLERANCE[dtype] * max(scale, 1e-6):  # a NaN is an error too
        return f"max abs error {error:.3g} on outputs up to {scale:.3g}"
    return ""


class Bench:
    """The arguments of one task: `copies` sets that are used in turn, and the reference's outputs."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.threads = int(spec["threads"])
        self.dtypes: list[str] = [d for _, d in spec["args"]]
        self.outputs: list[int] = spec["outputs"]
        self.positive = False
        self.make()
        self.expected = self.run(spec["reference"])
        floats = [e for e, o in zip(self.expected, self.outputs) if self.dtypes[o] in _TOLERANCE]
        if not all(np.isfinite(e.astype(np.float32)).all() for e in floats):
            self.positive = True  # a root or logarithm of negative numbers says little
            self.make()
            self.expected = self.run(spec["reference"])
        self.flush = np.zeros(COLD_BYTES, np.uint8) if spec["cache"] == "cold" else None

    def make(self) -> None:
        rng = np.random.default_rng(self.spec["seed"])
        shapes = [tuple(s) for s, _ in self.spec["args"]]
        total = sum(math.prod(s) * numpy_dtype(d).itemsize for s, d in self.spec["args"])
        copies = 1
        if self.spec["cache"] == "rotate":
            copies = min(MAX_COPIES, max(1, -(-int(self.spec["rotate_bytes"]) // max(1, total))))
        self.sets: list[Packed] = []
        for i in range(copies):
            arrays = []
            for n, (shape, dtype) in enumerate(zip(shapes, self.dtypes)):
                kind = numpy_dtype(dtype)
                if n in self.outputs:
                    arrays.append(aligned(shape, kind))
                elif i == 0:
                    arrays.append(random_array(rng, shape, kind, self.positive))
                else:
                    arrays.append(aligned(shape, kind))
                    arrays[-1][...] = self.sets[0].arrays[n]
            self.sets.append(Packed(arrays, self.dtypes))

    def run(self, path: str) -> list[np.ndarray]:
        """The outputs of one call."""
        kernel = Kernel(path, self.threads)
        try:
            return self.outputs_of(kernel)
        finally:
            kernel.close()

    def outputs_of(self, run: Callable[[Packed], None]) -> list[np.ndarray]:
        for o in self.outputs:
            self.sets[0].arrays[o].reshape(-1).view(np.uint8).fill(0x5A)  # what the kernel does not write is wrong
        run(self.sets[0])
        return [self.sets[0].arrays[o].copy() for o in self.outputs]

    def check(self, kernel: Kernel) -> str:
        """Why a kernel's outputs differ from the reference's; empty when they do not."""
        runs: list[tuple[str, Callable[[Packed], None]]] = [("", kernel)]
        if self.threads > 1:
            runs.append(("tasks overlap: ", kernel.run_backwards))
        for prefix, run in runs:
            for got, want, o in zip(self.outputs_of(run), self.expected, self.outputs):
                if wrong := difference(got, want, self.dtypes[o]):
                    return prefix + wrong
        return ""

    def sample(self, kernel: Kernel, calls: int) -> float:
        """Seconds a call, over `calls` calls on sets of arguments in turn."""
        if self.flush is not None:
            self.flush += 1
        # One thread's own clock leaves out the time in which another process had its core.
        sets, clock = self.sets, time.thread_time if self.threads == 1 else time.perf_counter
        order = [sets[i % len(sets)] for i in range(calls)]
        begin = clock()
        for packed in order:
            kernel(packed)
        return (clock() - begin) / calls

    def calls(self, seconds: float) -> int:
        """How many calls make a sample long enough to time; one where each must find cold caches."""
        if self.flush is not None:
            return 1
        wanted = float(self.spec["min_repeat_s"]) / max(seconds, 1e-7)
        return max(1, min(100_000, math.ceil(wanted)))


class Runner:
    """Keeps the arguments of the task at hand between requests."""

    def __init__(self) -> None:
        self.bench: Bench | None = None

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if self.bench is None or self.bench.spec != request["spec"]:
                self.bench = None  # frees the old arrays first
                self.bench = Bench(request["spec"])
            return self.trial(request) if request["op"] == "trial" else self.compare(request)
        except (RunError, OSError) as error:
            return {"status": "RUN_ERROR", "error": str(error)[:500], "samples": []}

    def trial(self, request: dict[str, Any]) -> dict[str, Any]:
        """Check and time one library; stops early once it is clearly slower than `give_up_s`."""
        bench = self.bench
        assert bench is not None
        kernel = Kernel(request["path"], bench.threads)
        try:
            wrong = bench.check(kernel)
            if wrong:
                return {"status": "WRONG_OUTPUT", "error": wrong, "samples": []}
            first = min(bench.sample(kernel, 1) for _ in range(2))
            samples = [first]
            if first <= request["give_up_s"]:
                calls = bench.calls(first)
                samples = [bench.sample(kernel, calls) for _ in range(bench.spec["repeat"])]
            return {"status": "OK", "error": "", "samples": samples}
        finally:
            kernel.close()

    def compare(self, request: dict[str, Any]) -> dict[str, Any]:
        """Check all libraries and time them in turn, `rounds` times: samples of each."""
        bench = self.bench
        assert bench is not None
        kernels = [Kernel(p, bench.threads) for p in request["paths"]]
        try:
            for number, kernel in enumerate(kernels):
                wrong = bench.check(kernel)
                if wrong:
                    return {"status": "WRONG_OUTPUT", "error": f"candidate {number}: {wrong}", "samples": []}
            calls = [bench.calls(min(bench.sample(k, 1) for _ in range(2))) for k in kernels]
            samples: list[list[float]] = [[] for _ in kernels]
            for _ in range(request["rounds"]):
                for number, kernel in enumerate(kernels):
                    kernel.library.tvmx_pool_enter(kernel.pool)
                    bench.sample(kernel, 1)  # the other kernel's threads go to sleep, caches fill
                    samples[number].append(bench.sample(kernel, calls[number]))
            return {"status": "OK", "error": "", "samples": samples}
        finally:
            for kernel in kernels:
                kernel.close()


def main() -> None:
    serve(Runner())


if __name__ == "__main__":
    main()
