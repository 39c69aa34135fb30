"""A tuning session: measure the defaults, spend the budget where it pays, confirm winners, log everything at once."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tvmx.errors import ConfigError, TuneError, TvmxError
from tvmx.target import Target, cpu_features, detect_host
from tvmx.tune.interrupt import Interrupt
from tvmx.tune.judge import contest, digits, speedup
from tvmx.tune.log import TuningLog
from tvmx.tune.lookup import open_logs
from tvmx.tune.measure import Built, MeasureConfig, Measurer
from tvmx.tune.model import CostModel
from tvmx.tune.predict_session import predict_tasks
from tvmx.tune.progress import Display, Progress, TaskProgress
from tvmx.tune.record import CONFIRMED, REJECTED, Trial, Verdict, hardware_fingerprint, target_to_json
from tvmx.tune.report import TuneReport
from tvmx.tune.search import SearchConfig, TaskSearch
from tvmx.tune.space import Candidate, last_line
from tvmx.tune.task import Task, merge_tasks

log = logging.getLogger(__name__)

DEFAULTS = 8  # trials 0 that are built at a time


def tune(
    tasks: Sequence[Task],
    target: Target,
    log: str | Path,
    max_trials: int = 1000,
    time_budget_s: float = 600.0,
    on_progress: Callable[[Progress], None] | None = None,
    seed: int = 0,
    search: SearchConfig | None = None,
    measure: MeasureConfig | None = None,
    runner: Any = None,
) -> TuneReport:
    """Search faster schedules for `tasks` and append what is measured to the log at `log`, made if absent.

    Ends after `max_trials` trials of this session, `time_budget_s` seconds, or when nothing is left to try.
    Trials that the log already holds are not repeated. Ctrl-C ends the session after the kernel being measured;
    everything found until then is in the log. `on_progress` replaces the display on stderr.
    A target of kind "cuda" is measured on this machine's first GPU, or through `runner` (`tvmx.tune.rpc`) elsewhere;
    where there is no GPU, candidates are built and ranked by a model, and logged as predictions.
    Raises ConfigError for a target that is not this machine, TuneError for an unusable log or compiler and where
    there is nothing to tune.
    """
    if target.kind == "cpu" and runner is None:
        check_host(target)
    if not tasks:
        raise TuneError(
            "there is no kernel to tune: only kernels of static shape can be; give the inputs' sizes as numbers, "
            "such as --shape x=1,3,224,224"
        )
    if max_trials < 1 or time_budget_s <= 0:
        raise ConfigError("max_trials must be at least 1 and time_budget_s positive")
    begin = time.monotonic()
    tasks = merge_tasks(tasks)
    tuning_log = TuningLog(log)
    tuning_log.check_writable()
    device = "cuda:0" if target.kind == "cuda" else "cpu"
    if measure is None:
        measure = MeasureConfig(build_timeout_s=120.0) if target.kind == "cuda" else MeasureConfig()
    with Interrupt() as interrupt, _display(on_progress) as show, Measurer(target, measure, device, runner) as measurer:
        hardware = hardware_fingerprint()
        if target.kind == "cuda" or runner is not None:
            try:
                hardware = device_of(measurer, target)
            except NoDevice as reason:
                if runner is not None:
                    raise TuneError(f"the measuring server has no device: {reason}") from None
                return predict_tasks(
                    tasks, target, tuning_log, measurer, max_trials, time_budget_s, seed,
                    lambda: interrupt.count > 0, show, str(reason),
                )  # fmt: skip
        session = _Session(tuning_log, target, measurer, search or SearchConfig(), seed, interrupt, show)
        session.max_trials, session.time_budget_s, session.begin = max_trials, time_budget_s, begin
        session.hardware = hardware
        return session.run(tasks)


def check_host(target: Target) -> None:
    """Raise ConfigError unless this machine can run the target's code."""
    host = detect_host()
    if target.kind != "cpu" or target.arch != host.arch:
        raise ConfigError(f"target {target.name!r} cannot be measured on {host.arch}; tune elsewhere")
    missing = sorted(target.features - cpu_features())
    if missing:
        raise ConfigError(f"target {target.name!r} needs {', '.join(missing)}, which this CPU lacks; tune elsewhere")
    cores = len(os.sched_getaffinity(0))
    if target.threads > cores:
        raise ConfigError(f"threads={target.threads}, but this process may use {cores} cores; use at most that many")


