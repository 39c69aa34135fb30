"""The CUDA driver by ctypes: devices, memory, modules, launches, events, graphs. Standard library only.

Offline bundles carry this file to machines that have neither tvmx nor TVM, so it imports nothing of them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

LIBRARY = "libcuda.so.1"
MAX_SHARED_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PLAIN_SHARED = 48 << 10  # dynamic shared memory that a kernel gets without asking
_SM, _L2, _MAJOR, _MINOR, _CLOCK = 16, 38, 75, 76, 13  # CU_DEVICE_ATTRIBUTE_*

_P, _I, _U, _Z, _D = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_U,),
    "cuDriverGetVersion": (_P,),
    "cuDeviceGetCount": (_P,),
    "cuDeviceGet": (_P, _I),
    "cuDeviceGetName": (_P, _I, _I),
    "cuDeviceGetAttribute": (_P, _I, _I),
    "cuDevicePrimaryCtxRetain": (_P, _I),
    "cuCtxSetCurrent": (_P,),
    "cuCtxSynchronize": (),
    "cuModuleLoadData": (_P, _P),
    "cuModuleUnload": (_P,),
    "cuModuleGetFunction": (_P, _P, ctypes.c_char_p),
    "cuFuncSetAttribute": (_P, _I, _I),
    "cuMemAlloc_v2": (_P, _Z),
    "cuMemFree_v2": (_D,),
    "cuMemcpyHtoD_v2": (_D, _P, _Z),
    "cuMemcpyDtoH_v2": (_P, _D, _Z),
    "cuMemsetD8Async": (_D, ctypes.c_ubyte, _Z, _P),
    "cuStreamCreate": (_P, _U),
    "cuStreamSynchronize": (_P,),
    "cuLaunchKernel": (_P, _U, _U, _U, _U, _U, _U, _U, _P, _P, _P),
    "cuEventCreate": (_P, _U),
    "cuEventRecord": (_P, _P),
    "cuEventSynchronize": (_P,),
    "cuEventElapsedTime": (_P, _P, _P),
    "cuStreamBeginCapture_v2": (_P, _I),
    "cuStreamEndCapture": (_P, _P),
    "cuGraphInstantiateWithFlags": (_P, _P, ctypes.c_ulonglong),
    "cuGraphLaunch": (_P, _P),
    "cuGraphExecDestroy": (_P,),
    "cuGraphDestroy": (_P,),
}
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class DeviceError(RuntimeError):
    """There is no usable CUDA device, or the driver refused a call. After a kernel's fault nothing works any more."""


@dataclass(frozen=True)
class DeviceFacts:
    """What the driver says of a device. `sm` is the compute capability, 80 for 8.0; `driver` as 12040 for 12.4."""

    name: str
    sm: int
    multiprocessors: int
    l2_bytes: int
    clock_mhz: int
    driver: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        version = f"{self.driver // 1000}.{self.driver % 1000 // 10}"
        return f"{self.name} | sm_{self.sm} | {self.multiprocessors} multiprocessors | driver CUDA {version}"


def _load() -> Any:
    """The driver's library (or the one that TVMX_CUDA_DRIVER names) with its signatures. Raises DeviceError."""
    try:
        library = ctypes.CDLL(os.environ.get("TVMX_CUDA_DRIVER") or LIBRARY)
    except OSError:
        raise DeviceError(f"no CUDA driver on this machine: {LIBRARY} cannot be loaded") from None
    for name, types in _SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise DeviceError(f"the CUDA driver is too old: it has no {name}; CUDA 11.4 or newer is needed") from None
        function.argtypes, function.restype = types, _I
    return library


