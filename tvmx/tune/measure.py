"""Build and time candidates in worker processes: a batch is built on all cores, then runs alone.

The library of a candidate holds the executor's own thread pool, so it is timed as it will be deployed, with
exactly `target.threads` threads.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tvmx.errors import ConfigError, TuneError
from tvmx.target import Target
from tvmx.tune.worker import Worker, WorkerCrash, WorkerTimeout

CACHES = ("rotate", "hot", "cold")
FULL_BYTES = 4 << 20  # a disk with less cannot hold what a batch builds


@dataclass(frozen=True)
class MeasureConfig:
    """How candidates are built and timed.

    `cache` is what a run finds: `hot` its arguments in the first-level caches, `cold` everything in memory,
    `rotate` (as in a network) its arguments beyond the second-level cache, by using several copies in turn.
    """

    build_timeout_s: float = 20.0
    run_timeout_s: float = 20.0
    repeat: int = 12  # samples of a trial
    min_repeat_ms: float = 2.0  # of one sample
    compare_rounds: int = 24  # samples of each kernel when a winner meets the default
    cache: str = "rotate"
    give_up: float = 2.0  # a trial slower than this times the best is timed once only
    builders: int = 0  # processes that compile; 0: one per core, at most 4

    def __post_init__(self) -> None:
        if self.cache not in CACHES:
            raise ConfigError(f"cache={self.cache!r}: use one of {', '.join(CACHES)}")
        if min(self.build_timeout_s, self.run_timeout_s, self.min_repeat_ms) <= 0:
            raise ConfigError("time limits and min_repeat_ms must be positive")
        if min(self.repeat, self.compare_rounds) < 1 or self.builders < 0:
            raise ConfigError("repeat and compare_rounds must be at least 1, builders at least 0")


@dataclass(frozen=True)
class Built:
    """A compiled candidate, or why there is none: BUILD_ERROR, BUILD_TIMEOUT, BUILD_CRASH, or SKIPPED (not begun)."""

    path: Path | None
    status: str = "OK"
    error: str = ""
    facts: dict[str, Any] = field(default_factory=dict)  # the CUDA compiler's figures

    def delete(self) -> None:
        """Remove the library's file."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Outcome:
    """Of a run. `samples`: seconds a call, a list per kernel."""

    status: str
    samples: tuple[tuple[float, ...], ...] = ()
    error: str = ""


