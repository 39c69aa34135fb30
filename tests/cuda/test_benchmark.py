"""`benchmarks.gpu`: its logic with made-up times, and a whole run on a device whose kernels are emulated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu, gpu_cases, gpu_run
from benchmarks.gpu_cases import Case, conv
from tests.cuda import fake_device
from tvmx.cuda.nvcc import cuda_compiler
from tvmx.target import PRESETS


def test_interleaved_ratios_with_made_up_times() -> None:
    log: list[tuple[str, int]] = []

    def timer(issue: Callable[[], None], calls: int) -> float:
        issue()
        name = log[-1][0]
        log[-1] = (name, calls)
        drift = 1 + 0.5 * (len(log) // 10)  # the machine slows down for both
        return {"ours": 1e-4, "theirs": 2e-4}[name] * drift

    row = gpu_run.interleaved(lambda: log.append(("ours", 0)), lambda: log.append(("theirs", 0)), timer, rounds=5)
    assert row["ratio"] == pytest.approx(2.0, rel=0.6)
    timed = [entry for entry in log if entry[1] > 1]
    assert [name for name, _ in timed] == ["ours", "theirs"] * 5, "in turn"
    assert {calls for name, calls in timed if name == "ours"} == {40}, "4 ms of calls"
    alone = gpu_run.interleaved(lambda: log.append(("ours", 0)), None, timer, rounds=3)
    assert "ratio" not in alone
    assert len(alone["samples_s"][0]) == 3


def test_summary_holds_ratios_to_their_bars() -> None:
    rows = [
        {"case": "resnet50 1x1/1 a", "ratio": 0.5},
        {"case": "resnet50 3x3/1 b", "ratio": 2.0},
        {"case": "resnet50 int8 c", "ratio": 9.0},
        {"case": "resnet50 no peer"},
        {"case": "gemm float16 8192x8192x8192", "ratio": 0.79},
    ]
    found = gpu_run.summary(rows)
    assert found["resnet50 float16"] == {
        "mean": pytest.approx(1.0),
        "least": 0.5,
        "bar": 0.8,
        "reached": True,
        "rows": 2,
    }
    assert not found["gemm 8192"]["reached"]


def test_references() -> None:
    """Rows drawn from the reference are those of the whole; a grouped, strided convolution by hand."""
    case = conv("c", (2, 7, 7, 8), 6, 3, 2, groups=2)
    x, w = gpu_cases.small(case.x, 0), gpu_cases.small(case.weight, 1)
    a, b = gpu_cases.as_dtype(x, "float16"), gpu_cases.as_dtype(w, "float16")
    rows = np.arange(2 * 4 * 4)
    whole = gpu_cases.reference(case, a, b, rows)
    np.testing.assert_array_equal(gpu_cases.reference(case, a, b, rows[5:9]), whole[5:9])
    patch = a[1, 3:6, 1:4, 4:8].astype("float64")  # image 1, row 2, column 1, group 1
    by_hand = max(0.0, float((patch * b[..., 4].astype("float64")).sum()) + 1)
    assert whole[16 + 2 * 4 + 1, 4] == by_hand
    assert len(gpu_cases.resnet50(32)) == 23
    assert sum(c.flops for c in gpu_cases.resnet50(1)) > 3e9


def test_no_device_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TVMX_CUDA_DRIVER", "/nowhere/libcuda.so.1")
    assert gpu.main([]) == gpu_run.NO_DEVICE
    assert "no CUDA driver" in capsys.readouterr().err
    assert gpu_run.main(tmp_path, []) == gpu_run.UNPREPARED


@pytest.mark.skipif(cuda_compiler() is None or not fake_device.available(), reason="needs nvcc or NVRTC, gcc and g++")
def test_a_prepared_folder_runs_on_an_emulated_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tvmx.cuda import candidate

    driver = fake_device.build_driver(tmp_path)
    plain = candidate.build_candidate

    def registering(program: Any, chip: Any, output: Path) -> Any:
        facts = plain(program, chip, output)
        fake_device.register(tmp_path, program, fake_device.cubin_of(output))
        return facts

    monkeypatch.setattr(candidate, "build_candidate", registering)
    monkeypatch.setattr(gpu, "LOOPS", 1)
    wrong = conv("conv wrong", (1, 4, 4, 16), 16, 1, timed=False)
    cases = [
        conv("conv grouped", (1, 5, 5, 32), 32, 3, groups=2, timed=False),
        Case("gemm timed", "gemm", (2, 16, 32), (2, 16, 32), transposed=True),
        wrong,
    ]
    folder = tmp_path / "g"
    gpu.prepare(folder, PRESETS["cuda-sm80"], cases, progress=False)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert len(manifest["cases"][0]["steps"]) == 2
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"TVMX_CUDA_DRIVER": str(driver), "TVMX_FAKE_KERNELS": str(tmp_path)}

    def run() -> tuple[int, str]:
        command = [sys.executable, "-I", str(folder / "run.py"), "--no-peers"]
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd="/")
        return done.returncode, done.stdout + done.stderr

    code, said = run()
    assert code == 0, said
    found = json.loads((folder / "gpu.json").read_text())
    assert all(r["right"] for r in found["rows"])
    assert found["peak_tflops"].keys() == {"float16", "int8"}
    assert found["rows"][1]["share_of_peak"] > 0
    assert "neither torch" in found["rows"][1]["no_peer"]
    # what is wrong is seen: another kernel's constants
    entry = manifest["cases"][2]
    constants = dict(np.load(folder / entry["constants"]))
    np.savez_compressed(folder / entry["constants"], **{k: np.roll(v, 1) for k, v in constants.items()})
    code, said = run()
    assert code == gpu_run.WRONG
    assert "WRONG conv wrong" in said