class NoDevice(Exception):
    """No CUDA device is there to measure on."""


def device_of(measurer: Measurer, target: Target) -> str:
    """The device's name for the log. Raises NoDevice, and ConfigError for one that cannot run the target's code."""
    try:
        facts = measurer.facts()
    except TuneError as error:
        raise NoDevice(str(error)) from None
    if target.gpu is not None and facts["kind"] != "cuda":
        raise ConfigError(f"target {target.name!r} needs a GPU; the measuring device is {facts['name']}")
    if target.gpu is not None and (facts["sm"] // 10 != target.gpu.sm // 10 or facts["sm"] < target.gpu.sm):
        raise ConfigError(f"target {target.name!r} is sm_{target.gpu.sm}, this device is {facts['name']}")
    return str(facts["name"])


class _Session:
    def __init__(
        self,
        tuning_log: TuningLog,
        target: Target,
        measurer: Measurer,
        config: SearchConfig,
        seed: int,
        interrupt: Interrupt,
        show: Callable[[Progress], None],
    ) -> None:
        self.log = tuning_log
        self.others = open_logs(None, target=target).shipped  # those that ship with tvmx
        self.target = target
        self.measurer = measurer
        self.config = config
        self.rng = random.Random(seed)
        self.interrupt = interrupt
        self.show = show
        self.max_trials, self.time_budget_s = 0, 0.0
        self.hardware = hardware_fingerprint()
        self.begin = time.monotonic()
        self.new_trials = 0
        self.failed: dict[str, int] = {}
        self.failed_of: dict[str, int] = {}
        self.searches: list[TaskSearch] = []
        self.active: TaskSearch | None = None
        self.stage = "starting"
        self.spent = {"search": 0.0, "build": 0.0, "run": 0.0}
        self.pace_s = 0.0  # of a trial, in the rounds so far

    def run(self, tasks: Sequence[Task]) -> TuneReport:
        self.searches = [TaskSearch(t, self.target, self.config, self.rng) for t in tasks]
        self.model = CostModel(self.target)
        self.stage = "measuring the defaults"
        for start in range(0, len(self.searches), DEFAULTS):
            if self.over():
                break
            self.measure_defaults(self.searches[start : start + DEFAULTS])
        self.stage = "searching"
        while self.searches and not self.over():
            peak = max((s.rate for s in self.searches), default=0.0)
            gains = [(s.expected_gain(peak), s) for s in self.searches]
            gain, best = max(gains, key=lambda pair: pair[0])
            if gain <= 0.0:
                break
            self.round(best)
        self.active, self.stage = None, "done"
        progress = self.progress()
        self.show(progress)
        return TuneReport(
            log=str(self.log.folder),
            progress=progress,
            new_trials=self.new_trials,
            failed=self.failed,
            confirmed=sum(s.winner is not None for s in self.searches),
            interrupted=self.interrupt.count > 0,
            seconds=time.monotonic() - self.begin,
            spent=self.spent,
        )

    @contextlib.contextmanager
    def clock(self, activity: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.spent[activity] += time.monotonic() - begin

    @contextlib.contextmanager
    def guard(self, search: TaskSearch) -> Iterator[None]:
        """A kernel whose space or search breaks is left as it is; the session goes on with the others."""
        try:
            yield
        except TvmxError:
            raise  # the user's business: a full disk, a missing compiler
        except Exception as error:
            log.warning("%s: not tuned further: %s", search.task.name, last_line(error))
            search.exhausted = True

    @property
    def left_s(self) -> float:
        return self.time_budget_s - (time.monotonic() - self.begin)

    def stop(self) -> bool:
        return self.interrupt.count > 0 or self.left_s <= 0

    def over(self) -> bool:
        """Whether to begin nothing more. A round takes some seconds: it must fit into what is left."""
        return self.stop() or self.new_trials >= self.max_trials or self.left_s < self.pace_s

    def limit(self) -> int:
        """How many candidates there are trials and time left for."""
        in_time = int(self.left_s / self.pace_s) if self.pace_s else self.config.batch
        return max(1, min(self.max_trials - self.new_trials, in_time))

    def measure_defaults(self, searches: Sequence[TaskSearch]) -> None:
        """Trial 0 of some tasks. A task whose default fails is not searched: there is nothing to compare with."""
        ready = []
        with self.clock("search"):
            for search in searches:
                self.active = search
                self.log.add_workload(search.task.func, search.task.name)
                with self.guard(search):
                    search.prepare(self.log, self.model, self.others)
                if search.default is not None and not search.exhausted:
                    ready.append(search)
        with self.clock("build"):
            builds = self.measurer.build([s.default.func for s in ready if s.default is not None], self.stop)
        for search, build in zip(ready, builds):
            if build.status == "SKIPPED" or self.stop() or self.new_trials >= self.max_trials:
                build.delete()
            else:
                self.measure_default(search, build)

    def measure_default(self, search: TaskSearch, build: Built) -> None:
        assert search.default is not None
        self.active, search.default_build = search, build
        status, samples, error = build.status, [], build.error
        if build.path is not None:
            with self.clock("run"):
                outcome = self.measurer.trial(search.task.func, build, build, float("inf"))
            status, samples, error = outcome.status, list(outcome.samples[0]), outcome.error
        seconds = self.append_trial(search, search.default, status, samples, error, default=True)
        self.model.add(search.task, [search.default], [seconds])
        search.default_s = seconds
        if seconds is None:
            log.warning("%s: its default schedule fails (%s: %s); not tuned", search.task.name, status, error)
            search.exhausted = True
        self.show(self.progress())

    def round(self, search: TaskSearch) -> None:
        """Propose, build and run a batch; let the fastest prove themselves."""
        self.active = search
        begin, before = time.monotonic(), search.best_s
        candidates: list[Candidate] = []
        with self.clock("search"), self.guard(search):
            candidates = search.propose(self.model)[: self.limit()]
        self.show(self.progress())
        with self.clock("build"):
            builds = self.measurer.build([c.func for c in candidates], self.stop)
        measured: list[tuple[Candidate, float | None]] = []
        kept: dict[str, Built] = {}
        for candidate, build in zip(candidates, builds):
            if build.status == "SKIPPED" or self.interrupt.count:  # what is built by the end of the budget still runs
                build.delete()
                continue
            status, samples, error = build.status, [], build.error
            if build.path is not None:
                with self.clock("run"):
                    outcome = self.run_trial(search, build)
                status, samples, error = outcome.status, list(outcome.samples[0]), outcome.error
            seconds = self.append_trial(search, candidate, status, samples, error)
            measured.append((candidate, seconds))
            kept[candidate.key] = build
        with self.clock("search"):
            self.model.add(search.task, [c for c, _ in measured], [s for _, s in measured])
        for challenger in search.challengers():
            if self.interrupt.count == 0:
                with self.clock("run"):
                    self.confirm(search, challenger, kept)
        for build in kept.values():
            if build is not search.winner_build:
                build.delete()
        if measured:
            pace = (time.monotonic() - begin) / len(measured)
            self.pace_s = (self.pace_s + pace) / 2 if self.pace_s else pace
        search.end_round(before)
        self.show(self.progress())

    def run_trial(self, search: TaskSearch, build: Built) -> Any:
        assert search.default_build is not None
        best = search.leader_s or search.default_s or float("inf")
        give_up = best * self.measurer.config.give_up
        return self.measurer.trial(search.task.func, search.default_build, build, give_up)

    def confirm(self, search: TaskSearch, challenger: Candidate, kept: dict[str, Built]) -> None:
        """Measure a challenger again, interleaved with the default and the winner so far, on fresh inputs."""
        best = search.best_s
        measured = search.seconds[challenger.key]
        if best is None or measured is None or measured >= best * (1 - self.config.min_gain):
            return  # the one before it raised the bar
        build = kept.get(challenger.key) or self.measurer.build([challenger.func])[0]
        assert search.default_build is not None
        if build.path is None:
            search.rejected.add(challenger.key)
            return
        rivals = [search.default_build, build]
        if search.winner_build is not None and search.winner_build.path is not None:
            rivals.append(search.winner_build)
        reason, samples = self.contest(search, rivals)
        verdict = Verdict(
            search.task.workload,
            search.task.name,
            target_to_json(self.target),
            challenger.space,
            challenger.trace,
            REJECTED if reason else CONFIRMED,
            hardware=self.hardware,
            default_hash=search.default_hash,
            default_s=digits(samples[0]),
            run_s=digits(samples[1]),
            reason=reason,
        )
        self.log.append([verdict])
        if reason:
            search.rejected.add(challenger.key)
            if challenger.key not in kept:
                build.delete()
            return
        if search.winner_build is not None:
            search.winner_build.delete()
        search.winner, search.winner_build = verdict, build

    def contest(self, search: TaskSearch, rivals: list[Built]) -> tuple[str, list[list[float]]]:
        """Why the second of `rivals` does not beat the default (the first) and the winner so far; all samples."""

        def compare() -> tuple[str, str, Sequence[Sequence[float]]]:
            outcome = self.measurer.compare(search.task.func, rivals, seed=self.rng.randrange(1 << 30))
            return outcome.status, outcome.error, outcome.samples

        return contest(compare, len(rivals), self.config.min_gain)

    def append_trial(
        self,
        search: TaskSearch,
        candidate: Candidate,
        status: str,
        samples: list[float],
        error: str,
        default: bool = False,
    ) -> float | None:
        trial = Trial(
            search.task.workload,
            search.task.name,
            target_to_json(self.target),
            candidate.space,
            candidate.trace,
            status,
            hardware=self.hardware,
            decisions=list(candidate.decisions),
            run_s=digits(samples) if status == "OK" else [],
            error=error,
            default=default,
        )
        self.log.append([trial])
        self.new_trials += 1
        if trial.seconds is None:
            self.failed[status] = self.failed.get(status, 0) + 1
            self.failed_of[search.task.workload] = self.failed_of.get(search.task.workload, 0) + 1
        search.record(candidate, trial.seconds)
        candidate.release()
        return trial.seconds

    def progress(self) -> Progress:
        rows = tuple(
            TaskProgress(
                name=s.task.name,
                rule=f"tuned:{s.winner.rule}" if s.winner else s.spaces[0].name if s.spaces else "",
                occurrences=s.task.occurrences,
                trials=s.trials,
                failed=self.failed_of.get(s.task.workload, 0),
                default_s=s.default_s,
                best_s=s.best_s,
                done=s.finished,
                active=s is self.active,
            )
            for s in self.searches
        )
        spent = time.monotonic() - self.begin
        return Progress(rows, self.new_trials, self.max_trials, spent, self.time_budget_s, self.stage)


class _Callback:
    def __init__(self, function: Callable[[Progress], None]) -> None:
        self.function = function

    def __enter__(self) -> Callable[[Progress], None]:
        return self.function

    def __exit__(self, *_: object) -> None:
        return None


def _display(on_progress: Callable[[Progress], None] | None) -> Any:
    return _Callback(on_progress) if on_progress is not None else Display()


__all__ = ["TuneError", "TuneReport", "check_host", "speedup", "tune"]
