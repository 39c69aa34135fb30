"""Offline bundles: built candidates, references and a runner in one folder or tar, for a machine with only a device.

bundle/run.py            starts the runner
bundle/lib/tvmx/…        the runner (numpy and the standard library)
bundle/manifest.json     tasks and candidates: files, checksums, traces, predicted times
bundle/candidates/       shared objects with machine code in them, no source
bundle/references/       the same kernels for the CPU, against which outputs are checked
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmx.errors import TuneError
from tvmx.target import PRESETS, Target
from tvmx.tune.interrupt import Interrupt
from tvmx.tune.measure import Built, MeasureConfig, Measurer, rotate_bytes, signature
from tvmx.tune.offline_run import FORMAT, MANIFEST, SUM
from tvmx.tune.predict import Predictor
from tvmx.tune.record import FORMAT as RECORD_FORMAT
from tvmx.tune.record import target_to_json, versions
from tvmx.tune.search import SearchConfig
from tvmx.tune.shortlist import share, shortlist
from tvmx.tune.space import Candidate
from tvmx.tune.task import Task, merge_tasks
from tvmx.tune.workload import encode

REFERENCE_WORK = 1 << 31  # iterations up to which a plain CPU kernel says what is right: seconds
WARMUP_S = 0.03
CARRIED = (
    "errors.py",
    "cuda/driver.py",
    "tune/worker.py",
    "tune/runner.py",
    "tune/run_arrays.py",
    "tune/run_cpu.py",
    "tune/run_cuda.py",
    "tune/judge.py",
    "tune/offline_run.py",
    "tune/rpc_server.py",
)
_RUN = '''"""Measures this bundle's candidates; see --help."""
import sys
from pathlib import Path

here = Path(__file__).resolve().parent
sys.path.insert(0, str(here / "lib"))
from tvmx.tune.offline_run import main

