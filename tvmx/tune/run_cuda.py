"""Kernels on a CUDA device: a candidate's library holds a cubin and its launches, the driver does the rest.

Carried along in offline bundles: needs numpy and the CUDA driver only.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tvmx.cuda.driver import Device
from tvmx.tune.run_arrays import nbytes
from tvmx.tune.run_cpu import RunError


class CudaKernel:
    """The launches of one candidate. `library` symbols: `tvmx_cubin`, and `tvmx_launches`, JSON."""

    def __init__(self, path: str, device: Device) -> None:
        self.device = device
        self.library = ctypes.CDLL(path)
        try:
            cubin = ctypes.addressof(ctypes.c_char.in_dll(self.library, "tvmx_cubin"))
            text = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(self.library, "tvmx_launches")))
        except ValueError:
            raise RunError(f"{path} holds no kernel for a CUDA device") from None
        facts = json.loads(text)
        self.launches: list[dict[str, Any]] = facts["launches"]
        self.spaces = [device.alloc(nbytes(tuple(shape), dtype)) for shape, dtype in facts["spaces"]]
        self.module = device.module(cubin)
        self.functions = [device.function(self.module, l["kernel"], l["shared"]) for l in self.launches]
        self._bound: dict[tuple[int, ...], list[Any]] = {}

    def __call__(self, arguments: CudaArguments) -> None:
        self.run_on(arguments.addresses)

    def run_on(self, addresses: Sequence[int]) -> None:
        """Launch on tensors at these addresses of device memory."""
        for launch, function, (_, parameters) in zip(self.launches, self.functions, self._bind(tuple(addresses))):
            self.device.launch(function, launch["grid"], launch["block"], launch["shared"], parameters)

    def enter(self) -> None:
        """Nothing: a device has no thread pool to change."""

    def close(self) -> None:
        self.device.synchronize()
        self.device.unload(self.module)
        for space in self.spaces:
            self.device.free(space)

    def _bind(self, tensors: tuple[int, ...]) -> list[Any]:
        """Per launch (what must live on, address of the array of pointers to its arguments)."""
        found = self._bound.get(tensors)
        if found is None:
            found = []
            for launch in self.launches:
                addresses = [tensors[i] if i >= 0 else self.spaces[-1 - i] for i in launch["arguments"]]
                values = (ctypes.c_uint64 * len(addresses))(*addresses)
                start = ctypes.addressof(values)
                pointers = (ctypes.c_void_p * len(addresses))(*(start + 8 * i for i in range(len(addresses))))
                found.append(((values, pointers), ctypes.addressof(pointers)))
            self._bound[tensors] = found
        return found


class CudaArguments:
    """Arrays copied to device memory."""

    def __init__(self, arrays: Sequence[np.ndarray], device: Device) -> None:
        self.device = device
        self.shapes = [(a.shape, a.dtype) for a in arrays]
        self.sizes = [a.nbytes for a in arrays]
        self.addresses = [device.alloc(a.nbytes) for a in arrays]
        for array, address in zip(arrays, self.addresses):
            device.upload(address, array.ctypes.data, array.nbytes)

    def poison(self, index: int) -> None:
        """What a kernel does not write is wrong."""
        self.device.fill(self.addresses[index], self.sizes[index], 0x5A)

    def read(self, index: int) -> np.ndarray:
        shape, dtype = self.shapes[index]
        out = np.empty(shape, dtype)
        self.device.download(out.ctypes.data, self.addresses[index], self.sizes[index])
        return out

    def free(self) -> None:
        for address in self.addresses:
            self.device.free(address)
        self.addresses = []


class CudaDevice:
    """A GPU. Calls of a sample are replayed as one CUDA graph, so that the host's own time is not in it."""

    first_calls = 10
    cold_calls = 8
    warmup_s = 0.03  # clocks rise only under load

    def __init__(self, ordinal: int) -> None:
        self.device = Device(ordinal)
        self._flush = 0
        self._flush_bytes = max(2 * self.device.facts.l2_bytes, 32 << 20)

    def facts(self) -> dict[str, Any]:
        return {**self.device.facts.to_json(), "name": str(self.device.facts), "kind": "cuda"}

    def load(self, path: str) -> CudaKernel:
        return CudaKernel(path, self.device)

    def place(self, arrays: Sequence[np.ndarray], dtypes: Sequence[str]) -> CudaArguments:
        return CudaArguments(arrays, self.device)

    def runs(self, kernel: CudaKernel) -> list[tuple[str, Callable[[CudaArguments], None]]]:
        """The ways to run a kernel that must agree: one. Reading an output waits for it."""
        return [("", kernel)]

    def sample(self, kernel: CudaKernel, sets: Sequence[CudaArguments], calls: int, cold: bool) -> float:
        """Seconds a call, over `calls` calls on sets of arguments in turn; `cold`: L2 is overwritten before each."""
        device = self.device
        if cold:
            total = 0.0
            for i in range(calls):
                device.fill(self._flush_memory(), self._flush_bytes, i & 0xFF)
                device.start()
                kernel(sets[i % len(sets)])
                device.stop()
                total += device.elapsed()
            return total / calls
        device.begin_capture()
        try:
            for i in range(calls):
                kernel(sets[i % len(sets)])
        finally:
            graph = device.end_capture()
        try:
            device.replay(graph)  # uploads the graph, fills caches
            device.start()
            device.replay(graph)
            device.stop()
            return device.elapsed() / calls
        finally:
            device.drop(graph)

    def _flush_memory(self) -> int:
        if not self._flush:
            self._flush = self.device.alloc(self._flush_bytes)
        return self._flush
