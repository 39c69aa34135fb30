"""Every 12th of ONNX's node tests on each `make test`; `make conformance` runs them all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_no_sampled_node_test_is_wrong(tmp_path: Path) -> None:
    # A process of its own: the runner forks its workers before TVM is loaded.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.conformance.run", "--via", "vm",
         "--sample", "12", "--workers", "2", "-v"],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    passed = float(done.stdout.split(" % pass")[0].split()[-1])
    assert passed >= 85, done.stdout
