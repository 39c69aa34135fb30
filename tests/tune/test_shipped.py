"""The logs that ship with tvmx: whole, small, applicable; and `compile` reads them by default."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tvmx
from tests.onnx_models import mlp
from tvmx.api import lower
from tvmx.config import CompileConfig
from tvmx.runtime import GraphExecutor
from tvmx.schedule import apply_default
from tvmx.target import Target
from tvmx.tune import lookup
from tvmx.tune.apply import schedule_hash
from tvmx.tune.log import TuningLog
from tvmx.tune.lookup import shipped_folders
from tvmx.tune.record import CONFIRMED, Verdict, target_class, target_from_json, target_to_json
from tvmx.tune.space import spaces_for
from tvmx.tune.task import extract_tasks
from tvmx.tune.trace import replay


@pytest.mark.parametrize("folder", shipped_folders(), ids=lambda f: f.name)
def test_every_shipped_winner_replays(folder: Path) -> None:
    log = TuningLog(folder, readonly=True)
    assert log.records
    assert log.damage == []
    assert {r.workload for r in log.records} == set(log.workloads)
    for record in log.records:
        assert isinstance(record, Verdict)
        assert record.status == CONFIRMED
        assert record.speedup > 1
        assert target_class(target_from_json(record.target)) == folder.name
    for record in log.records[::5]:
        assert schedule_hash(replay(log.workload(record.workload), record.trace)) != record.default_hash
    assert sum(f.stat().st_size for f in folder.glob("*.jsonl")) < 2 << 20


def test_compile_reads_them_by_default(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    proto = mlp(batch=4)
    log = TuningLog(tmp_path / target_class(target))
    for task in extract_tasks(lower(tvmx.import_onnx(proto), target).mod):
        default = schedule_hash(apply_default(task.func, target).func)
        other = next(
            c
            for space in spaces_for(task, target)
            if (c := space.candidate(space.given)) and schedule_hash(c.func) != default
        )
        log.add_workload(task.func, task.name)
        log.append(
            [
                Verdict(
                    task.workload, task.name, target_to_json(target), other.space, other.trace, CONFIRMED,
                    default_hash=default, default_s=[2e-3], run_s=[1e-3],
                )
            ]
        )  # fmt: skip
    monkeypatch.setattr(lookup, "shipped_folders", lambda target: [log.folder])
    built = [
        tvmx.compile(
            proto, tmp_path / f"{shipped}.so", target, config=CompileConfig(use_shipped_logs=shipped, threads=1)
        )
        for shipped in (True, False)
    ]
    assert any(rule.startswith("tuned:") for rule in built[0].report["rules"])
    assert not any(rule.startswith("tuned:") for rule in built[1].report["rules"])
    x = np.random.default_rng(0).standard_normal((4, 16)).astype("float32")
    outputs = []
    for result in built:
        with GraphExecutor(result.path, threads=1) as executor:
            outputs.append(executor({"x.in": x})["y:out"])
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
