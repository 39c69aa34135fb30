"""A model's CUDA device through the library's own C interface (tvmx_cuda.h): memory, copies, streams, graphs.

Every driver call is checked in C; what fails is a DeviceError that says what to do.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmx.errors import DeviceError
from tvmx.runtime.library import LoadedLibrary

if TYPE_CHECKING:
    from tvmx.runtime.slots import Array

TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3
LEGACY_STREAM = 1  # CU_STREAM_LEGACY: the handle of the stream that other libraries call 0

AfterNode = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)
_P = ctypes.c_void_p


class CudaCall(ctypes.Structure):
    """`tvmx_cuda_call`."""

    _fields_ = (
        ("inputs", _P),
        ("outputs", _P),
        ("arena", _P),
        ("stream", _P),
        ("marks", _P),
        ("after", AfterNode),
        ("after_context", _P),
    )


class Device:
    """A device with a model's code and parameters on it. Lives as long as any memory of it is in use."""

    def __init__(self, library: LoadedLibrary, ordinal: int, driver: str | None) -> None:
        self._handle = 0
        self._owned: set[int] = set()
        self._library = library
        self.ordinal = ordinal
        function = library._function
        self._close = function("tvmx_cuda_close", None, _P)
        self._error = function("tvmx_cuda_error", ctypes.c_char_p)
        self._calls: dict[str, Any] = {}
        self._waiting = threading.Lock()
        opened = function("tvmx_cuda_open", _P, ctypes.c_char_p, ctypes.c_int)
        self._handle = opened(driver.encode() if driver is not None else None, ordinal) or 0
        if not self._handle:
            raise DeviceError(self._reason())
        self.name = (function("tvmx_cuda_device_name", ctypes.c_char_p, _P)(self._handle) or b"").decode()
        self.sm = int(function("tvmx_cuda_device_sm", ctypes.c_int, _P)(self._handle))
        self.from_ptx = bool(function("tvmx_cuda_from_ptx", ctypes.c_int, _P)(self._handle))
        self.stream = int(function("tvmx_cuda_stream", _P, _P)(self._handle) or 0)

    def run_function(self, entry: str) -> Any:
        """`tvmx_cuda_run_<entry>`: takes the handle and the address of a CudaCall."""
        return self._library._function(f"tvmx_cuda_run_{entry}", ctypes.c_int, _P, _P)

    def run(self, function: Any, call: CudaCall) -> None:
        """Issue a run. Raises DeviceError."""
        if function(self._handle, ctypes.addressof(call)):
            raise DeviceError(self._reason())

    def alloc(self, nbytes: int) -> int:
        """Address of `nbytes` of device memory, at a multiple of 256."""
        address = self._pointer("alloc", ctypes.c_size_t(nbytes))
        self._owned.add(address)
        return address

    def free(self, address: int) -> None:
        """Give memory back; nothing where the device has gone and taken it along."""
        if address in self._owned:
            self._owned.discard(address)
            self._call("free", _P(address))

    def copy(self, to: int, source: int, nbytes: int, kind: int, stream: int = 0) -> None:
        """In the order of `stream` (0: the device's own); `kind` is TO_DEVICE, TO_HOST or ON_DEVICE."""
        self._call("copy", _P(to), _P(source), ctypes.c_size_t(nbytes), ctypes.c_int(kind), _P(stream))

    def download(self, array: Array, address: int, stream: int = 0) -> None:
        """Fill `array` from the device, after all that `stream` holds; waits."""
        self.copy(array.ctypes.data, address, array.nbytes, TO_HOST, stream)
        self.synchronize(stream)

    def synchronize(self, stream: int = 0) -> None:
        self._call("synchronize", _P(stream))

    def wait_for(self, stream: int, other: int) -> None:
        """`stream` goes on after all that `other` holds now."""
        if (stream or self.stream) != (other or self.stream):
            with self._waiting:  # the library has one event for this, and outputs are handed over in any thread
                self._call("wait_for", _P(stream), _P(other))

    def capture_begin(self) -> None:
        self._call("capture_begin")

    def capture_end(self) -> int:
        """What was issued on the own stream since, as a graph."""
        return self._pointer("capture_end")

    def replay(self, graph: int, stream: int = 0) -> None:
        self._call("replay", _P(graph), _P(stream))

    def drop(self, graph: int) -> None:
        self._call("drop", _P(graph))

    def mark_new(self) -> int:
        """An event that keeps time."""
        return self._pointer("mark_new")

    def mark_free(self, mark: int) -> None:
        self._call("mark_free", _P(mark))

    def elapsed(self, start: int, end: int) -> float:
        """Seconds between two marks."""
        milliseconds = ctypes.c_float()
        self._call("elapsed", _P(start), _P(end), ctypes.byref(milliseconds))
        return milliseconds.value * 1e-3

    def __del__(self) -> None:
        # Of objects that refer to each other in a circle, Python may end this one before those that hold its memory.
        if self._handle:
            try:
                for address in list(self._owned):
                    self.free(address)
            except DeviceError:
                pass  # the context is lost, and all memory with it
            self._owned.clear()
            self._close(self._handle)
            self._handle = 0
        self._library.close()

    def _call(self, name: str, *arguments: Any) -> None:
        if not self._handle:
            raise DeviceError("the device was given back; make a new executor")
        found = self._calls.get(name)
        if found is None:
            found = self._calls[name] = getattr(self._library.dll, f"tvmx_cuda_{name}")
            found.restype = ctypes.c_int
        if found(_P(self._handle), *arguments):
            raise DeviceError(self._reason())

    def _pointer(self, name: str, *arguments: Any) -> int:
        out = ctypes.c_void_p()
        self._call(name, *arguments, ctypes.byref(out))
        return out.value or 0

    def _reason(self) -> str:
        return (self._error() or b"").decode(errors="replace") or "the CUDA driver failed without a reason"


