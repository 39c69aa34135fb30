"""Offline bundles: written here, measured there, killed, resumed, damaged, imported."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tvm.script import tirx as T

from tests.tune.helpers import module
from tvmx.compat import fast_stack
from tvmx.errors import TuneError
from tvmx.target import Target
from tvmx.tune.log import TuningLog
from tvmx.tune.log_tools import run_action
from tvmx.tune.measure import MeasureConfig, Measurer
from tvmx.tune.offline import write_bundle
from tvmx.tune.offline_run import BROKEN, DAMAGED, DONE, LEFT, NO_DEVICE, RESULTS
from tvmx.tune.record import Trial
from tvmx.tune.task import extract_tasks

with fast_stack():

    @T.prim_func(s_tir=True)
    def dies(A: T.Buffer((64, 64), "float32"), B: T.Buffer((64, 64), "float32"), C: T.Buffer((64, 64), "float32")):
        T.evaluate(T.call_extern("int32", "abort"))
        C[0, 0] = A[0, 0] + B[0, 0]


CONFIG = MeasureConfig(repeat=2, min_repeat_ms=0.2, compare_rounds=2, builders=1, run_timeout_s=10.0)


@pytest.fixture(scope="module")
def written(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "b"
    report = write_bundle(extract_tasks(module()), target, path, max_trials=8, measure=CONFIG)
    assert (report.tasks, report.candidates, report.failed) == (2, 8, {})
    assert "log import" in str(report)
    return path


@pytest.fixture
def bundle(written: Path, tmp_path: Path) -> Path:
    path = tmp_path / "b"
    shutil.copytree(written, path)
    return path


def start(bundle: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-I", str(bundle / "run.py"), *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**clean, **env}, cwd="/"
    )


def run(bundle: Path, *arguments: str, **env: str) -> tuple[int, str]:
    process = start(bundle, *arguments, **env)
    out, err = process.communicate(timeout=120)
    return process.returncode, out + err


def lines(bundle: Path, kind: str) -> list[dict[str, Any]]:
    found = []
    for line in (bundle / RESULTS).read_bytes().split(b"\n"):
        try:
            obj = json.loads(line)
        except ValueError:
            continue
        found += [obj] if obj["kind"] == kind else []
    return found


def sign(bundle: Path, change: Any) -> None:
    """Change the manifest and its checksum."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    change(manifest)
    data = json.dumps(manifest).encode()
    (bundle / "manifest.json").write_bytes(data)
    (bundle / "manifest.sha256").write_text(hashlib.sha256(data).hexdigest())


def test_measured_without_tvm_and_imported(bundle: Path, tmp_path: Path) -> None:
    probe = (
        f"import sys; sys.path.insert(0, {str(bundle / 'lib')!r}); import tvmx.tune.offline_run, tvmx.tune.runner, "
        "tvmx.tune.run_cuda, tvmx.tune.rpc_server; print({'tvm', 'tvm_ffi', 'ml_dtypes', 'onnx'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-I", "-c", probe], text=True).strip() == "set()"
    code, said = run(bundle)
    assert code == DONE, said
    trials = lines(bundle, "trial")
    assert len(trials) == 8
    assert {t["status"] for t in trials} == {"OK"}
    assert sum(t["default"] for t in trials) == 2
    report = run_action("import", [bundle / RESULTS, tmp_path / "log"])
    assert (report["imported"], report["damaged"]) == (8 + len(lines(bundle, "verdict")), 0)
    assert run_action("import", [bundle / RESULTS, tmp_path / "log"])["imported"] == 0
    log = TuningLog(tmp_path / "log", readonly=True)
    assert len([r for r in log.records if isinstance(r, Trial)]) == 8
    assert all(log.workload(r.workload) is not None for r in log.records)


def test_time_is_over_and_goes_on(bundle: Path) -> None:
    assert run(bundle, "--time-budget-s", "0")[0] == LEFT
    assert not lines(bundle, "trial")
    assert run(bundle)[0] == DONE
    assert len(lines(bundle, "trial")) == 8


def test_killed_in_the_middle(bundle: Path) -> None:
    sign(bundle, lambda m: m["measure"].update(repeat=400, min_repeat_s=2e-3))
    process = start(bundle)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not ((bundle / RESULTS).exists() and lines(bundle, "trial")):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = lines(bundle, "trial")
    assert 0 < len(done) < 8
    with (bundle / RESULTS).open("ab") as file:
        file.write(b'{"kind":"trial","work')  # what a kill leaves of a line
    sign(bundle, lambda m: m["measure"].update(repeat=2, min_repeat_s=2e-4))
    code, said = run(bundle)
    assert code == DONE, said
    after = lines(bundle, "trial")
    assert len(after) == 8
    assert [t["time"] for t in after[: len(done)]] == [t["time"] for t in done]
    assert len({(t["workload"], t["candidate"]) for t in after}) == 8


