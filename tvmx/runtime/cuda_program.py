"""One entry point on a CUDA device: its memory, its inputs on the host or the device, its graph."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

from tvmx.errors import DeviceError, InputError
from tvmx.runtime.arena import ALIGNMENT, aligned_array
from tvmx.runtime.device import (
    LEGACY_STREAM,
    ON_DEVICE,
    TO_DEVICE,
    TO_HOST,
    AfterNode,
    CudaCall,
    Device,
    DeviceArray,
    DeviceMemory,
)
from tvmx.runtime.dlpack import CUDA, MANAGED, Borrowed, borrow, device_of
from tvmx.runtime.dtypes import numpy_dtype
from tvmx.runtime.manifest import Entry
from tvmx.runtime.slots import Array, InputSlot, check_names

_KEPT_GRAPHS = 8
_KEPT_RETIRED = 64
_NO_HOOK = AfterNode()


class DeviceSlot(InputSlot):
    """One input: a host array to upload, or device memory used where it lies; `memory` is the slot's own."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert self.shape is not None, "programs for CUDA have fixed shapes"
        self.nbytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        self.memory: DeviceMemory | None = None
        self.dirty = False  # the host array is not on the device yet
        self.shared = False  # it is the caller's, who may change it between runs
        self.borrowed: Borrowed | None = None
        self.given = False

    def bind_host(self, value: Any, copy: bool) -> Any:
        """Take an array of the host, to be uploaded by the next run; returns what may still be in use."""
        array = value if type(value) is np.ndarray else np.asarray(value)
        if array.dtype != self.dtype or array.shape != self.shape:
            raise InputError(self._mismatch(array))
        if self.checks:
            self._check_range(array)
        self.shared = not copy and array.flags.c_contiguous
        if not self.shared:
            own = aligned_array(array.shape, self.dtype)
            np.copyto(own, array)
            array = own
        before = (self.array, self.borrowed)
        self.array, self.borrowed, self.dirty, self.given = array, None, True, True
        return before

    def bind_device(self, tensor: Borrowed) -> Any:
        """Take a tensor of the device; returns what may still be in use."""
        if tensor.dtype != self.info.dtype or tensor.shape != self.shape:
            raise InputError(
                f"input {self.info.name!r}: expected {self.info.dtype}{list(self.shape or ())}, got "
                f"{tensor.dtype}{list(tensor.shape)} on the device"
            )
        if not tensor.contiguous:
            raise InputError(f"input {self.info.name!r} is not contiguous on the device; pass x.contiguous()")
        before = (self.array, self.borrowed)
        self.array, self.borrowed, self.dirty, self.given = None, tensor, False, True
        return before