class DeviceMemory:
    """Owned device memory; freed when nobody refers to it any more."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.address = 0
        self.device = device
        self.nbytes = nbytes
        self.address = device.alloc(nbytes)

    def __del__(self) -> None:
        if self.address:
            try:
                self.device.free(self.address)
            except DeviceError:
                pass  # the context is lost, and its memory with it
            self.address = 0


class DeviceArray:
    """A contiguous array in device memory: an output of a run, valid until the executor's next.

    Other libraries take it without a copy: `torch.from_dlpack(a)`, `cupy.from_dlpack(a)`, or by
    `__cuda_array_interface__`. `numpy()` copies it to the host.
    """

    def __init__(
        self, memory: DeviceMemory, shape: Sequence[int], dtype: np.dtype[Any], dtype_name: str, stream: int
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.dtype_name = dtype_name
        self.stream = stream  # on which the data are made
        self._memory = memory

    @property
    def address(self) -> int:
        """The device's address."""
        return self._memory.address

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def numpy(self) -> Array:
        """A copy in host memory, when the run has finished."""
        array: Array = np.empty(self.shape, self.dtype)
        self._memory.device.download(array, self.address, self.stream)
        return array

    def __dlpack_device__(self) -> tuple[int, int]:
        from tvmx.runtime.dlpack import CUDA

        return CUDA, self._memory.device.ordinal

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        """A capsule that keeps the memory alive. `stream` (-1: none) will wait for the run that makes the data."""
        from tvmx.runtime.dlpack import export

        if options.get("copy") or options.get("dl_device") not in (None, self.__dlpack_device__()):
            raise BufferError("a DeviceArray is handed over where it lies, without a copy; see numpy()")
        if stream != -1:
            # None and 1 mean the legacy default stream, 2 the thread's own: both are driver handles as they are.
            self._memory.device.wait_for(stream or LEGACY_STREAM, self.stream)
        return export(self, self._memory.device.ordinal)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "version": 3,
            "strides": None,
            "stream": self.stream or LEGACY_STREAM,
        }

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype_name}{list(self.shape)} on cuda:{self._memory.device.ordinal})"
