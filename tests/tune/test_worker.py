"""Worker processes: answers, time limits, crashes, and no survivors."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tvmx.errors import TuneError
from tvmx.tune.worker import Worker, WorkerCrash, WorkerTimeout

MODULE = """
import os, signal, sys, time
from tvmx.tune.worker import serve

def handle(request):
    if request == "sleep":
        time.sleep(60)
    if request == "die":
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if request == "leave":
        os._exit(3)
    if request == "chatter":
        print("this is not the protocol", flush=True)
    if request == "threads":
        return os.environ["TVMX_TEST"]
    return {"pid": os.getpid(), "request": request}

if __name__ == "__main__":
    serve(handle)
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    (tmp_path / "worker_under_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    worker = Worker("worker_under_test", {"TVMX_TEST": "7"})
    yield worker
    worker.close()


def gone(pid: int) -> bool:
    """Whether a process ends within five seconds."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_one_process_answers_many_requests(worker: Worker) -> None:
    answers = [worker.request(n, 20) for n in range(3)]
    assert [a["request"] for a in answers] == [0, 1, 2]
    assert len({a["pid"] for a in answers}) == 1
    assert worker.request("chatter", 20)["request"] == "chatter"
    assert worker.request("threads", 20) == "7"
    assert worker.starts == 1


def test_timeout_kills_and_the_next_request_starts_anew(worker: Worker) -> None:
    pid = worker.request(0, 20)["pid"]
    with pytest.raises(WorkerTimeout, match=r"0\.2 s"):
        worker.request("sleep", 0.2)
    assert gone(pid)
    assert worker.request(1, 20)["request"] == 1
    assert worker.starts == 2


@pytest.mark.parametrize(("request_", "how"), [("die", "SIGSEGV last words"), ("leave", "exit status 3")])
def test_crash_says_how(worker: Worker, request_: str, how: str) -> None:
    worker.request(0, 20)
    with pytest.raises(WorkerCrash, match=how):
        worker.request(request_, 20)
    assert worker.request(1, 20)["request"] == 1


def test_a_module_that_does_not_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_worker.py").write_text("raise RuntimeError('no luck')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TuneError, match="no luck"):
        Worker("broken_worker").request(0, 20)


def test_workers_die_with_a_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "worker_under_test.py").write_text(MODULE)
    code = f"""
import sys, time
sys.path[:0] = {[str(tmp_path), *sys.path]!r}
from tvmx.tune.worker import Worker
worker = Worker("worker_under_test", {{"TVMX_TEST": "7"}})
print(worker.request(0, 20)["pid"], flush=True)
try:
    worker.request("sleep", 60)
finally:
    print("unreachable")
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(pid)
