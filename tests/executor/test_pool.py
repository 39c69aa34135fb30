"""The C thread pool under stress, plain and under ThreadSanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import tvmx.executor

SOURCE = Path(tvmx.executor.__file__).parent
HERE = Path(__file__).parent


@pytest.mark.parametrize("flags", [["-O2"], ["-O1", "-g", "-fsanitize=thread"]], ids=["plain", "tsan"])
def test_every_task_runs_once_and_failures_are_reported(tmp_path, flags):
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("no gcc on this machine")
    program = tmp_path / "stress"
    command = [gcc, *flags, f"-I{SOURCE}", str(HERE / "pool_stress.c"), str(SOURCE / "pool.c"), "-o", str(program)]
    built = subprocess.run([*command, "-lpthread"], capture_output=True, text=True, check=False)
    if built.returncode and "tsan" in built.stderr:
        pytest.skip("no ThreadSanitizer library on this machine")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.strip() == "0"
