"""Long use: memory stays flat, loading is quick, the process stays small."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


def _python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


_RSS = """
import sys
import numpy as np
from tvmx.runtime import GraphExecutor

def rss():
    with open("/proc/self/status") as file:
        return next(int(l.split()[1]) for l in file if l.startswith("VmRSS")) / 1024

x = np.random.default_rng(0).standard_normal((32, 64)).astype("float32")
path = sys.argv[1]
"""


def test_ten_thousand_runs_leave_memory_flat(library):
    out = _python(
        _RSS
        + """
with GraphExecutor(path, threads=2) as ex:
    for _ in range(500):
        ex({"x": x})
    before = rss()
    for _ in range(10_000):
        ex({"x": x})
    print(rss() - before)
""",
        str(library),
    )
    assert abs(float(out)) <= 2


def test_two_hundred_loads_leave_memory_flat(library):
    out = _python(
        _RSS
        + """
def once():
    with GraphExecutor(path, threads=2) as ex:
        ex({"x": x})

for _ in range(20):
    once()
before = rss()
for _ in range(200):
    once()
print(rss() - before)
""",
        str(library),
    )
    assert abs(float(out)) <= 2


def test_runtime_is_small(library):
    """Peak RSS of a small model; the start's time is measured in `benchmarks/executor.py`."""
    out = _python(
        """
        import sys
        import numpy as np
        from tvmx.runtime import GraphExecutor
        ex = GraphExecutor(sys.argv[1], threads=2)
        ex({"x": np.zeros((32, 64), "float32")})
        with open("/proc/self/status") as file:  # ru_maxrss would count the parent before exec
            print(next(int(l.split()[1]) for l in file if l.startswith("VmHWM")) / 1024)
        """,
        str(library),
    )
    assert float(out) <= 60


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGTERM"])
def test_a_killed_export_leaves_the_old_file(library, tmp_path, signal):
    """A process is killed while it writes the new file again and again: what lies there is always whole."""
    import os
    import shutil
    import signal as signals
    import time

    from tvmx.runtime.artifact import read_artifact

    target = tmp_path / "m.so"
    shutil.copy(library, target)
    for delay in (0.0, 0.003, 0.011, 0.02):
        child = subprocess.Popen(
            [
                sys.executable, "-c",
                "import shutil, sys; from pathlib import Path; from tvmx.executor.link import replacing\n"
                "print('go', flush=True)\n"
                "while True:\n"
                "    with replacing(Path(sys.argv[2])) as temporary: shutil.copyfile(sys.argv[1], temporary)",
                str(library), str(target),
            ],
            stdout=subprocess.PIPE,
        )  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(delay)
        os.kill(child.pid, getattr(signals, signal))
        child.wait()
        child.stdout.close()
        read_artifact(target)
