"""Sessions: what is logged, when they end, what a rerun repeats (nothing), and which winners stand."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.tune.helpers import FakeMeasurer, module
from tests.tune.test_worker import gone
from tvmx.errors import ConfigError, TuneError
from tvmx.schedule import apply_default
from tvmx.target import PRESETS, Target
from tvmx.tune import session
from tvmx.tune.apply import apply_schedules, schedule_hash
from tvmx.tune.log import RECORDS, TuningLog
from tvmx.tune.lookup import Logs
from tvmx.tune.measure import Built, Outcome
from tvmx.tune.record import CONFIRMED, REJECTED, Trial, Verdict, target_to_json
from tvmx.tune.search import SearchConfig, TaskSearch
from tvmx.tune.session import TuneReport, check_host, tune
from tvmx.tune.task import extract_tasks
from tvmx.tune.trace import skeleton, trace_json

SMALL = SearchConfig(batch=6, population=8, generations=1, patience=2)


def run(
    folder: Path, target: Target, monkeypatch: pytest.MonkeyPatch, fake: type = FakeMeasurer, trials: int = 25
) -> TuneReport:
    monkeypatch.setattr(session, "Measurer", fake)
    return tune(extract_tasks(module()), target, folder, trials, 60, on_progress=lambda p: None, search=SMALL)


def keys(records: list[Any]) -> list[tuple[str, str, str]]:
    return [
        (r.workload, skeleton(r.trace), json.dumps(r.decisions))
        for r in records
        if isinstance(r, Trial) and not r.default
    ]


def test_finds_confirms_and_applies(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run(tmp_path, target, monkeypatch)
    log = TuningLog(tmp_path)
    assert report.new_trials == sum(isinstance(r, Trial) for r in log.records) <= 25
    assert report.confirmed >= 1
    assert report.progress.speedup > 1
    assert not report.interrupted
    assert json.loads(json.dumps(report.to_json()))["tasks"]
    _, rules = apply_schedules(module(), target, log)
    assert sum(r.startswith("tuned:") for r in rules.values()) == report.confirmed
    assert sum(r.default for r in log.records if isinstance(r, Trial)) == 2  # trial 0 of both tasks


def test_a_rerun_goes_on(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, target, monkeypatch, trials=15)
    first = list(TuningLog(tmp_path).records)
    report = run(tmp_path, target, monkeypatch, trials=15)
    records = TuningLog(tmp_path).records
    assert records[: len(first)] == first
    assert len(set(keys(records))) == len(keys(records))  # nothing measured twice but the defaults
    assert sum(t.trials for t in report.progress.tasks) == sum(isinstance(r, Trial) for r in records)
    assert report.confirmed >= 1


@pytest.mark.parametrize("trials", [1, 5])
def test_budget_of_trials(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch, trials: int) -> None:
    assert run(tmp_path, target, monkeypatch, trials=trials).new_trials == trials


def test_time_budget(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "Measurer", FakeMeasurer)
    report = tune(extract_tasks(module()), target, tmp_path, 10**6, 1e-9, on_progress=lambda p: None)
    assert report.new_trials == 0


class Slow(FakeMeasurer):
    """A build takes a second of `now`, one at a time."""

    now = 0.0

    def build(self, funcs: Any, stop: Any = lambda: False) -> list[Any]:
        out = []
        for func in funcs:
            if stop():
                out.append(Built(None, "SKIPPED"))
            else:
                Slow.now += 1.0
                out += super().build([func])
        return out


@pytest.mark.parametrize("budget", [4.5, 20.5])
def test_the_time_budget_is_kept_within_a_trial(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch, budget: float
) -> None:
    monkeypatch.setattr(session, "Measurer", Slow)
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: Slow.now))
    long = SearchConfig(batch=16, population=20, generations=1, patience=10**6)
    report = tune(extract_tasks(module()), target, tmp_path, 10**6, budget, on_progress=lambda p: None, search=long)
    assert budget - 1 <= report.seconds <= budget + 1
    trials = [r for r in TuningLog(tmp_path).records if isinstance(r, Trial)]
    assert report.new_trials == len(trials) > 2
    assert all(t.status == "OK" for t in trials)  # what was skipped is not a failure


class Failing(FakeMeasurer):
    """Everything but the first default fails to build or to run."""

    def build(self, funcs: Any, stop: Any = None) -> list[Any]:
        builds = super().build(funcs)
        return builds if len(self.built) == len(funcs) else [Built(None, "BUILD_TIMEOUT", "20 s"), *builds[1:]]

    def trial(self, func: Any, reference: Any, built: Any, give_up_s: float, seed: int = 0) -> Any:
        good = super().trial(func, reference, built, give_up_s)
        return good if built is reference else Outcome("WRONG_OUTPUT", ((),), "3 elements differ")


def test_failed_trials_are_recorded_as_what_they_are(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = run(tmp_path, target, monkeypatch, Failing)
    trials = [r for r in TuningLog(tmp_path).records if isinstance(r, Trial) and not r.default]
    assert {t.status for t in trials} == {"BUILD_TIMEOUT", "WRONG_OUTPUT"}
    assert all(t.run_s == [] and t.error for t in trials)
    assert sum(report.failed.values()) >= len(trials)
    assert report.confirmed == 0
    assert "BUILD_TIMEOUT" in str(report)


class NoDefault(FakeMeasurer):
    def build(self, funcs: Any, stop: Any = None) -> list[Any]:
        return [Built(None, "BUILD_ERROR", "no") for _ in funcs]


def test_a_default_that_fails_ends_its_task(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        report = run(tmp_path, target, monkeypatch, NoDefault)
    assert report.new_trials == 2
    assert "its default schedule fails" in caplog.text


class Lying(FakeMeasurer):
    """Trials look fast; interleaved, nothing beats the default."""

    def trial(self, func: Any, reference: Any, built: Any, give_up_s: float, seed: int = 0) -> Any:
        return Outcome("OK", ((2e-3 if built is reference else 1e-3,),))

    def compare(self, func: Any, builds: Any, seed: int) -> Any:
        return Outcome("OK", tuple((t, t) for t in (2e-3, 2.1e-3)))


class Wrong(Lying):
    def compare(self, func: Any, builds: Any, seed: int) -> Any:
        return Outcome("WRONG_OUTPUT", (), "candidate 1: infinities differ")


class Noisy(Lying):
    """4 % faster, on a machine where two halves of the same samples are 8 % apart."""

    def compare(self, func: Any, builds: Any, seed: int) -> Any:
        return Outcome("OK", tuple((t, 1.08 * t) * 12 for t in (2e-3, 2e-3 / 1.04)))


@pytest.mark.parametrize(
    ("fake", "words"), [(Lying, "the speed of the default"), (Wrong, "WRONG_OUTPUT"), (Noisy, "noise")]
)
def test_a_winner_that_is_no_better_or_wrong_is_dropped(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch, fake: type, words: str
) -> None:
    report = run(tmp_path, target, monkeypatch, fake)
    log = TuningLog(tmp_path)
    verdicts = [r for r in log.records if isinstance(r, Verdict)]
    assert verdicts
    assert {v.status for v in verdicts} == {REJECTED}
    assert all(words in v.reason for v in verdicts)
    assert report.confirmed == 0
    assert report.progress.speedup == 1.0
    _, rules = apply_schedules(module(), target, log)
    assert not any(r.startswith("tuned:") for r in rules.values())
    rejected = [(v.workload, json.dumps(v.trace)) for v in verdicts]
    run(tmp_path, target, monkeypatch, fake)
    again = [r for r in TuningLog(tmp_path).records if isinstance(r, Verdict)]
    once = len({(v.workload, json.dumps(v.trace)) for v in again})
    assert len(again) >= len(rejected)
    assert (once < len(again)) == (words == "noise")  # only what noise decided is tried again


def test_a_winner_over_an_older_default_must_prove_itself_again(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, target, monkeypatch)
    log = TuningLog(tmp_path)
    key = next(r.workload for r in log.records if isinstance(r, Verdict) and r.status == CONFIRMED)
    found = log.best(key, target)
    assert found is not None
    stale = dataclasses.replace(found, default_hash="0" * 16)
    other = TuningLog(tmp_path / "other")
    other.append([stale])
    run(tmp_path / "other", target, monkeypatch)
    again = TuningLog(tmp_path / "other").best(key, target)
    assert again is not None
    task = next(t for t in extract_tasks(module()) if t.workload == key)
    assert again.default_hash == schedule_hash(apply_default(task.func, target).func)
    measured = keys(TuningLog(tmp_path / "other").trials(key, target))
    assert (key, skeleton(stale.trace), json.dumps([d for _, d in stale.trace[1]])) in measured


def test_a_trace_that_no_rule_makes_is_measured_too(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from an import, or from a rule that has changed since."""
    import tvm

    task = extract_tasks(module())[0]
    sch = tvm.s_tir.Schedule(tvm.IRModule({"main": task.func}))
    loops = sch.get_loops(sch.get_sblock("C"))
    sch.reorder(loops[2], loops[0], loops[1])
    foreign = Trial(
        task.workload, "x", target_to_json(target), "metaschedule", trace_json(sch.trace), "OK", run_s=[1e-9]
    )
    TuningLog(tmp_path).append([foreign])
    run(tmp_path, target, monkeypatch)
    again = [t for t in TuningLog(tmp_path).trials(task.workload, target) if t.trace == foreign.trace]
    assert len(again) == 2
    assert again[1].run_s[0] >= 1e-3