class Device:
    """One CUDA device with its primary context and a stream of its own. Raises DeviceError where there is none."""

    def __init__(self, ordinal: int = 0) -> None:
        self._library = _load()
        self.call("cuInit", 0)
        count = self._int("cuDeviceGetCount")
        if ordinal >= count:
            raise DeviceError(f"there is no CUDA device {ordinal}: the driver finds {count}")
        handle = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.addressof(handle), ordinal)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", ctypes.addressof(name), 256, handle.value)

        def attribute(which: int) -> int:
            return self._int("cuDeviceGetAttribute", which, handle.value)

        self.facts = DeviceFacts(
            name=name.value.decode(errors="replace"),
            sm=attribute(_MAJOR) * 10 + attribute(_MINOR),
            multiprocessors=attribute(_SM),
            l2_bytes=attribute(_L2),
            clock_mhz=attribute(_CLOCK) // 1000,
            driver=self._int("cuDriverGetVersion"),
        )
        self._context = self._pointer("cuDevicePrimaryCtxRetain", handle.value)
        self.call("cuCtxSetCurrent", self._context)
        self.stream = self._pointer("cuStreamCreate", 1)  # does not wait for the default stream
        self._marks = (self._pointer("cuEventCreate", 0), self._pointer("cuEventCreate", 0))

    def call(self, name: str, *arguments: Any) -> None:
        """A driver call. Raises DeviceError with the driver's name of the error."""
        code = getattr(self._library, name)(*arguments)
        if code:
            raise DeviceError(f"{name}: {self._reason(code)}")

    def alloc(self, size: int) -> int:
        """Device memory, aligned to 256 bytes."""
        return int(self._pointer("cuMemAlloc_v2", max(1, size)))

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", address)

    def upload(self, address: int, host: int, size: int) -> None:
        """`size` bytes from host memory at `host`; waits until they are there.

        The copy itself may return while pageable memory is still on its way, and our stream would not wait for it.
        """
        if size:
            self.call("cuMemcpyHtoD_v2", address, host, size)
            self.call("cuCtxSynchronize")

    def download(self, host: int, address: int, size: int) -> None:
        """`size` bytes to host memory at `host`, after everything that was launched."""
        self.synchronize()
        if size:
            self.call("cuMemcpyDtoH_v2", host, address, size)

    def fill(self, address: int, size: int, byte: int) -> None:
        """In the stream's order."""
        if size:
            self.call("cuMemsetD8Async", address, byte, size, self.stream)

    def module(self, image: int) -> int:
        """Load a cubin at host address `image`."""
        return int(self._pointer("cuModuleLoadData", image))

    def unload(self, module: int) -> None:
        self.call("cuModuleUnload", module)

    def function(self, module: int, name: str, shared_bytes: int = 0) -> int:
        """A kernel, allowed `shared_bytes` of dynamic shared memory."""
        found = int(self._pointer("cuModuleGetFunction", module, name.encode()))
        if shared_bytes > PLAIN_SHARED:
            self.call("cuFuncSetAttribute", found, MAX_SHARED_ATTRIBUTE, shared_bytes)
        return found

    def launch(self, function: int, grid: Sequence[int], block: Sequence[int], shared: int, parameters: Any) -> None:
        """`parameters`: the address of an array of pointers to the arguments."""
        self.call("cuLaunchKernel", function, *grid, *block, shared, self.stream, parameters, None)

    def synchronize(self) -> None:
        self.call("cuStreamSynchronize", self.stream)

    def start(self) -> None:
        """Mark the beginning of what `elapsed` times."""
        self.call("cuEventRecord", self._marks[0], self.stream)

    def stop(self) -> None:
        self.call("cuEventRecord", self._marks[1], self.stream)

    def elapsed(self) -> float:
        """Seconds on the device between `start` and `stop`; waits."""
        milliseconds = ctypes.c_float()
        self.call("cuEventSynchronize", self._marks[1])
        self.call("cuEventElapsedTime", ctypes.addressof(milliseconds), *self._marks)
        return milliseconds.value * 1e-3

    def begin_capture(self) -> None:
        self.call("cuStreamBeginCapture_v2", self.stream, _RELAXED)

    def end_capture(self) -> int:
        """What was launched since `begin_capture`, as an executable graph."""
        graph = self._pointer("cuStreamEndCapture", self.stream, first=False)
        try:
            return int(self._pointer("cuGraphInstantiateWithFlags", graph, 0))
        finally:
            self.call("cuGraphDestroy", graph)

    def replay(self, graph: int) -> None:
        self.call("cuGraphLaunch", graph, self.stream)

    def drop(self, graph: int) -> None:
        self.call("cuGraphExecDestroy", graph)

    def _int(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        self.call(name, ctypes.addressof(value), *arguments)
        return value.value

    def _pointer(self, name: str, *arguments: Any, first: bool = True) -> Any:
        """The handle that a call writes to its first (or last) argument."""
        value = ctypes.c_void_p()
        where = ctypes.addressof(value)
        self.call(name, *((where, *arguments) if first else (*arguments, where)))
        return value.value or 0

    def _reason(self, code: int) -> str:
        text = ctypes.c_char_p()
        try:
            self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
        except AttributeError:
            pass
        return (text.value or b"").decode(errors="replace") or f"error {code}"