sys.exit(main(here))
'''


@dataclass(frozen=True)
class BundleReport:
    """What a bundle holds."""

    path: Path
    target: str
    tasks: int
    candidates: int
    failed: dict[str, int]  # status → builds that are not in it
    bytes: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "path": str(self.path)}

    def __str__(self) -> str:
        failed = ", ".join(f"{n} {status}" for status, n in sorted(self.failed.items())) or "none"
        return (
            f"{self.path}: {self.candidates} candidates of {self.tasks} kernels for {self.target}, "
            f"{self.bytes / 1e6:.1f} MB in {self.seconds:.0f} s; not built: {failed}\n"
            f"on the machine with the device: {'tar -xf ' + self.path.name + '; ' if self.path.is_file() else ''}"
            f"python {self.path.stem if self.path.is_file() else self.path.name}/run.py\n"
            "then here: tvmx log import results.jsonl LOG_FOLDER"
        )


def write_bundle(
    tasks: Sequence[Task],
    target: Target,
    path: str | Path,
    max_trials: int = 256,
    time_budget_s: float = 1200.0,
    seed: int = 0,
    measure: MeasureConfig | None = None,
    progress: Callable[[str], None] | None = None,
) -> BundleReport:
    """Build up to `max_trials` candidates of `tasks` into `path`: a folder, or a tar where it ends in .tar or .tar.gz.

    No device is needed. Ends early, with what is built, when `time_budget_s` is over or Ctrl-C is pressed.
    Raises TuneError where there is nothing to build, or `path` exists or cannot be written.
    """
    begin = time.monotonic()
    path = Path(path)
    if path.exists():
        raise TuneError(f"{path} exists; name a new file or folder for the bundle")
    if not tasks:
        raise TuneError("there is no kernel to tune: only kernels of static shape can be")
    tasks = merge_tasks(tasks)
    config = measure or MeasureConfig(build_timeout_s=120.0)
    is_tar = path.name.endswith((".tar", ".tar.gz"))
    name = path.name.removesuffix(".gz").removesuffix(".tar") if is_tar else path.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=path.parent))
    except OSError as error:
        raise TuneError(f"cannot write {path}: {error}; give a folder you may write") from None
    try:
        folder = work / name
        with Interrupt() as interrupt, Measurer(target, config, device=None) as measurer:
            writer = _Writer(folder, target, measurer, config, random.Random(seed), progress or (lambda _: None))
            writer.stop = lambda: interrupt.count > 0 or time.monotonic() - begin > time_budget_s
            writer.write(tasks, max_trials, seed)
        finished = _tar(folder, work / "bundle.tar", path.name.endswith(".gz")) if is_tar else folder
        os.replace(finished, path)
    except OSError as error:
        raise TuneError(f"cannot write {path}: {error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    size = path.stat().st_size if is_tar else sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    return BundleReport(
        path, target.name, writer.tasks, writer.count, writer.failed, size, time.monotonic() - begin
    )  # fmt: skip


class _Writer:
    def __init__(
        self, folder: Path, target: Target, measurer: Measurer, config: MeasureConfig, rng: random.Random,
        progress: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.folder, self.target, self.measurer, self.config = folder, target, measurer, config
        self.rng, self.progress = rng, progress
        self.stop: Callable[[], bool] = lambda: False
        self.tasks = self.count = 0
        self.failed: dict[str, int] = {}
        for part in ("candidates", "references"):
            (folder / part).mkdir(parents=True)

    def write(self, tasks: Sequence[Task], max_trials: int, seed: int) -> None:
        seconds = [self._default_seconds(t) for t in tasks]
        entries = []
        for task, count in zip(tasks, share(list(tasks), seconds, max_trials)):
            if self.stop() or count == 0:
                break
            entry = self._task(task, count)
            if entry is not None:
                entries.append(entry)
        if not entries:
            raise TuneError(f"no candidate could be built ({self.failed or 'no time'}); see `tvmx tune -v`")
        self.tasks = len(entries)
        self._carry()
        self._manifest(entries, seed)

    def _default_seconds(self, task: Task) -> float:
        """A guess of the default's time, by which candidates are shared out."""
        if self.target.gpu is None:
            return task.work * 1e-9
        shorter = shortlist(task, self.target, 1, self.rng)
        return Predictor(task, self.target)(shorter[0]) if shorter else 0.0

    def _task(self, task: Task, count: int) -> dict[str, Any] | None:
        from tvmx.tune.apply import schedule_hash

        begin = time.monotonic()
        chosen = shortlist(task, self.target, count, self.rng, self.stop)
        if not chosen:
            return None
        default_hash = schedule_hash(chosen[0].func)
        builds = self.measurer.build([c.func for c in chosen], self.stop)
        for build in builds:
            if build.path is None:
                self.failed[build.status] = self.failed.get(build.status, 0) + 1
        if builds[0].path is None:
            self.progress(f"{task.name}: its default is not built ({builds[0].status} {builds[0].error}); left out")
            return None
        candidates = [
            self._candidate(task, candidate, build, i) for i, (candidate, build) in enumerate(zip(chosen, builds))
            if build.path is not None
        ]  # fmt: skip
        rest = sorted(candidates[1:], key=lambda c: c["predicted_s"] or 0.0)
        for candidate in chosen:
            candidate.release()
        self.count += len(candidates)
        self.progress(f"{task.name}: {len(candidates)} candidates in {time.monotonic() - begin:.0f} s")
        args, outputs = signature(task.func)
        return {
            "workload": task.workload,
            "name": task.name,
            "occurrences": task.occurrences,
            "args": args,
            "outputs": outputs,
            "default_hash": default_hash,
            "func": encode(task.func),
            "reference": self._reference(task, candidates[0]),
            "candidates": [candidates[0], *rest],
        }

    def _candidate(self, task: Task, candidate: Candidate, build: Built, number: int) -> dict[str, Any]:
        assert build.path is not None
        file = f"candidates/{task.workload}-{number:04}.so"
        shutil.move(build.path, self.folder / file)
        predicted = Predictor(task, self.target)(candidate, build.facts) if self.target.gpu is not None else None
        return {
            "id": f"{number:04}",
            "file": file,
            "sha256": _sum(self.folder / file),
            "rule": candidate.space,
            "trace": candidate.trace,
            "decisions": list(candidate.decisions),
            "default": number == 0,
            "predicted_s": predicted,
            "facts": build.facts,
        }

    def _reference(self, task: Task, default: dict[str, Any]) -> dict[str, Any]:
        """The kernel for the CPU, unscheduled; the default itself where that would take too long."""
        same = {"file": default["file"], "sha256": default["sha256"], "device": "same"}
        if self.target.gpu is None or task.work > REFERENCE_WORK or platform.machine() != "x86_64":
            return same
        file = self.folder / "references" / f"{task.workload}.so"
        error = self.measurer.build_plain(task.func, PRESETS["x86_64-avx2"], file)
        if error:
            self.progress(f"{task.name}: no reference for the CPU ({error}); its default serves as one")
            return same
        return {"file": f"references/{file.name}", "sha256": _sum(file), "device": "cpu"}

    def _carry(self) -> None:
        """The runner's modules under their own names, in packages without TVM."""
        import tvmx

        root, into = Path(str(tvmx.__file__)).parent, self.folder / "lib" / "tvmx"
        for name in CARRIED:
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, into / name)
        for package in ("", "cuda", "tune"):
            (into / package / "__init__.py").write_text('"""The part of tvmx that measures a bundle."""\n')
        (self.folder / "run.py").write_text(_RUN)

    def _manifest(self, entries: list[dict[str, Any]], seed: int) -> None:
        tvmx_version, tvm_version = versions()
        gpu = self.target.gpu
        config = self.config
        manifest = {
            "format": FORMAT,
            "record_format": RECORD_FORMAT,
            "tvmx": tvmx_version,
            "tvm": tvm_version,
            "target": target_to_json(self.target),
            "sm": gpu.sm if gpu is not None else 0,
            "machine": platform.machine(),
            "measure": {
                "threads": self.target.threads,
                "repeat": config.repeat,
                "min_repeat_s": config.min_repeat_ms * 1e-3,
                "run_timeout_s": config.run_timeout_s,
                "rounds": config.compare_rounds,
                "give_up": config.give_up,
                "cache": config.cache,
                "rotate_bytes": rotate_bytes(self.target),
                "warmup_s": WARMUP_S if gpu is not None else 0.0,
                "min_gain": SearchConfig().min_gain,
                "seed": seed,
            },
            "tasks": entries,
        }
        body = json.dumps(manifest, separators=(",", ":"))
        manifest["id"] = hashlib.sha256(body.encode()).hexdigest()[:16]
        data = json.dumps(manifest, separators=(",", ":")).encode()
        (self.folder / MANIFEST).write_bytes(data)
        (self.folder / SUM).write_text(hashlib.sha256(data).hexdigest() + "\n")


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _tar(folder: Path, output: Path, compress: bool) -> Path:
    with tarfile.open(output, "w:gz" if compress else "w") as tar:
        tar.add(folder, arcname=folder.name)
    return output