@pytest.mark.parametrize("where", ["prepare", "propose"])
def test_a_kernel_whose_search_breaks_does_not_end_the_session(
    tmp_path: Path,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    whole = getattr(TaskSearch, where)

    def broken(self: TaskSearch, *args: Any) -> Any:
        if self.task.name == "matmul":
            raise IndexError("out of ideas")
        return whole(self, *args)

    monkeypatch.setattr(TaskSearch, where, broken)
    report = run(tmp_path, target, monkeypatch)
    assert "matmul: not tuned further: IndexError: out of ideas" in caplog.text
    assert next(t for t in report.progress.tasks if t.name == "add_one").trials > 1


def test_nothing_to_tune(tmp_path: Path, target: Target) -> None:
    with pytest.raises(TuneError, match="only kernels of static shape"):
        tune([], target, tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_targets_of_other_machines_are_refused(target: Target) -> None:
    with pytest.raises(ConfigError, match="cannot be measured"):
        check_host(PRESETS["aarch64-neon" if target.arch == "x86_64" else "x86_64-sse"])
    with pytest.raises(ConfigError, match="lacks"):
        check_host(dataclasses.replace(target, features=target.features | {"quantum"}))
    with pytest.raises(ConfigError, match="threads"):
        check_host(dataclasses.replace(target, threads=4096))


SESSION = """
import sys
sys.path[:0] = {path!r}
from tests.tune.helpers import module
from tvmx.target import resolve
from tvmx.tune import MeasureConfig, SearchConfig, extract_tasks, tune
report = tune(
    extract_tasks(module()), resolve("native", threads=1), {folder!r}, {trials}, 120.0,
    search=SearchConfig(batch=4, population=8, generations=1, patience=10**6),
    measure=MeasureConfig(repeat=2, min_repeat_ms=0.1, compare_rounds=3, builders=1),
)
print(report.interrupted, report.new_trials, flush=True)
"""


def start(folder: Path, trials: int = 10**6) -> subprocess.Popen[str]:
    path = [*sys.path, str(Path(__file__).parents[2])]
    code = SESSION.format(path=path, folder=str(folder), trials=trials)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    for _ in range(1200):
        if (folder / RECORDS).exists() and (folder / RECORDS).read_bytes().count(b"\n") >= 5:
            return process
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    raise AssertionError("no trial in a minute")


def test_ctrl_c_ends_cleanly_and_kill_9_loses_nothing(tmp_path: Path, target: Target) -> None:
    process = start(tmp_path)
    workers = [p.pid for p in psutil.Process(process.pid).children()]
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.split()[0] == "True"
    log = TuningLog(tmp_path)
    assert log.damage == []
    count = len(log.records)
    assert int(out.split()[1]) == sum(isinstance(r, Trial) for r in log.records)
    assert len(workers) == 2
    assert all(map(gone, workers))

    process = start(tmp_path)
    while len(TuningLog(tmp_path).records) < count + 5:
        assert process.poll() is None
        time.sleep(0.05)
    workers = [p.pid for p in psutil.Process(process.pid).children()]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    after = TuningLog(tmp_path)
    assert len(after.records) >= count + 5
    assert len(after.damage) <= 1
    assert len(set(keys(after.records))) == len(keys(after.records))
    assert all(map(gone, workers))


def test_winners_of_other_thread_counts_and_logs_are_tried_first(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "one", target, monkeypatch)
    winners = [r for r in TuningLog(tmp_path / "one").records if isinstance(r, Verdict) and r.status == CONFIRMED]
    key = winners[-1].workload
    winner = TuningLog(tmp_path / "one").best(key, target)
    assert winner is not None
    task = [t for t in extract_tasks(module()) if t.workload == key]
    wanted = (key, skeleton(winner.trace), json.dumps([d for _, d in winner.trace[1]]))

    def first(folder: Path) -> tuple[str, str, str]:
        tune(task, target, folder, 4, 60, on_progress=lambda p: None, search=SMALL)
        return keys(list(TuningLog(folder).records))[0]

    assert first(tmp_path / "alone") != wanted
    other = {**winner.target, "threads": target.threads + 1}
    TuningLog(tmp_path / "two").append([dataclasses.replace(winner, target=other)])
    assert first(tmp_path / "two") == wanted
    shipped = Logs((), (TuningLog(tmp_path / "one", readonly=True),))
    monkeypatch.setattr(session, "open_logs", lambda *_, **__: shipped)
    assert first(tmp_path / "three") == wanted


def test_winners_over_an_older_default_are_challenged_before_anything_is_searched(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their trials are in the log: what they cost is a comparison each."""
    run(tmp_path / "old", target, monkeypatch)
    old = TuningLog(tmp_path / "old")
    won = {r.workload: r for r in old.records if isinstance(r, Verdict) and r.status == CONFIRMED}
    TuningLog(tmp_path / "new").append(
        [dataclasses.replace(r, default_hash="0" * 16) if isinstance(r, Verdict) else r for r in old.records]
    )
    report = run(tmp_path / "new", target, monkeypatch, trials=3)  # the defaults, and one more to come that far
    new = TuningLog(tmp_path / "new").records[len(old.records) :]
    again = [r for r in new if isinstance(r, Verdict) and r.status == CONFIRMED]
    assert {r.workload for r in again} == won.keys()
    assert all(json.dumps(r.trace) == json.dumps(won[r.workload].trace) for r in again)
    assert report.confirmed == len(won)


def test_trials_of_other_targets_do_not_count(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, target, monkeypatch, trials=8)
    key = TuningLog(tmp_path).records[0].workload
    other = dataclasses.replace(target, threads=target.threads + 1)
    assert TuningLog(tmp_path).trials(key, other) == []
    assert target_to_json(target) != target_to_json(other)