def test_a_crash_and_a_wrong_output_are_one_candidates_fate(bundle: Path, target: Target) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    victim = next(t for t in manifest["tasks"] if t["name"] == "matmul")
    other = next(t for t in manifest["tasks"] if t["name"] == "add_one")
    with Measurer(target, CONFIG, device=None) as measurer:
        crash = measurer.build([dies])[0].path
        assert crash is not None
        shutil.copy(crash, bundle / victim["candidates"][1]["file"])
    shutil.copy(bundle / other["candidates"][0]["file"], bundle / victim["candidates"][2]["file"])

    def renew(m: dict[str, Any]) -> None:
        for task in m["tasks"]:
            for c in task["candidates"]:
                c["sha256"] = hashlib.sha256((bundle / c["file"]).read_bytes()).hexdigest()

    sign(bundle, renew)
    code, said = run(bundle)
    assert code == DONE, said
    statuses = {t["candidate"]: t["status"] for t in lines(bundle, "trial") if t["task"] == "matmul"}
    broken = [victim["candidates"][1]["id"], victim["candidates"][2]["id"]]
    assert statuses.pop(broken[0]) == "RUN_CRASH"
    assert statuses.pop(broken[1]) in ("RUN_ERROR", "RUN_CRASH", "WRONG_OUTPUT")
    assert set(statuses.values()) == {"OK"}


def test_damage(bundle: Path, tmp_path: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    victim = bundle / manifest["tasks"][0]["candidates"][1]["file"]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    assert run(bundle, "--check")[0] == DAMAGED
    code, said = run(bundle)
    assert code == DAMAGED
    assert f"{victim.name} is damaged" in said
    assert len(lines(bundle, "trial")) == 7  # the others are measured
    text = (bundle / "manifest.json").read_text()
    (bundle / "manifest.json").write_text(
        text.replace('"repeat": 2', '"repeat": 3').replace('"repeat":2', '"repeat":3')
    )
    code, said = run(bundle)
    assert code == BROKEN
    assert "damaged" in said
    (bundle / "manifest.json").unlink()
    assert run(bundle)[0] == BROKEN


def test_results_of_something_else_are_left_alone(bundle: Path, tmp_path: Path) -> None:
    assert run(bundle)[0] == DONE
    before = (bundle / RESULTS).read_bytes()
    code, said = run(bundle, "--cache", "cold")
    assert code == BROKEN
    assert "--out" in said
    assert (bundle / RESULTS).read_bytes() == before
    with pytest.raises(TuneError, match="no results"):
        run_action("import", [bundle / "run.py", tmp_path / "log"])
    with pytest.raises(TuneError, match=r"there is no"):
        run_action("import", [tmp_path / "nothing", tmp_path / "log"])
    kept = [l for l in before.splitlines() if b'"kind":"workload"' not in l]
    (tmp_path / "half.jsonl").write_bytes(b"\n".join(kept))
    with pytest.raises(TuneError, match="lacks the kernel"):
        run_action("import", [tmp_path / "half.jsonl", tmp_path / "log"])


def test_the_wrong_device(bundle: Path) -> None:
    code, said = run(bundle, "--device", "cuda:0", TVMX_CUDA_DRIVER="/nowhere/libcuda.so")
    assert code == NO_DEVICE
    assert "no CUDA driver" in said
    assert run(bundle, "--device", "tpu")[0] == NO_DEVICE


def test_an_existing_path_is_kept(written: Path, target: Target) -> None:
    with pytest.raises(TuneError, match="exists"):
        write_bundle(extract_tasks(module()), target, written)
    with pytest.raises(TuneError, match="no kernel"):
        write_bundle([], target, written.parent / "none")


def test_candidates_are_shared_out_by_what_they_may_win() -> None:
    from tvmx.tune.shortlist import share
    from tvmx.tune.task import Task

    tasks = [Task(name, name, None, 1, 1) for name in "abc"]
    assert share(tasks, [9.0, 0.9, 0.1], 100) == [64, 9, 4]
    assert share(tasks, [9.0, 0.9, 0.1], 6) == [4, 1, 1]
    assert share(tasks, [0.0, 0.0, 0.0], 2) == [1, 1, 1]  # a default each; the writer stops when time is over
