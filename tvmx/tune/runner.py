"""Worker that checks and times compiled kernels. Loads numpy and the kernel's own library only: a crash costs little.

`{"op": "trial", ...}` runs one library against a reference; `{"op": "compare", ...}` times several, interleaved;
`{"op": "facts", "device": ...}` says what the device is. The device is a field of the request's spec: "cpu" (default)
or "cuda:0". Offline bundles carry this module along.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tvmx.cuda.driver import DeviceError
from tvmx.tune.run_arrays import TOLERANCE, aligned, difference, nbytes, numpy_dtype, random_array, widened
from tvmx.tune.run_cpu import CpuDevice, RunError
from tvmx.tune.worker import serve

MAX_COPIES = 16
LOOK_S = 0.02  # of the sample that tells how many calls the others take


def open_device(name: str, threads: int = 1) -> Any:
    """ "cpu", or "cuda:0" and so on. Raises DeviceError where that device is not there."""
    if name == "cpu":
        return CpuDevice(threads)
    kind, _, ordinal = name.partition(":")
    if kind != "cuda" or not (ordinal or "0").isdigit():
        raise DeviceError(f"unknown device {name!r}; use cpu, cuda:0, cuda:1, ...")
    from tvmx.tune.run_cuda import CudaDevice

    return CudaDevice(int(ordinal or 0))


class Bench:
    """The arguments of one task: `copies` sets that are used in turn, and the reference's outputs.

    The reference runs on `reference_device`, by default on the same device as the candidates.
    """

    def __init__(self, spec: dict[str, Any], device: Any) -> None:
        self.spec = spec
        self.device = device
        self.dtypes: list[str] = [d for _, d in spec["args"]]
        self.outputs: list[int] = spec["outputs"]
        self.cold = spec["cache"] == "cold"
        self.sets: list[Any] = []
        self.make(positive=False)
        floats = [e for e, o in zip(self.expected, self.outputs) if self.dtypes[o] in TOLERANCE]
        kinds = [self.dtypes[o] for o in self.outputs if self.dtypes[o] in TOLERANCE]
        if not all(np.isfinite(widened(e, d)).all() for e, d in zip(floats, kinds)):
            self.make(positive=True)  # a root or logarithm of negative numbers says little

    def make(self, positive: bool) -> None:
        """New arguments, and what the reference makes of them."""
        self.free()
        rng = np.random.default_rng(self.spec["seed"])
        shapes = [tuple(s) for s, _ in self.spec["args"]]
        arrays = [
            aligned(shape, numpy_dtype(dtype))
            if n in self.outputs
            else random_array(rng, shape, dtype, positive)
            for n, (shape, dtype) in enumerate(zip(shapes, self.dtypes))
        ]  # fmt: skip
        self.expected = self.reference(arrays)
        copies = 1
        if self.spec["cache"] == "rotate":
            total = sum(nbytes(s, d) for s, d in zip(shapes, self.dtypes))
            copies = min(MAX_COPIES, max(1, -(-int(self.spec["rotate_bytes"]) // max(1, total))))
        for i in range(copies):
            mine = arrays if i == 0 else [_copy(a) for a in arrays]
            self.sets.append(self.device.place(mine, self.dtypes))

    def reference(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """The outputs of the reference for these inputs."""
        name = self.spec.get("reference_device") or self.spec.get("device", "cpu")
        same = name == self.spec.get("device", "cpu")
        device = self.device if same else open_device(name, int(self.spec["threads"]))
        kernel = device.load(self.spec["reference"])
        try:
            arguments = device.place(arrays, self.dtypes)
            found = self.outputs_of(kernel, arguments)
            arguments.free()
            return found
        finally:
            kernel.close()

    def outputs_of(self, run: Callable[[Any], None], arguments: Any) -> list[np.ndarray]:
        """What one call writes."""
        for o in self.outputs:
            arguments.poison(o)
        run(arguments)
        return [arguments.read(o) for o in self.outputs]

    def check(self, kernel: Any) -> str:
        """Why a kernel's outputs differ from the reference's; empty when they do not."""
        for prefix, run in self.device.runs(kernel):
            for got, want, o in zip(self.outputs_of(run, self.sets[0]), self.expected, self.outputs):
                if wrong := difference(got, want, self.dtypes[o]):
                    return str(prefix + wrong)
        return ""

    def sample(self, kernel: Any, calls: int) -> float:
        """Seconds a call, over `calls` calls on sets of arguments in turn."""
        return float(self.device.sample(kernel, self.sets, calls, self.cold))

    def first(self, kernel: Any) -> float:
        """Seconds of a call, after `warmup_s` (the spec's, else the device's own) that fill caches and raise clocks."""
        once = float(self.device.sample(kernel, self.sets, 1, False))
        calls = max(1, min(int(self.device.first_calls), int(LOOK_S / max(once, 1e-7))))
        end = time.monotonic() + float(self.spec.get("warmup_s") or self.device.warmup_s)
        while time.monotonic() < end:
            once = float(self.device.sample(kernel, self.sets, calls, False))
        if self.cold:
            return self.sample(kernel, int(self.device.cold_calls))
        return min(once, self.sample(kernel, calls))

    def calls(self, seconds: float) -> int:
        """How many calls make a sample long enough to time; few where each must find cold caches."""
        if self.cold:
            return int(self.device.cold_calls)
        wanted = float(self.spec["min_repeat_s"]) / max(seconds, 1e-7)
        most = 100_000 if self.spec.get("device", "cpu") == "cpu" else 2_000  # nodes of a CUDA graph
        return max(1, min(most, math.ceil(wanted)))

    def free(self) -> None:
        """Give back the arguments' memory."""
        for placed in self.sets:
            placed.free()
        self.sets = []


