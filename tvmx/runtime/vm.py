"""Models that the Relax VM runs. Only here are TVM's runtime libraries loaded, and never the compiler."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tvmx.errors import ArtifactError, InputError, TvmxError
from tvmx.runtime.library import Library
from tvmx.runtime.manifest import Entry
from tvmx.runtime.shapes import InputShapes
from tvmx.runtime.slots import Array, InputSlot, check_names

_CPU, _POOLED = 1, 2


class VmProgram:
    """The same interface as `GraphProgram`, over a VM executable."""

    def __init__(self, library: Library, entry: Entry, pool: int, path: str) -> None:
        self.entry = entry
        self.out_names = [o.name for o in entry.outputs]
        self._library, self._pool = library, pool
        self._shapes = InputShapes(entry)
        # The VM keeps what it is given, so inputs are always copied.
        self.slots = {i.name: InputSlot(i, tuple(c for c in entry.checks if c.input == i.name)) for i in entry.inputs}
        self._results: list[Array] | None = None
        self._ffi = load_vm_runtime(path)
        module = self._ffi.load_module(path)["vm_load_executable"]()
        try:
            module["vm_initialization"](_CPU, 0, _POOLED)
        except Exception as error:
            missing = re.search(r"Cannot find ffi::Function (\S+)", str(error))
            if missing is None:
                raise
            raise ArtifactError(
                f"{path} calls {missing[1]}, which only TVM's Python package provides; "
                "pip install apache-tvm and `import tvm` before loading it"
            ) from error
        self._main = module["main"]

    @property
    def arena_bytes(self) -> int:
        """The VM allocates as it goes: there is no arena."""
        return 0

    @property
    def arena_lower_bound(self) -> int:
        return 0

    @property
    def dims(self) -> dict[str, int]:
        return {}

    def feed(self, inputs: Mapping[str, Any], copy: bool = True) -> None:
        """Bind every input. Raises InputError."""
        check_names(inputs, self.slots)
        for name, slot in self.slots.items():
            slot.bind(inputs[name], copy=True)

    def set_input(self, name: str, value: Any, copy: bool = True) -> None:
        """Bind one input. Raises InputError."""
        slot = self.slots.get(name)
        if slot is None:
            raise InputError(f"no input {name!r}; the model takes {', '.join(map(repr, self.slots)) or 'none'}")
        slot.bind(value, copy=True)

    def call(self) -> list[Array]:
        """Run and return arrays that the caller owns."""
        self.run()
        return [r.copy() for r in self.results()]

    def run(self) -> None:
        """Run; results stay until the next run."""
        arrays = []
        for slot in self.slots.values():
            if slot.array is None:
                raise InputError(f"input {slot.info.name!r} is not set; call set_input first")
            arrays.append(slot.array)
        self._shapes.solve([a.shape for a in arrays])
        tensors = [self._across(self._ffi.from_dlpack, a) for a in arrays]
        before = self._library.pool_enter(self._pool)
        try:
            found = self._main(*tensors)
        except Exception as error:
            reason = str(error).strip().splitlines()
            raise TvmxError(f"the model failed while running: {reason[-1] if reason else error}") from error
        finally:
            self._library.pool_enter(before)
        values = [found] if hasattr(found, "__dlpack__") else list(found)
        self._results = [self._across(np.from_dlpack, v) for v in values]

    @staticmethod
    def _across(convert: Any, value: Any) -> Any:
        """Hand a tensor over by DLPack, which knows no bfloat16 on numpy's side."""
        try:
            return convert(value)
        except BufferError as error:
            raise TvmxError(f"the Relax VM cannot exchange this type ({error}); use float32 in the model") from None

    def results(self) -> list[Array]:
        """The outputs of the last run."""
        if self._results is None:
            raise InputError("there is no output yet; call run() first")
        return self._results


def load_vm_runtime(path: str) -> Any:
    """Load libtvm_runtime beside the artifact or from an installed TVM; returns the tvm_ffi package.

    Comes before the artifact is loaded, which refers to it. Raises ArtifactError saying what to install.
    """
    try:
        import tvm_ffi
    except ImportError as error:
        raise ArtifactError(
            f"{path} runs through the Relax VM and needs TVM's runtime ({error}); pip install apache-tvm-ffi apache-tvm"
        ) from None
    found = None
    for folder in _runtime_folders(path):
        library = folder / "libtvm_runtime.so"
        if library.exists():
            found = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            extra = folder / "libtvm_runtime_extra.so"  # sorting, for models that need it
            if extra.exists():
                ctypes.CDLL(str(extra), mode=ctypes.RTLD_GLOBAL)
            break
    if found is None:
        raise ArtifactError(
            f"{path} runs through the Relax VM and needs libtvm_runtime.so beside it or an installed apache-tvm"
        )
    return tvm_ffi


def _runtime_folders(path: str) -> list[Path]:
    folders = [Path(os.path.dirname(path))]
    spec = importlib.util.find_spec("tvm")  # finds it, does not import it
    if spec is not None and spec.origin:
        folders.append(Path(spec.origin).parent / "lib")
    return folders