class Measurer:
    """The worker processes and the folder for compiled candidates. Use as a context manager.

    `device` is what candidates run on: "cpu", "cuda:0", or None to build only. `runner` stands in for the process
    that runs them, such as a remote one. Raises TuneError when the C compiler is missing or a worker does not start.
    """

    def __init__(
        self,
        target: Target,
        config: MeasureConfig | None = None,
        device: str | None = "cpu",
        runner: Any = None,
    ) -> None:
        self.target = target
        self.device = device
        self.config = config or MeasureConfig()
        self._folder = Path(tempfile.mkdtemp(prefix="tvmx-tune-"))
        self._count = 0
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = self.config.builders or min(4, cores)
        self._builders = [Worker("tvmx.tune.builder", {"OMP_NUM_THREADS": "1"}) for _ in range(count)]
        self._runner = runner or Worker("tvmx.tune.runner", {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
        # A worker dies with the thread that started it, so these threads live as long as the workers.
        self._threads = ThreadPoolExecutor(count)
        try:
            self._pool = self._compile_pool()
            for worker in (*self._builders, *([self._runner] if device is not None else [])):
                worker.start()
        except BaseException:
            self.close()
            raise

    def build(self, funcs: Sequence[Any], stop: Callable[[], bool] = lambda: False) -> list[Built]:
        """Compile scheduled PrimFuncs, several at a time. The caller deletes what it no longer needs.

        Once `stop` returns true no other one is begun. Raises TuneError when the temporary folder is full.
        """
        idle = list(self._builders)

        def one(job: tuple[str, Path]) -> Built:
            if stop():
                return Built(None, "SKIPPED")
            text, path = job
            worker = idle.pop()  # as many threads as workers: one is idle
            try:
                request: dict[str, Any] = {"func": text, "target": self.target.tvm_dict(), "output": str(path)}
                gpu = asdict(self.target.gpu) if self.target.gpu is not None else None
                request |= {"addons": [str(self._pool)], "gpu": gpu}
                answer = worker.request(request, self.config.build_timeout_s)
            except WorkerTimeout as error:
                return Built(None, "BUILD_TIMEOUT", str(error))
            except WorkerCrash as error:
                return Built(None, "BUILD_CRASH", str(error))
            finally:
                idle.append(worker)
            if answer["error"]:
                return Built(None, "BUILD_ERROR", answer["error"])
            return Built(path, facts=answer.get("facts") or {})

        builds = list(self._threads.map(one, [(_save(f), self._path()) for f in funcs]))
        if any(b.status == "BUILD_ERROR" for b in builds) and shutil.disk_usage(self._folder).free < FULL_BYTES:
            # That says nothing about the candidates.
            raise TuneError(f"the disk of {self._folder} is full; make room there, or set TMPDIR to another folder")
        return builds

    def build_plain(self, func: Any, target: Target, output: Path) -> str:
        """Compile a PrimFunc as it is for a CPU `target`, as a library that runs there. Returns why not, or nothing."""
        request = {"func": _save(func), "target": target.tvm_dict(), "output": str(output), "addons": [str(self._pool)]}
        try:
            return str(self._builders[0].request(request, self.config.build_timeout_s)["error"])
        except (WorkerTimeout, WorkerCrash) as error:
            return str(error)

    def facts(self) -> dict[str, Any]:
        """What the device is: its `name`, and `sm` of a GPU. Raises TuneError where there is none."""
        answer = self._run({"op": "facts", "device": self.device or "cpu"}, 60.0)
        if answer["status"] != "OK":
            raise TuneError(str(answer["error"]))
        found: dict[str, Any] = answer["facts"]
        return found

    def trial(self, func: Any, reference: Built, built: Built, give_up_s: float, seed: int = 0) -> Outcome:
        """Run one build of `func` once against `reference`, then time it unless it takes over `give_up_s`."""
        assert built.path is not None
        limit = give_up_s if math.isfinite(give_up_s) else None
        request = {"op": "trial", "path": str(built.path), "give_up_s": limit}
        outcome = self._run({**request, "spec": self._spec(func, reference, seed)}, self.config.run_timeout_s)
        return Outcome(outcome["status"], (tuple(outcome["samples"]),), outcome["error"])

    def compare(self, func: Any, builds: Sequence[Built], seed: int) -> Outcome:
        """Time builds of `func` interleaved on fresh inputs; the first is the reference for the outputs."""
        paths = [str(b.path) for b in builds]
        request = {"op": "compare", "paths": paths, "rounds": self.config.compare_rounds * self._finer()}
        limit = self.config.run_timeout_s * len(builds)
        outcome = self._run({**request, "spec": self._spec(func, builds[0], seed)}, limit)
        return Outcome(outcome["status"], tuple(tuple(s) for s in outcome["samples"]), outcome["error"])

    def close(self) -> None:
        """Kill the workers and delete what they built."""
        for worker in (*self._builders, self._runner):
            worker.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._builders:
            worker.close()  # a thread may have started one again meanwhile
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _run(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self._runner.request(request, limit)
        except WorkerTimeout as error:
            return {"status": "RUN_TIMEOUT", "samples": [], "error": str(error)}
        except WorkerCrash as error:
            return {"status": "RUN_CRASH", "samples": [], "error": str(error)}
        return answer

    def _spec(self, func: Any, reference: Built, seed: int) -> dict[str, Any]:
        args, outputs = signature(func)
        return {
            "args": args,
            "outputs": outputs,
            "reference": str(reference.path),
            "threads": self.target.threads,
            "seed": seed,
            "repeat": self.config.repeat * self._finer(),
            "min_repeat_s": self.config.min_repeat_ms * 1e-3 / self._finer(),
            "cache": self.config.cache,
            "rotate_bytes": rotate_bytes(self.target),
            "device": self.device or "cpu",
        }

    def _finer(self) -> int:
        """Several threads are timed by the wall clock: more, shorter samples leave some of them undisturbed."""
        return 1 if self.target.threads == 1 else 2

    def _path(self) -> Path:
        self._count += 1
        return self._folder / f"{self._count}.so"

    def _compile_pool(self) -> Path:
        import tvmx.executor

        source = Path(str(tvmx.executor.__file__)).parent / "pool.c"
        output = self._folder / "pool.o"
        compiler = os.environ.get("CC", "cc")
        try:
            command = [compiler, "-O2", "-fPIC", "-c", str(source), "-o", str(output)]
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise TuneError(f"tuning needs the C compiler {compiler!r}; install gcc or set CC") from None
        except subprocess.CalledProcessError as error:
            raise TuneError(f"{compiler} cannot compile {source}:\n{error.stderr}") from None
        return output


def rotate_bytes(target: Target) -> int:
    """Arguments that no cache below the last one holds: what a network's other kernels leave of a kernel's own."""
    return 2 * target.gpu.l2_bytes if target.gpu is not None else 4 * target.l2_bytes


def signature(func: Any) -> tuple[list[list[Any]], list[int]]:
    """`[[shape, dtype], ...]` of a static PrimFunc's parameters, and the positions of those that it writes.

    Raises TuneError for a parameter that is no buffer or has a symbolic shape.
    """
    from tvm.s_tir import SBlock
    from tvm.tirx import IntImm
    from tvm.tirx.buffer import BufferType

    from tvmx.schedule.tir import walk

    args: list[list[Any]] = []
    for param in func.params:
        if not isinstance(param.ty, BufferType) or not all(isinstance(d, (int, IntImm)) for d in param.shape):
            raise TuneError("only kernels of static shape and without scalar parameters can be tuned")
        args.append([[int(d) for d in param.shape], str(param.dtype)])
    written: list[Any] = []
    walk(func, SBlock, lambda block: written.extend(w.source for w in block.writes))
    return args, [i for i, p in enumerate(func.params) if any(p.same_as(w) for w in written)]


def _save(func: Any) -> str:
    import tvm

    return str(tvm.ir.save_json(func.with_attr("global_symbol", "main")))