def _copy(array: np.ndarray) -> np.ndarray:
    out = aligned(array.shape, array.dtype)
    out[...] = array
    return out


class Runner:
    """Keeps the device and the arguments of the task at hand between requests."""

    def __init__(self) -> None:
        self.bench: Bench | None = None
        self._devices: dict[tuple[str, int], Any] = {}

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if request["op"] == "facts":
                return {"status": "OK", "error": "", "facts": self.device(request["device"], 1).facts()}
            spec = request["spec"]
            if self.bench is None or self.bench.spec != spec:
                if self.bench is not None:
                    self.bench.free()
                self.bench = None  # frees the old arrays first
                self.bench = Bench(spec, self.device(spec.get("device", "cpu"), int(spec["threads"])))
            answer = self.trial(request) if request["op"] == "trial" else self.compare(request)
            if answer["status"] == "WRONG_OUTPUT":  # it may have written to the others' inputs too
                self.bench.free()
                self.bench = None
            return answer
        except (RunError, OSError) as error:
            return {"status": "RUN_ERROR", "error": str(error)[:500], "samples": []}
        except DeviceError as error:
            if not self._devices:
                return {"status": "NO_DEVICE", "error": str(error), "samples": []}
            raise SystemExit(str(error)) from None  # a context that saw a fault is lost, and this process with it

    def device(self, name: str, threads: int) -> Any:
        """The opened device. Raises DeviceError."""
        if (name, threads) not in self._devices:
            self._devices[name, threads] = open_device(name, threads)
        return self._devices[name, threads]

    def trial(self, request: dict[str, Any]) -> dict[str, Any]:
        """Check and time one library; stops early once it is clearly slower than `give_up_s`."""
        bench = self.bench
        assert bench is not None
        kernel = bench.device.load(request["path"])
        try:
            wrong = bench.check(kernel)
            if wrong:
                return {"status": "WRONG_OUTPUT", "error": wrong, "samples": []}
            first = bench.first(kernel)
            samples = [first]
            if first <= _limit(request):
                calls = bench.calls(first)
                samples = [bench.sample(kernel, calls) for _ in range(bench.spec["repeat"])]
            return {"status": "OK", "error": "", "samples": samples}
        finally:
            kernel.close()

    def compare(self, request: dict[str, Any]) -> dict[str, Any]:
        """Check all libraries and time them in turn, `rounds` times: samples of each."""
        bench = self.bench
        assert bench is not None
        kernels = [bench.device.load(p) for p in request["paths"]]
        try:
            for number, kernel in enumerate(kernels):
                wrong = bench.check(kernel)
                if wrong:
                    return {"status": "WRONG_OUTPUT", "error": f"candidate {number}: {wrong}", "samples": []}
            calls = [bench.calls(bench.first(k)) for k in kernels]
            samples: list[list[float]] = [[] for _ in kernels]
            for _ in range(request["rounds"]):
                for number, kernel in enumerate(kernels):
                    kernel.enter()
                    bench.sample(kernel, 1)  # the other kernel's threads go to sleep, caches fill
                    samples[number].append(bench.sample(kernel, calls[number]))
            return {"status": "OK", "error": "", "samples": samples}
        finally:
            for kernel in kernels:
                kernel.close()


def _limit(request: dict[str, Any]) -> float:
    """Seconds a call over which a trial is timed once only; JSON has no infinity."""
    given = request.get("give_up_s")
    return math.inf if given is None else float(given)


def main() -> None:
    serve(Runner())


if __name__ == "__main__":
    main()
