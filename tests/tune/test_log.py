"""The tuning log: torn lines, kill -9, concurrent writers, look-up by workload and target."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tune.helpers import matmul
from tvmx.errors import TuneError
from tvmx.target import PRESETS, Target
from tvmx.tune.log import RECORDS, WORKLOADS, TuningLog
from tvmx.tune.lookup import Logs, open_logs
from tvmx.tune.record import (
    CONFIRMED,
    REJECTED,
    Trial,
    Verdict,
    from_json,
    robust_seconds,
    target_class,
    target_from_json,
    target_to_json,
    to_json,
)
from tvmx.tune.workload import workload_hash

AVX2 = PRESETS["x86_64-avx2"]
AVX512 = PRESETS["x86_64-avx512"]


def trial(workload: str = "w", target: Target = AVX2, **more: Any) -> Trial:
    given = {"rule": "r", "trace": [[], []], "status": "OK", "run_s": [1e-3], **more}
    return Trial(workload, "task", target_to_json(target), **given)


def verdict(workload: str = "w", target: Target = AVX2, status: str = CONFIRMED, rule: str = "r") -> Verdict:
    return Verdict(workload, "task", target_to_json(target), rule, [[], []], status, default_s=[2e-3], run_s=[1e-3])


def test_round_trip(tmp_path: Path) -> None:
    log = TuningLog(tmp_path / "log")
    key = log.add_workload(matmul(), "matmul")
    written = [trial(key), trial(key, status="BUILD_TIMEOUT", run_s=[], error="30 s"), verdict(key)]
    log.append(written)
    again = TuningLog(tmp_path / "log")
    assert again.records == written
    assert again.damage == []
    assert again.workloads == {key: "matmul"}
    assert workload_hash(again.workload(key)) == key


def test_best_is_the_newest_confirmed_for_workload_and_target(tmp_path: Path) -> None:
    log = TuningLog(tmp_path)
    log.append([trial(), verdict(rule="old"), verdict(rule="new"), verdict(status=REJECTED, rule="slow")])
    log.append([verdict(target=AVX512, rule="wide")])
    found = log.best("w", AVX2)
    assert found is not None
    assert found.rule == "new"
    assert found.speedup == pytest.approx(2.0)
    assert log.best("w", dataclasses.replace(AVX2, threads=2)) is None
    assert log.best("other", AVX2) is None
    wide = log.best("w", AVX512)
    assert wide is not None
    assert wide.rule == "wide"
    assert [type(r) for r in log.trials("w", AVX2)] == [Trial]


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_torn_last_line_is_skipped_reported_and_kept_apart(tmp_path: Path, cut: int) -> None:
    log = TuningLog(tmp_path)
    log.append([trial(), trial(rule="torn")])
    path = tmp_path / RECORDS
    path.write_bytes(path.read_bytes()[:-cut])
    torn = TuningLog(tmp_path)
    survivors = len(torn.records)
    assert survivors >= 1
    assert len(torn.damage) == 2 - survivors
    torn.append([trial(rule="after")])
    assert [r.rule for r in TuningLog(tmp_path).records][-1] == "after"
    assert len(TuningLog(tmp_path).records) == survivors + 1


def test_damage_in_the_middle_loses_its_line_only(tmp_path: Path) -> None:
    TuningLog(tmp_path).append([trial(rule=str(i)) for i in range(6)])
    path = tmp_path / RECORDS
    lines = path.read_bytes().splitlines()
    future = json.loads(lines[3]) | {"format": 99}
    lines[1:5] = [b"\x00\xff garbage", b"[1, 2]", json.dumps(future).encode(), b'{"kind": "trial", "format": 1}']
    path.write_bytes(b"\n".join(lines) + b"\n" + b"[" * 100_000 + b"\n")
    log = TuningLog(tmp_path)
    assert [r.rule for r in log.records] == ["0", "5"]
    assert [d.line for d in log.damage] == [2, 3, 4, 5, 7]


@pytest.mark.parametrize(
    "change",
    [
        {"status": "GREAT"},
        {"run_s": []},
        {"run_s": [-1.0]},
        {"run_s": [float("nan")]},
        {"run_s": "fast"},
        {"target": []},
        {"workload": 3},
        {"kind": "x"},
    ],
)
def test_wrong_fields_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        from_json({**to_json(trial()), **change})


def test_damaged_workload_is_not_used(tmp_path: Path) -> None:
    log = TuningLog(tmp_path)
    key = log.add_workload(matmul(), "matmul")
    path = tmp_path / WORKLOADS
    path.write_text(path.read_text().replace(key, "0" * 16))
    assert TuningLog(tmp_path).workload("0" * 16) is None


WRITER = """
import sys
sys.path[:0] = {path!r}
from tests.tune.test_log import trial
from tvmx.tune.log import TuningLog
log = TuningLog({folder!r})
print("ready", flush=True)
n = 0
while n < {count}:
    log.append([trial(rule={name!r} + str(n)), trial(rule="x" * 3000)])
    n += 1
