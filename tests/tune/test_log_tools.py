"""`tvmx log`: show, best, merge, prune, and conversion to and from MetaSchedule's database."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tvm

from tests.tune.helpers import matmul
from tests.tune.test_log import AVX512, trial, verdict
from tvmx.errors import TuneError
from tvmx.tune.log import TuningLog
from tvmx.tune.log_tools import MS_RECORDS, prune, run_action
from tvmx.tune.record import REJECTED, Trial, Verdict
from tvmx.tune.trace import trace_json
from tvmx.tune.workload import workload_hash


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    log = TuningLog(tmp_path / "log")
    key = log.add_workload(matmul(), "matmul")
    sch = tvm.s_tir.Schedule(tvm.IRModule({"main": matmul()}))
    i, j, r = sch.get_loops(sch.get_sblock("C"))
    sch.reorder(i, r, j)
    trace = trace_json(sch.trace)
    log.append([trial(key, trace=trace, run_s=[2e-3]), trial(key, trace=trace, run_s=[1e-3, 1.1e-3])])
    log.append([trial(key, status="RUN_CRASH", run_s=[], error="SIGSEGV")])
    log.append([verdict(key, rule="old"), verdict(key, rule="new"), verdict(key, status=REJECTED)])
    log.append([verdict(key, target=AVX512)])
    return tmp_path / "log"


def test_show_and_best(folder: Path) -> None:
    report = run_action("show", [folder])
    assert (report["workloads"], report["records"], report["trial RUN_CRASH"]) == (1, 7, 1)
    assert report["targets"] == {"x86_64-avx2 1t": 6, "x86_64-avx512 1t": 1}
    assert json.dumps(report)
    best = run_action("best", [folder])
    assert len(best) == 2
    assert next(v["rule"] for k, v in best.items() if "avx2" in k) == "new"
    assert next(iter(best.values()))["speedup"] == 2.0


def test_merge_adds_what_is_missing_once(folder: Path, tmp_path: Path) -> None:
    other = TuningLog(tmp_path / "other")
    other.append([trial("x", rule="other")])
    into = tmp_path / "into"
    assert run_action("merge", [folder, tmp_path / "other", into])["added"] == 8
    assert run_action("merge", [folder, into])["added"] == 0
    merged = TuningLog(into)
    assert len(merged.records) == 8
    assert merged.workload(workload_hash(matmul())) is not None


def test_prune_keeps_winners_and_the_fastest(folder: Path) -> None:
    TuningLog(folder).add_workload(matmul(5, 5, 5), "unused")
    assert prune(folder, keep_trials=1)["records"] == 3
    records = TuningLog(folder).records
    assert [r.rule for r in records if isinstance(r, Verdict)] == ["new", "r"]
    assert [r.run_s for r in records if isinstance(r, Trial)] == [[1e-3, 1.1e-3]]
    assert run_action("prune", [folder]) == {"records before": 3, "records": 2, "workloads": 1}


def test_metaschedule_round_trip(folder: Path, tmp_path: Path) -> None:
    report = run_action("export", [folder, tmp_path / "ms"])
    assert report["workloads"] == 1
    assert report["not exported (failed trials)"] == 1
    from tvm.s_tir import meta_schedule as ms

    database = ms.database.JSONDatabase(work_dir=str(tmp_path / "ms"))
    assert len(database) == report["exported"] == 6
    found = database.query_schedule(
        tvm.IRModule({"main": matmul(name="main")}), tvm.target.Target("llvm"), workload_name="matmul"
    )
    assert found is not None
    with open(tmp_path / "ms" / MS_RECORDS, "a") as file:
        file.write("[0, [[[], []], [1.0")  # torn
    back = run_action("import", [tmp_path / "ms", tmp_path / "back"])
    assert (back["imported"], back["workloads"], back["skipped"]) == (6, 1, 1)
    log = TuningLog(tmp_path / "back")
    assert {r.workload for r in log.records} == {workload_hash(matmul())}
    assert [r.trace for r in log.records] == [r.trace for r in TuningLog(folder).records if r.run_s]


def test_wrong_calls(folder: Path, tmp_path: Path) -> None:
    for action, folders, words in (
        ("dance", [folder], "unknown action"),
        ("show", [], "one folder"),
        ("merge", [folder], "destination"),
        ("show", [tmp_path / "none"], "no tuning log"),
        ("import", [folder, tmp_path / "x"], "no MetaSchedule database"),
    ):
        with pytest.raises(TuneError, match=words):
            run_action(action, folders)
