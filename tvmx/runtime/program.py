"""One entry point made ready to run: buffers, addresses and the call structure, updated as little as possible."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmx.errors import InputError, TvmxError
from tvmx.runtime.arena import aligned_array, aligned_bytes
from tvmx.runtime.dims import evaluate
from tvmx.runtime.dtypes import numpy_dtype
from tvmx.runtime.library import AfterNode, Call, Library
from tvmx.runtime.manifest import Entry, Tensor
from tvmx.runtime.shapes import ShapeBinder, Signature
from tvmx.runtime.slots import Array, InputSlot, check_names

if TYPE_CHECKING:
    from tvmx.memory import CacheStats

_NO_HOOK = AfterNode()

# A copy of an output this small is cheaper than a fresh aligned allocation.
_COPY_OUTPUT_BYTES = 65536


class RunError(TvmxError):
    """A kernel reported a failure."""


class GraphProgram:
    """An entry of a library bound to a thread pool. Not thread safe: its executor serialises runs."""

    def __init__(self, library: Library, entry: Entry, pool: int) -> None:
        self.entry = entry
        self._library = library
        self._run = library.run_function(entry.name)
        self.slots = {i.name: InputSlot(i, tuple(c for c in entry.checks if c.input == i.name)) for i in entry.inputs}
        self._slot_list = list(self.slots.values())
        self._out_dtypes = [numpy_dtype(o.dtype) for o in entry.outputs]
        self.out_names = [o.name for o in entry.outputs]
        self._inputs = (ctypes.c_void_p * max(1, len(entry.inputs)))()
        self._outputs = (ctypes.c_void_p * max(1, len(entry.outputs)))()
        self._call = Call(pool=pool)
        self._call.inputs = ctypes.addressof(self._inputs)
        self._call.outputs = ctypes.addressof(self._outputs)
        self._call_address = ctypes.addressof(self._call)
        self._arena = aligned_bytes(0)
        self._own: list[Array] = []
        self._own_addresses: list[int] = []
        self._results: list[Array] | None = None
        self._symbolic = entry.arena.bytes is None or any(
            isinstance(d, str) for t in (*entry.inputs, *entry.outputs) for d in t.shape
        )
        self._binder = ShapeBinder(entry) if self._symbolic else None
        self._signature: Signature | None = None
        if self._binder is None:
            self._reserve(entry.arena.bytes or 0)
            self._make_outputs([_static(o.shape) for o in entry.outputs])

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena in use (for a symbolic program: of the block reserved so far)."""
        return self._arena.nbytes if self._symbolic else self.entry.arena.bytes or 0

    @property
    def arena_lower_bound(self) -> int:
        """What no plan can go under, for the shapes of the last run."""
        if self._signature is not None:
            return self._signature.lower_bound
        return self.entry.arena.lower_bound or 0

    @property
    def memory_stats(self) -> CacheStats | None:
        """Of the plan cache; None for a static program."""
        return self._binder.stats if self._binder is not None else None

    def trim(self) -> int:
        """Shrink the arena to what the last shape needs; returns the bytes freed."""
        if self._binder is None:
            return 0
        before = self._arena.nbytes
        self._binder.trim(keep=1 if self._signature is not None else 0)
        self._arena = aligned_bytes(self._binder.arena_bytes)
        self._call.arena = self._arena.ctypes.data
        return before - self._arena.nbytes

    def feed(self, inputs: Mapping[str, Any], copy: bool = False) -> None:
        """Bind every input. Raises InputError."""
        if len(inputs) != len(self.slots):
            check_names(inputs, self.slots)
        try:
            for slot in self._slot_list:
                slot.bind(inputs[slot.info.name], copy)
        except KeyError:
            check_names(inputs, self.slots)
            raise

    def set_input(self, name: str, value: Any, copy: bool = True) -> None:
        """Bind one input. Raises InputError."""
        slot = self.slots.get(name)
        if slot is None:
            raise InputError(f"no input {name!r}; the model takes {', '.join(map(repr, self.slots)) or 'none'}")
        slot.bind(value, copy)

    def call(self) -> list[Array]:
        """Run and return arrays that the caller owns."""
        self._bind()
        results: list[Array] = []
        for index, own in enumerate(self._own):
            if own.nbytes > _COPY_OUTPUT_BYTES:
                fresh = aligned_array(own.shape, own.dtype)
                self._outputs[index] = fresh.ctypes.data
                results.append(fresh)
            else:
                self._outputs[index] = self._own_addresses[index]
                results.append(own)
        self._execute()
        self._results = results
        return [r.copy() if r is self._own[i] else r for i, r in enumerate(results)]

    def run(self) -> None:
        """Run into the program's own output arrays."""
        self._bind()
        for index, address in enumerate(self._own_addresses):
            self._outputs[index] = address
        self._execute()
        self._results = self._own

    def results(self) -> list[Array]:
        """The outputs of the last run; valid until the next."""
        if self._results is None:
            raise InputError("there is no output yet; call run() first")
        return self._results

    def stamped(self, stamps: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """`run` once a row of `stamps` (int64, contiguous), which takes one time stamp more than there are nodes."""
        assert stamps.flags.c_contiguous and stamps.shape[1] == len(self.entry.nodes) + 1  # noqa: PT018
        address, step = stamps.ctypes.data, stamps.strides[0]
        call, run = self._call, self.run
        try:
            # Nothing but one assignment a run: a tiny model takes ten microseconds.
            for at in range(address, address + step * len(stamps), step):
                call.ticks = at
                run()
        finally:
            call.ticks = None

    def hooked(self, after: Any) -> None:
        """`run` with `after(context, node)` called after each node."""
        self._call.after = after
        try:
            self.run()
        finally:
            self._call.after = _NO_HOOK

    def address_of(self, name: str) -> int:
        """Where tensor `name` lies in the current run."""
        tensor = self.entry.tensors[name]
        inner = 0
        while tensor.alias_of is not None:
            inner += evaluate(tensor.alias_offset, self.dims)
            tensor = self.entry.tensors[tensor.alias_of]
        return inner + self._address_of_owner(tensor)

    def _address_of_owner(self, tensor: Tensor) -> int:
        if tensor.kind == "input":
            return self.slots[tensor.name].address
        if tensor.kind == "output":
            return int(self._outputs[self.entry.output_tensors.index(tensor.name)] or 0)
        if tensor.kind == "constant":
            return self._library.params() + (tensor.offset or 0)
        offsets = self._signature.offsets if self._signature else self.entry.arena.offsets
        assert offsets is not None
        return int(self._call.arena or 0) + offsets[tensor.name]

    def read(self, name: str, nbytes: int) -> bytes:
        """The first `nbytes` of tensor `name` as they are now."""
        return ctypes.string_at(self.address_of(name), nbytes)

    @property
    def dims(self) -> dict[str, int]:
        """The symbolic dims of the last run."""
        return self._signature.dims if self._signature else {}

    def _bind(self) -> None:
        for index, slot in enumerate(self._slot_list):
            if slot.array is None:
                raise InputError(
                    f"input {slot.info.name!r} is not set; call set_input({slot.info.name!r}, array) first"
                )
            self._inputs[index] = slot.address
        if self._binder is None:
            return
        signature = self._binder.bind([s.array.shape for s in self._slot_list if s.array is not None])
        if signature is not self._signature:
            self._reserve(max(signature.arena_bytes, self._binder.arena_bytes))
            self._make_outputs(signature.output_shapes)
            self._call.values = signature.values.ctypes.data
            self._signature = signature

    def _execute(self) -> None:
        status = self._run(self._call_address)
        if status:
            node = self.entry.nodes[status - 1]
            text = (self._library.last_error() or b"").decode(errors="replace")
            raise RunError(f"node {node.name} ({node.op}) failed: {text or 'no further detail'}")

    def _reserve(self, nbytes: int) -> None:
        if nbytes > self._arena.nbytes or self._call.arena is None:
            self._arena = aligned_bytes(nbytes)
            self._call.arena = self._arena.ctypes.data

    def _make_outputs(self, shapes: Any) -> None:
        self._own = [aligned_array(s, d) for s, d in zip(shapes, self._out_dtypes)]
        self._own_addresses = [o.ctypes.data for o in self._own]
        self._results = None


def _static(shape: tuple[int | str, ...]) -> tuple[int, ...]:
    return tuple(int(d) for d in shape)
