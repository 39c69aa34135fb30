"""GraphExecutor: load a compiled model and run it."""

from __future__ import annotations

import logging
import os
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmx.errors import ArtifactError, InputError
from tvmx.runtime.artifact import check_machine, read_artifact
from tvmx.runtime.branch import BranchProgram, Program
from tvmx.runtime.debug import debug_program
from tvmx.runtime.dtypes import numpy_dtype
from tvmx.runtime.library import Library
from tvmx.runtime.machine import usable_cores
from tvmx.runtime.manifest import Entry, Manifest, TensorInfo
from tvmx.runtime.profile import Profile, profile_program
from tvmx.runtime.program import GraphProgram
from tvmx.runtime.slots import Array
from tvmx.runtime.vm import VmProgram, load_vm_runtime

if TYPE_CHECKING:
    from tvmx.memory import CacheStats

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Benchmark:
    """Seconds a run, in the order measured."""

    samples: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples)

    @property
    def min_s(self) -> float:
        return min(self.samples)

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.samples)

    def __str__(self) -> str:
        return f"median {self.median_s * 1e3:.3f} ms, min {self.min_s * 1e3:.3f} ms of {len(self.samples)} runs"


class GraphExecutor:
    """A compiled model, its memory and its threads.

    `threads` counts the calling thread, which takes part in every run and whose affinity never changes; the default
    is what the model was compiled for, at most the cores at hand. `affinity[i]` is the CPU for thread i; thread 0 is
    the caller and stays where it is. `entry` names an entry point; without it a call picks one by its input shapes.

    An executor serves one run at a time (concurrent calls wait); use one a thread to run in parallel.
    Raises ArtifactError when the file is damaged, foreign, or does not fit this machine.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        threads: int | None = None,
        affinity: Sequence[int] | None = None,
        entry: str | None = None,
        check_hash: bool = True,
    ) -> None:
        self._programs: dict[str, Program] = {}
        self._pool = 0
        self._library: Library | None = None
        self._open: Program | None = None
        artifact = read_artifact(path, check_hash)
        if artifact.manifest.executor == "cuda":
            raise ArtifactError(
                f"{artifact.path} was built for {artifact.manifest.target}: open it with tvmx.runtime.CudaExecutor, or "
                "with open_executor, which takes any model"
            )
        check_machine(artifact)
        self.manifest: Manifest = artifact.manifest
        if threads is not None and (not isinstance(threads, int) or not 1 <= threads <= 1024):
            raise InputError(f"threads={threads!r}: use 1 to 1024")
        _check_affinity(affinity)
        self.threads = threads or max(1, min(self.manifest.threads, usable_cores()))
        public = self.manifest.public_entries
        if entry is not None and entry not in public:
            raise ArtifactError(f"no entry {entry!r} in {artifact.path}; it has {', '.join(public)}")
        self._lock = threading.Lock()
        self._path = artifact.path
        if self.manifest.executor == "vm":
            load_vm_runtime(artifact.path)
        self._library = Library(artifact.path, artifact.seal)
        self._pool = self._library.new_pool(self.threads, affinity)
        self._choices = [entry] if entry is not None else list(public)
        self._open = self._program(self._choices[0])

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """The model's inputs (of the entry in use)."""
        return self._current.entry.inputs

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """The model's outputs (of the entry in use)."""
        return self._current.entry.outputs

    def dtype_of(self, name: str) -> np.dtype[Any]:
        """The numpy dtype of an input or output; bfloat16 is ml_dtypes', or uint16 where that is not installed."""
        for info in (*self.inputs, *self.outputs):
            if info.name == name:
                return numpy_dtype(info.dtype)
        raise InputError(f"no input or output {name!r}")

    @property
    def entry(self) -> str:
        """The entry point in use."""
        return self._current.entry.name

    @property
    def arena_bytes(self) -> int:
        """Bytes of the memory that all intermediate tensors share."""
        return self._current.arena_bytes

    @property
    def arena_lower_bound(self) -> int:
        """Bytes that no plan can go under: the most that is alive at once."""
        return self._current.arena_lower_bound

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """Run on `inputs` (name → array); returns name → array, owned by the caller. Raises InputError."""
        if not isinstance(inputs, Mapping):
            raise InputError(f"inputs are a {type(inputs).__name__}; give a dict of input name to array")
        with self._lock:
            program = self._current if len(self._choices) == 1 else self._pick(inputs)
            program.feed(inputs)
            return dict(zip(program.out_names, program.call()))

    def set_input(self, name: str, value: Any, copy: bool = True) -> None:
        """Bind one input for `run`. With `copy=False` an aligned array is used where it lies, and must stay."""
        with self._lock:
            self._current.set_input(name, value, copy)

    def run(self) -> None:
        """Run on the inputs that are set."""
        with self._lock:
            self._current.run()

    def get_output(self, which: int | str, copy: bool = False) -> Array:
        """An output of the last run: a view that the next run overwrites, or a copy."""
        names = self._current.out_names
        if isinstance(which, str):
            if which not in names:
                raise InputError(f"no output {which!r}; the model has {', '.join(map(repr, names))}")
            which = names.index(which)
        elif not isinstance(which, int) or not -len(names) <= which < len(names):
            raise InputError(f"no output {which!r}; the model has {len(names)}")
        result = self._current.results()[which]
        return result.copy() if copy else result

    def benchmark(self, repeat: int = 50, warmup: int = 3) -> Benchmark:
        """Time `repeat` runs on the inputs that are set."""
        for _ in range(warmup):
            self.run()
        samples = []
        for _ in range(max(1, repeat)):
            begin = time.perf_counter()
            self.run()
            samples.append(time.perf_counter() - begin)
        return Benchmark(tuple(samples))

    def profile(self, runs: int = 20) -> Profile:
        """Time each kernel over `runs` runs on the inputs that are set; the median a kernel.

        Raises InputError for a model that runs through the Relax VM.
        """
        with self._lock:
            program = self._graph_program("profile")
            assert self._library is not None
            return profile_program(program, self._library, self._pool, self.threads, runs)

    def debug_run(self, inputs: Mapping[str, Any] | None = None) -> dict[str, Array]:
        """Run once (on `inputs`, or those that are set) and return every tensor that a node makes, by name.

        Raises InputError for a model that runs through the Relax VM.
        """
        with self._lock:
            program = self._graph_program("debug_run")
            if inputs is not None:
                program.feed(inputs)
            return debug_program(program)

    @property
    def memory_stats(self) -> CacheStats | None:
        """Hits, misses and bytes of the plans of a model with symbolic dims; None for a static one."""
        program = self._current
        return program.memory_stats if isinstance(program, GraphProgram) else None

    def trim(self) -> int:
        """Give memory of a symbolic model back, down to what the last shape needs; returns the bytes freed."""
        with self._lock:
            program = self._current
            return program.trim() if isinstance(program, GraphProgram) else 0

    def close(self) -> None:
        """Stop the threads and unload the library. Arrays returned by calls stay valid."""
        self._programs.clear()
        self._open = None
        if self._library is not None:
            if self._pool:
                self._library.pool_free(self._pool)
                self._pool = 0
            self._library.close()
            self._library = None

    def __enter__(self) -> GraphExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    @property
    def _current(self) -> Program:
        if self._open is None:
            raise InputError("the executor is closed; make a new one")
        return self._open

    def _graph_program(self, what: str) -> GraphProgram:
        program = self._current
        while isinstance(program, BranchProgram):
            program = program.choose()
        if not isinstance(program, GraphProgram):
            raise InputError(f"{what} needs a straight-line program; this model runs through the Relax VM")
        return program

    def _program(self, entry: str) -> Program:
        if entry not in self._programs:
            branch = self.manifest.branches.get(entry)
            if branch is not None:
                then, otherwise = (None if p is None else self._program(p) for p in (branch.then, branch.otherwise))
                self._programs[entry] = BranchProgram(branch, self._program(branch.condition), then, otherwise)
                return self._programs[entry]
            self._programs[entry] = self._straight(self.manifest.entries[entry])
        return self._programs[entry]

    def _straight(self, entry: Entry) -> Program:
        assert self._library is not None
        if self.manifest.executor == "vm":
            log.info("%s runs through the Relax VM: %s", self._path, self.manifest.reason)
            return VmProgram(self._library, entry, self._pool, self._library.path)
        return GraphProgram(self._library, entry, self._pool)

    def _pick(self, inputs: Mapping[str, Any]) -> Program:
        """The entry whose input shapes fit; the current one when none does, so that its error is shown."""
        shapes = {n: getattr(a, "shape", None) for n, a in inputs.items()}
        for name in sorted(self._choices, key=lambda n: self._programs.get(n) is not self._open):
            if _fits(self.manifest.signature(name), shapes):
                self._open = self._program(name)
                break
        return self._current


def _check_affinity(affinity: Sequence[int] | None) -> None:
    for cpu in affinity or ():
        if not isinstance(cpu, int) or cpu >= (os.cpu_count() or 1):
            raise InputError(
                f"affinity={list(affinity or ())}: {cpu!r} is no CPU of this machine; use numbers below "
                f"{os.cpu_count()}, negative ones pin nothing"
            )


def _fits(entry: Entry, shapes: Mapping[str, Any]) -> bool:
    for info in entry.inputs:
        shape = shapes.get(info.name)
        if shape is None or len(shape) != len(info.shape):
            return False
        for size, dim in zip(shape, info.shape):
            if isinstance(dim, int):
                if dim != size:
                    return False
                continue
            low, high = entry.dims.get(dim, (0, None))
            if size < low or (high is not None and size > high):
                return False
    return True