"""


def writer(folder: Path, name: str, count: int) -> subprocess.Popen[bytes]:
    path = [*sys.path, str(Path(__file__).parents[2])]
    code = WRITER.format(path=path, folder=str(folder), name=name, count=count)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    writers = [writer(tmp_path, name, 150) for name in ("a", "b")]
    assert [w.wait(30) for w in writers] == [0, 0]
    log = TuningLog(tmp_path)
    assert log.damage == []
    for name in ("a", "b"):
        assert [r.rule for r in log.records if r.rule[0] == name] == [f"{name}{i}" for i in range(150)]


def test_kill_9_leaves_a_readable_log(tmp_path: Path) -> None:
    process = writer(tmp_path, "k", 10**9)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    before = TuningLog(tmp_path)
    assert len(before.records) > 2
    assert len(before.damage) <= 1
    before.append([trial(rule="after")])
    assert TuningLog(tmp_path).records[-1].rule == "after"


def test_rewrite_keeps_what_another_writer_added(tmp_path: Path) -> None:
    log = TuningLog(tmp_path)
    log.append([trial(rule="mine")])
    TuningLog(tmp_path).append([trial(rule="theirs")])
    log.rewrite(lambda records: [r for r in records if r.rule == "theirs"])
    assert [r.rule for r in log.records] == ["theirs"]
    assert [r.rule for r in TuningLog(tmp_path).records] == ["theirs"]


def test_opening_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TuneError, match="tvmx tune"):
        open_logs(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(TuneError, match="not a folder"):
        TuningLog(tmp_path / "file")
    with pytest.raises(TuneError, match="reading only"):
        TuningLog(tmp_path, readonly=True).append([trial()])


def test_first_log_wins(tmp_path: Path) -> None:
    first, second = TuningLog(tmp_path / "1"), TuningLog(tmp_path / "2")
    second.append([verdict("w", rule="second"), verdict("only", rule="second")])
    first.append([verdict("w", rule="first")])
    logs = Logs((first,), (second,))
    assert [getattr(logs.best(w, AVX2, ""), "rule", None) for w in ("w", "only", "none")] == ["first", "second", None]
    other_caches = dataclasses.replace(AVX2, l2_bytes=2 * AVX2.l2_bytes)
    assert logs.best("w", other_caches, "") is not None  # the user's own log is trusted
    assert logs.best("only", other_caches, "") is None


def test_a_winner_counts_against_the_default_that_it_beat(tmp_path: Path) -> None:
    log = TuningLog(tmp_path)
    beat = [dataclasses.replace(verdict("w", rule=h), default_hash=h) for h in ("a", "b")]
    log.append(beat)
    assert log.best("w", AVX2) == beat[1]
    assert log.best("w", AVX2, "a") == beat[0]
    assert log.best("w", AVX2, "c") is None
    assert [log.outdated(w, AVX2, h) for w, h in (("w", "a"), ("w", "c"), ("none", "c"))] == [False, True, False]
    assert Logs((log,)).outdated("w", AVX2, "c")
    assert not Logs((), (log,)).outdated("w", AVX2, "c")


def test_targets_round_trip_and_class() -> None:
    for name, preset in PRESETS.items():
        assert target_from_json(json.loads(json.dumps(target_to_json(preset)))) == preset
        assert target_class(preset) == name
    with pytest.raises(ValueError, match="not a target"):
        target_from_json({"name": "x", "features": 3})
    with pytest.raises(ValueError, match="not a target"):
        target_from_json({**target_to_json(AVX2), "threads": 0})


def test_robust_seconds_ignores_slow_outliers() -> None:
    assert robust_seconds([5.0, 1.0, 9.0, 1.1, 30.0]) == 1.1
    assert robust_seconds([2.0]) == 2.0


def test_a_file_that_is_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    """Also a log of a later format: nothing is appended to it."""
    for text in ("garbage\n{}\n", '{"kind": "trial", "format": 99}\n'):
        (tmp_path / RECORDS).write_text(text)
        for readonly in (False, True):
            with pytest.raises(TuneError, match="no tuning log that this tvmx can read"):
                TuningLog(tmp_path, readonly=readonly)
        assert (tmp_path / RECORDS).read_text() == text
    (tmp_path / RECORDS).write_text('{"kind": "tri')  # killed in the first line
    TuningLog(tmp_path).append([trial()])
    assert len(TuningLog(tmp_path).records) == 1


def test_many_damaged_lines_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    TuningLog(tmp_path).append([trial()])
    with open(tmp_path / RECORDS, "a") as file:
        file.write("x\n" * 50)
    assert len(TuningLog(tmp_path).damage) == 50
    assert len(caplog.records) == 4
    assert "47 more" in caplog.text


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = TuningLog(tmp_path)
    log.append([trial()])
    before = (tmp_path / RECORDS).read_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 40, hard))  # stops the write in the middle of a line
    try:
        with pytest.raises(TuneError, match="is kept"):
            log.append([trial()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert (tmp_path / RECORDS).read_bytes() == before
    log.append([trial()])
    assert len(TuningLog(tmp_path).records) == 2


def test_a_folder_that_cannot_be_written_is_found_out_early(tmp_path: Path) -> None:
    TuningLog(tmp_path).check_writable()
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").mkdir()  # a folder's mode would not stop root
    with pytest.raises(TuneError, match="you may write"):
        TuningLog(tmp_path).check_writable()


def test_related_winners_are_of_the_same_instructions_and_any_thread_count(tmp_path: Path) -> None:
    log = TuningLog(tmp_path)
    two = dataclasses.replace(AVX2, threads=AVX2.threads + 1)
    log.append([verdict("w", rule="old"), verdict("w", rule="one"), verdict("w", rule="two", target=two)])
    log.append([verdict("w", rule="other", target=AVX512), verdict("v", rule="other kernel"), trial("w")])
    assert sorted(v.rule for v in log.related("w", AVX2)) == ["one", "two"]