class CudaProgram:
    """An entry of a library on its device. Not thread safe: its executor serialises runs."""

    def __init__(self, device: Device, entry: Entry, graph: bool) -> None:
        self.entry = entry
        self.device = device
        self.use_graph = graph
        self._run = device.run_function(entry.name)
        self.slots = {i.name: DeviceSlot(i, tuple(c for c in entry.checks if c.input == i.name)) for i in entry.inputs}
        self._slot_list = list(self.slots.values())
        self.out_names = [o.name for o in entry.outputs]
        self._out_dtypes = [numpy_dtype(o.dtype) for o in entry.outputs]
        self._out_shapes = [tuple(int(d) for d in o.shape) for o in entry.outputs]
        self._arena = DeviceMemory(device, entry.arena.bytes or 0)
        self._outputs = [
            DeviceMemory(device, int(np.prod(s, dtype=np.int64)) * d.itemsize)
            for s, d in zip(self._out_shapes, self._out_dtypes)
        ]
        self._in = (ctypes.c_void_p * max(1, len(entry.inputs)))()
        self._out = (ctypes.c_void_p * max(1, len(entry.outputs)))(*[o.address for o in self._outputs])
        self._call = CudaCall(
            inputs=ctypes.addressof(self._in), outputs=ctypes.addressof(self._out), arena=self._arena.address
        )
        self._graphs: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._stream = 0  # of the last run
        self._in_flight = False
        self._retired: list[Any] = []  # what runs in flight may still read
        self._ran = False

    @property
    def arena_bytes(self) -> int:
        return self.entry.arena.bytes or 0

    @property
    def arena_lower_bound(self) -> int:
        return self.entry.arena.lower_bound or 0

    @property
    def dims(self) -> dict[str, int]:
        return {}

    def feed(self, inputs: Mapping[str, Any], copy: bool = False) -> None:
        """Bind every input. Raises InputError."""
        check_names(inputs, self.slots)
        for name, value in inputs.items():
            self.set_input(name, value, copy)

    def set_input(self, name: str, value: Any, copy: bool = True) -> None:
        """Bind one input: an array of the host, or a tensor of this device where it lies. Raises InputError."""
        slot = self.slots.get(name)
        if slot is None:
            raise InputError(f"no input {name!r}; the model takes {', '.join(map(repr, self.slots)) or 'none'}")
        where = device_of(value)
        if where is not None and where[0] in (CUDA, MANAGED):
            if where[1] != self.device.ordinal:
                raise InputError(
                    f"input {name!r} lies on device {where[1]}, the model on {self.device.ordinal}; move it there"
                )
            before = slot.bind_device(borrow(value, self._stream or self.device.stream))
            self._check_values(slot)
        else:
            before = slot.bind_host(value, copy)
        if self._in_flight:
            self._retired.append(before)
            if len(self._retired) > _KEPT_RETIRED:
                self.synchronize()

    def run(self, stream: int | None = None) -> None:
        """Run; without a stream, wait until the outputs are there."""
        self.issue(0 if stream is None else stream)
        if stream is None:
            self.synchronize()

    def issue(self, stream: int) -> None:
        """Put one run into `stream` (0: the device's own) and return."""
        if self._in_flight:
            # One arena: a run begins when the one before has ended, whatever their streams.
            self.device.wait_for(stream, self._stream)
        self._stream, self._in_flight = stream, True
        self._upload(stream)
        if self.use_graph:
            self.device.replay(self._graph(), stream)
        else:
            self._call.stream = stream or None
            self.device.run(self._run, self._call)
        self._ran = True

    def synchronize(self) -> None:
        """Wait for all runs that were issued. Raises DeviceError for what failed in them."""
        self.device.synchronize(self._stream)
        self._in_flight = False
        self._retired.clear()

    def call(self) -> list[Array]:
        """Run and return arrays of the host."""
        self.issue(0)
        return self.results()

    def results(self) -> list[Array]:
        """The outputs of the last run, copied to the host."""
        self._check_ran()
        arrays: list[Array] = [np.empty(s, d) for s, d in zip(self._out_shapes, self._out_dtypes)]
        for array, memory in zip(arrays, self._outputs):
            self.device.copy(array.ctypes.data, memory.address, array.nbytes, TO_HOST, self._stream)
        self.synchronize()
        return arrays

    def device_results(self) -> list[DeviceArray]:
        """The outputs where they lie, overwritten by the next run; they may still be in the making on their stream."""
        self._check_ran()
        return [
            DeviceArray(m, s, d, o.dtype, self._stream or self.device.stream)
            for m, s, d, o in zip(self._outputs, self._out_shapes, self._out_dtypes, self.entry.outputs)
        ]

    def marked(self, marks: ctypes.Array[ctypes.c_void_p]) -> None:
        """One run on one stream that records a mark before the first node and after each."""
        self._call.marks = ctypes.addressof(marks)
        try:
            self._on_one_stream()
        finally:
            self._call.marks = None

    def hooked(self, after: Any) -> None:
        """One run on one stream, with `after(context, node)` called after each node."""
        self._call.after = after
        try:
            self._on_one_stream()
        finally:
            self._call.after = _NO_HOOK

    def _on_one_stream(self) -> None:
        if self._in_flight:
            self.synchronize()
        self._upload(0)
        self._call.stream = None
        self.device.run(self._run, self._call)
        self._stream, self._ran = 0, True
        self.synchronize()

    def read(self, name: str, nbytes: int) -> bytes:
        """The first `nbytes` of tensor `name` as they are now."""
        raw = np.empty(nbytes, np.uint8)
        self.device.download(raw, self._address_of(name))
        return raw.tobytes()

    def close(self) -> None:
        """Wait for what runs and drop the graphs; memory that is still in use outside stays."""
        try:
            if self._in_flight:
                self.synchronize()
            for graph in self._graphs.values():
                self.device.drop(graph)
        except DeviceError:
            pass  # the context is lost, and all that is on it
        self._graphs.clear()
        self._retired.clear()

    def _address_of(self, name: str) -> int:
        tensor = self.entry.tensors[name]
        inner = 0
        while tensor.alias_of is not None:
            assert isinstance(tensor.alias_offset, int), "shapes are fixed"
            inner += tensor.alias_offset
            tensor = self.entry.tensors[tensor.alias_of]
        if tensor.kind == "input":
            return inner + int(self._in[list(self.slots).index(tensor.name)] or 0)
        if tensor.kind == "output":
            return inner + self._outputs[self.entry.output_tensors.index(tensor.name)].address
        offsets = self.entry.arena.offsets
        assert offsets is not None
        assert tensor.kind == "intermediate", "constants are not read back"
        return inner + self._arena.address + offsets[tensor.name]

    def _upload(self, stream: int) -> None:
        for index, slot in enumerate(self._slot_list):
            if not slot.given:
                raise InputError(
                    f"input {slot.info.name!r} is not set; call set_input({slot.info.name!r}, array) first"
                )
            if slot.borrowed is not None and slot.borrowed.address % ALIGNMENT == 0:
                self._in[index] = slot.borrowed.address
                continue
            if slot.memory is None:
                slot.memory = DeviceMemory(self.device, slot.nbytes)
            self._in[index] = slot.memory.address
            if slot.borrowed is not None:  # kernels read whole vectors: elsewhere it must be copied
                self.device.copy(slot.memory.address, slot.borrowed.address, slot.nbytes, ON_DEVICE, stream)
            elif slot.dirty or slot.shared:
                assert slot.array is not None
                self.device.copy(slot.memory.address, slot.array.ctypes.data, slot.nbytes, TO_DEVICE, stream)
                slot.dirty = False

    def _graph(self) -> int:
        """The program as a CUDA graph for the addresses that are bound now."""
        key = tuple(int(a or 0) for a in self._in)
        found = self._graphs.get(key)
        if found is None:
            self.device.capture_begin()
            try:
                self._call.stream = None
                self.device.run(self._run, self._call)
            except DeviceError:
                self._end_broken_capture()
                raise
            found = self._graphs[key] = self.device.capture_end()
            if len(self._graphs) > _KEPT_GRAPHS:
                self.synchronize()
                self.device.drop(self._graphs.popitem(last=False)[1])
        else:
            self._graphs.move_to_end(key)
        return found

    def _end_broken_capture(self) -> None:
        try:
            self.device.drop(self.device.capture_end())
        except DeviceError:
            pass  # the error that broke the capture is raised instead

    def _check_values(self, slot: DeviceSlot) -> None:
        """Indices in device memory must be looked at, too: a wrong one would read stray memory."""
        if slot.checks and slot.borrowed is not None:
            host: Array = np.empty(slot.borrowed.shape, slot.dtype)
            self.device.download(host, slot.borrowed.address, self._stream)
            slot._check_range(host)

    def _check_ran(self) -> None:
        if not self._ran:
            raise InputError("there is no output yet; call run() first")


def stream_handle(stream: Any) -> int:
    """The driver's handle of a stream: an int, or a stream of torch (`cuda_stream`) or cupy (`ptr`)."""
    for attribute in ("cuda_stream", "ptr"):
        stream = getattr(stream, attribute, stream)
    if not isinstance(stream, int):
        raise InputError(f"stream={stream!r} is no CUDA stream; pass its handle, or one of torch or cupy")
    return stream or LEGACY_STREAM
