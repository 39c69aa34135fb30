"""CudaExecutor: load a model compiled for a CUDA target and run it on a GPU."""

from __future__ import annotations

import ctypes
import os
import statistics
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmx.errors import ArtifactError, ConfigError, InputError
from tvmx.runtime.artifact import check_machine, read_artifact
from tvmx.runtime.branch import BranchProgram
from tvmx.runtime.cuda_program import CudaProgram, stream_handle
from tvmx.runtime.debug import debug_program
from tvmx.runtime.device import Device, DeviceArray
from tvmx.runtime.executor import GraphExecutor
from tvmx.runtime.library import LoadedLibrary
from tvmx.runtime.profile import KernelProfile, Profile, node_bytes
from tvmx.runtime.slots import Array

if TYPE_CHECKING:
    from tvmx.runtime.branch import Program
    from tvmx.runtime.manifest import Entry

DRIVER_VARIABLE = "TVMX_CUDA_DRIVER"


class CudaExecutor(GraphExecutor):
    """A model compiled for a CUDA target: its code, parameters and memory on one GPU.

    `device` is the driver's number of the GPU. `graph` runs the model as one CUDA graph, captured at the first run
    for each set of input addresses. `driver` is the path of the driver's library; the default is the environment
    variable TVMX_CUDA_DRIVER, else libcuda.so.1.

    Inputs are numpy arrays, or tensors on the same GPU of any library that speaks DLPack, which are used where they
    lie. `run(stream=...)` returns at once; `run()` and a call wait. An executor serves one run at a time.
    Raises ArtifactError for a damaged or foreign file, DeviceError where there is no GPU, driver or room for it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        device: int = 0,
        entry: str | None = None,
        graph: bool = True,
        driver: str | os.PathLike[str] | None = None,
        check_hash: bool = True,
    ) -> None:
        self._programs = {}
        self._pool = 0
        self._library = None
        self._open = None
        self._device: Device | None = None
        artifact = read_artifact(path, check_hash)
        if artifact.manifest.executor != "cuda":
            raise ArtifactError(
                f"{artifact.path} was built for {artifact.manifest.target}, no CUDA target: open it with "
                "tvmx.runtime.GraphExecutor, or compile it with target='cuda-sm80' or its like"
            )
        check_machine(artifact)
        self.manifest = artifact.manifest
        self.threads = 1
        self.graph = graph
        public = self.manifest.public_entries
        if entry is not None and entry not in public:
            raise ArtifactError(f"no entry {entry!r} in {artifact.path}; it has {', '.join(public)}")
        self._lock = threading.Lock()
        self._path = artifact.path
        named = os.fspath(driver) if driver is not None else os.environ.get(DRIVER_VARIABLE) or None
        self._device = Device(LoadedLibrary(artifact.path, artifact.seal), device, named)
        self._choices = [entry] if entry is not None else list(public)
        self._open = self._program(self._choices[0])

    @property
    def device(self) -> Device:
        """The GPU: `name`, `sm` (compute capability, 80 for 8.0), `from_ptx`, the handle of its own `stream`."""
        if self._device is None:
            raise InputError("the executor is closed; make a new one")
        return self._device

    def run(self, stream: Any = None) -> None:
        """Run on the inputs that are set.

        With `stream` (a handle, or a stream of torch or cupy) the run is put into it and this returns at once: what the
        stream held before precedes it, and what is put there afterwards sees the outputs. Without, this waits.
        """
        with self._lock:
            if stream is None:
                self._current.run()
            else:
                self._cuda_program().run(stream_handle(stream))

    def synchronize(self) -> None:
        """Wait for the runs that were issued. Raises DeviceError for what failed in them."""
        with self._lock:
            self._cuda_program().synchronize()

    def get_device_output(self, which: int | str) -> DeviceArray:
        """An output of the last run in device memory, without a copy: valid until the next run."""
        outputs = self._cuda_program().device_results()
        if isinstance(which, str):
            names = self._current.out_names
            if which not in names:
                raise InputError(f"no output {which!r}; the model has {', '.join(map(repr, names))}")
            which = names.index(which)
        elif not -len(outputs) <= which < len(outputs):
            raise InputError(f"no output {which}; the model has {len(outputs)}")
        return outputs[which]

    def profile(self, runs: int = 20) -> Profile:
        """Time each kernel by events over `runs` runs, all on one stream; the median a kernel."""
        with self._lock:
            return _profile(self._cuda_program(), runs)

    def debug_run(self, inputs: Mapping[str, Any] | None = None) -> dict[str, Array]:
        """Run once (on `inputs`, or those that are set) and return every tensor that a node makes, by name."""
        with self._lock:
            program = self._cuda_program()
            if inputs is not None:
                program.feed(inputs)
            return debug_program(program)

    def close(self) -> None:
        """Wait for what runs and give the memory back, but for outputs that are still in use elsewhere."""
        for program in self._programs.values():
            if isinstance(program, CudaProgram):
                program.close()
        self._programs.clear()
        self._open = None
        self._device = None

    def _cuda_program(self) -> CudaProgram:
        program = self._current
        while isinstance(program, BranchProgram):
            program = program.choose()
        assert isinstance(program, CudaProgram)
        return program

    def _straight(self, entry: Entry) -> Program:
        return CudaProgram(self.device, entry, self.graph)


def open_executor(
    path: str | os.PathLike[str], threads: int | None = None, device: int | None = None, **options: Any
) -> GraphExecutor:
    """The executor for a compiled model, whatever it was compiled for; further `options` are those of its class.

    Raises what `GraphExecutor` and `CudaExecutor` raise, and ConfigError for threads on a GPU or a device on a CPU.
    """
    manifest = read_artifact(path, check_hash=False).manifest
    if manifest.executor == "cuda":
        if threads is not None:
            raise ConfigError(f"threads={threads}: {os.fspath(path)} runs on a GPU, which takes no number of threads")
        return CudaExecutor(path, device=device or 0, **options)
    if device is not None:
        raise ConfigError(f"device={device}: {os.fspath(path)} was built for {manifest.target} and runs on the CPU")
    return GraphExecutor(path, threads=threads, **options)


def _profile(program: CudaProgram, runs: int) -> Profile:
    entry, device = program.entry, program.device
    count = len(entry.nodes)
    marks = (ctypes.c_void_p * (count + 1))()
    spent = np.zeros((max(1, runs), count))
    try:
        for i in range(count + 1):
            marks[i] = device.mark_new()
        program.marked(marks)
        for row in spent:
            program.marked(marks)
            row[:] = [device.elapsed(marks[i] or 0, marks[i + 1] or 0) for i in range(count)]
    finally:
        for mark in marks:
            if mark:
                device.mark_free(mark)
    medians = np.median(spent, axis=0) if count else np.zeros(0)
    kernels = tuple(
        KernelProfile(n.name, n.op, n.kernel, n.rule, float(medians[i]), node_bytes(entry, n, {}), n.flops)
        for i, n in enumerate(entry.nodes)
    )
    return Profile(
        entry=entry.name,
        threads=1,
        runs=len(spent),
        kernels=kernels,
        run_seconds=float(statistics.median(spent.sum(axis=1))),
        peaks={},  # not measured on a GPU
        peak_bandwidth=0.0,
        starts=tuple(float(s) for s in np.concatenate([[0.0], np.cumsum(medians)[:-1]])) if count else (),
    )
