"""CUDA targets: bundles, sessions and predictions, on no device and on one whose kernels are emulated."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.cuda import fake_device
from tests.schedules.cuda.products import Product
from tests.tune.test_offline import lines, run
from tvmx.cuda.lower import lower_kernel
from tvmx.cuda.nvcc import cuda_compiler
from tvmx.errors import ConfigError
from tvmx.target import PRESETS
from tvmx.tune import tune
from tvmx.tune.log import TuningLog
from tvmx.tune.log_tools import run_action
from tvmx.tune.measure import MeasureConfig, Measurer
from tvmx.tune.offline import write_bundle
from tvmx.tune.offline_run import DONE, LEFT, NO_DEVICE, RESULTS
from tvmx.tune.record import Prediction, Trial
from tvmx.tune.task import Task, extract_tasks
from tvmx.tune.trace import replay

pytestmark = pytest.mark.skipif(
    cuda_compiler() is None or not fake_device.available(), reason="needs nvcc or NVRTC, gcc and g++"
)  # fmt: skip

TARGET = PRESETS["cuda-sm80"]
CONFIG = MeasureConfig(
    build_timeout_s=120, repeat=2, min_repeat_ms=0.01, compare_rounds=1, cache="hot", run_timeout_s=60
)


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    from tvmx.pipeline import run_phases

    return extract_tasks(run_phases(Product((16, 32), (32, 16)).module(), TARGET))


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_device.build_driver(tmp_path_factory.mktemp("driver"))


def environment(driver: Path, **more: str) -> dict[str, str]:
    return {"TVMX_CUDA_DRIVER": str(driver), "TVMX_FAKE_KERNELS": str(driver.parent), **more}


def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMX_CUDA_DRIVER", "/nowhere/libcuda.so.1")


def test_bundle_on_an_emulated_device(tasks: list[Task], driver: Path, tmp_path: Path) -> None:
    report = write_bundle(tasks, TARGET, tmp_path / "b.tar", max_trials=3, measure=CONFIG)
    assert report.candidates == 3
    assert "tar -xf" in str(report)
    with tarfile.open(tmp_path / "b.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    bundle = tmp_path / "b"
    manifest = json.loads((bundle / "manifest.json").read_text())
    (task,) = manifest["tasks"]
    assert task["reference"]["device"] == "cpu"
    assert all(c["predicted_s"] > 0 for c in task["candidates"])
    for candidate in task["candidates"]:
        binary = (bundle / candidate["file"]).read_bytes()
        assert binary.count(b"\x7fELF") == 2, "machine code in a shared object"
        assert b"__global__" not in binary
        program = lower_kernel(replay(tasks[0].func, candidate["trace"]), TARGET)
        fake_device.register(driver.parent, program, fake_device.cubin_of(bundle / candidate["file"]))
    # without a device
    code, said = run(bundle, TVMX_CUDA_DRIVER="/nowhere/libcuda.so.1")
    assert code == NO_DEVICE
    assert "nothing was measured: no CUDA driver" in said
    assert run(bundle, **environment(driver, TVMX_FAKE_DEVICES="0"))[0] == NO_DEVICE
    code, said = run(bundle, **environment(driver, TVMX_FAKE_SM="75"))
    assert code == NO_DEVICE
    assert "sm_80" in said
    assert "sm_75" in said
    # with one
    code, said = run(bundle, **environment(driver))
    assert code == DONE, said
    trials = lines(bundle, "trial")
    assert [t["status"] for t in trials] == ["OK"] * 3, said
    assert all("Emulated GPU | sm_80" in t["hardware"] for t in trials)
    report = run_action("import", [bundle / RESULTS, tmp_path / "log"])
    log = TuningLog(tmp_path / "log", readonly=True)
    assert len(log.trials(tasks[0].workload, TARGET)) == 3
    assert report["measured on"] == [trials[0]["hardware"]]
    # a flushed cache is another experiment
    elsewhere = ("--cache", "cold", "--out", str(tmp_path / "cold.jsonl"))
    assert run(bundle, *elsewhere, **environment(driver))[0] == DONE


def test_a_kernel_that_faults_takes_only_itself_along(tasks: list[Task], driver: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "b"
    write_bundle(tasks, TARGET, bundle, max_trials=3, measure=CONFIG, seed=1)
    (task,) = json.loads((bundle / "manifest.json").read_text())["tasks"]
    for number, candidate in enumerate(task["candidates"]):
        program = lower_kernel(replay(tasks[0].func, candidate["trace"]), TARGET)
        if number == 1:  # an illegal address
            import dataclasses

            entry = program.launches[0].kernel
            head, body = program.source.split(f"{entry}(", 1)
            tail, rest = body.rsplit("}", 1)
            program = dataclasses.replace(program, source=f"{head}{entry}({tail} *(volatile int*)8 = 1; }}{rest}")
        fake_device.register(driver.parent, program, fake_device.cubin_of(bundle / candidate["file"]))
    code, said = run(bundle, **environment(driver))
    assert code == DONE, said
    statuses = [t["status"] for t in lines(bundle, "trial")]
    assert statuses == ["OK", "RUN_CRASH", "OK"]
    assert "ILLEGAL_ADDRESS" in lines(bundle, "trial")[1]["error"]


def test_session_on_an_emulated_device(
    tasks: list[Task], driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(driver).items():
        monkeypatch.setenv(name, value)

    class Registering(Measurer):
        def build(self, funcs: Any, stop: Any = lambda: False) -> Any:
            builds = super().build(funcs, stop)
            for func, built in zip(funcs, builds):
                if built.path is not None:
                    cubin = fake_device.cubin_of(built.path)
                    fake_device.register(driver.parent, lower_kernel(func, TARGET), cubin)
            return builds

    monkeypatch.setattr("tvmx.tune.session.Measurer", Registering)
    report = tune(tasks, TARGET, tmp_path / "log", max_trials=3, measure=CONFIG, on_progress=lambda _: None)
    assert (report.new_trials, report.predicted) == (3, 0)
    trials = [r for r in TuningLog(tmp_path / "log").records if isinstance(r, Trial)]
    assert {t.status for t in trials} == {"OK"}
    assert "Emulated GPU" in trials[0].hardware
    with pytest.raises(ConfigError, match="sm_90"):
        tune(tasks, PRESETS["cuda-sm90"], tmp_path / "log", max_trials=1, on_progress=lambda _: None)


def test_no_device_predicts_and_never_measures(
    tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_driver(monkeypatch)
    report = tune(tasks, TARGET, tmp_path, max_trials=3, measure=CONFIG, on_progress=lambda _: None)
    assert (report.new_trials, report.confirmed, report.predicted) == (0, 0, 3)
    assert "no CUDA driver" in str(report)
    log = TuningLog(tmp_path)
    found = log.predictions(tasks[0].workload, TARGET)
    assert len(found) == 3
    assert found[0].default
    assert all(p.status == "PREDICTED" and p.predicted_s > 0 and p.facts["kernels"] for p in found)
    assert log.trials(tasks[0].workload, TARGET) == []
    assert log.best(tasks[0].workload, TARGET) is None
    assert log.related(tasks[0].workload, TARGET) == []
    assert run_action("best", [tmp_path]) == {}
    assert run_action("show", [tmp_path])["prediction PREDICTED"] == 3
    assert run_action("export", [tmp_path, tmp_path / "ms"])["exported"] == 0
    assert all(isinstance(r, Prediction) for r in log.records)
    # predictions smuggled into a results file are no results
    (tmp_path / "x.jsonl").write_bytes((tmp_path / "records.jsonl").read_bytes())
    with pytest.raises(Exception, match="no results"):
        run_action("import", [tmp_path / "x.jsonl", tmp_path / "log"])
    assert run_action("prune", [tmp_path])["records"] == 0


def test_the_time_budget_of_a_device(driver: Path, tasks: list[Task], tmp_path: Path) -> None:
    write_bundle(tasks, TARGET, tmp_path / "b", max_trials=1, measure=CONFIG)
    assert run(tmp_path / "b", "--time-budget-s", "0", **environment(driver))[0] == LEFT
