"""A measuring server on another machine: the session's candidates run there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tune.helpers import module
from tests.tune.test_measure import aborts, copy, twice
from tvmx.errors import TuneError
from tvmx.target import Target
from tvmx.tune import tune
from tvmx.tune.log import TuningLog
from tvmx.tune.measure import MeasureConfig, Measurer
from tvmx.tune.record import Trial
from tvmx.tune.rpc import RemoteRunner
from tvmx.tune.rpc_server import Server, address, read_key
from tvmx.tune.task import extract_tasks

KEY = b"0123456789abcdef"
CONFIG = MeasureConfig(repeat=2, min_repeat_ms=0.2, compare_rounds=2, builders=1)


@pytest.fixture
def where() -> Iterator[str]:
    server = Server("127.0.0.1:0", KEY, "cpu")

    def loop() -> None:
        try:
            while True:
                server.serve_one()
        except OSError:
            pass  # closed

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.port}"
    server.socket.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(10)


def test_a_session_measures_there(where: str, target: Target, tmp_path: Path) -> None:
    tasks = extract_tasks(module())
    runner = RemoteRunner(where, KEY)
    report = tune(tasks, target, tmp_path, max_trials=4, measure=CONFIG, runner=runner, on_progress=lambda _: None)
    trials = [r for r in TuningLog(tmp_path).records if isinstance(r, Trial)]
    assert report.new_trials == len(trials) == 4
    assert {t.status for t in trials} == {"OK"}
    assert "cores" in trials[0].hardware


def test_failures_are_told_apart(where: str, target: Target) -> None:
    runner = RemoteRunner(where, KEY)
    with Measurer(target, CONFIG, runner=runner) as measurer:
        good, wrong, crash = measurer.build([copy, twice, aborts])
        assert measurer.trial(copy, good, wrong, 1.0).status == "WRONG_OUTPUT"
        assert measurer.trial(copy, good, crash, 1.0).status == "RUN_CRASH"
        assert measurer.trial(copy, good, good, 1.0).status == "OK"
        assert measurer.compare(copy, [good, good], 3).status == "OK"


def test_a_wrong_key_runs_nothing(where: str) -> None:
    with pytest.raises(TuneError, match="key"):
        RemoteRunner(where, b"fedcba9876543210").start()
    RemoteRunner(where, KEY).start()  # the server lives on


def test_strangers_do_not_end_the_server(where: str) -> None:
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"nonce": 5}\n{}\n', b"\xff" * 1000 + b"\n"):
        with socket.create_connection(address(where), timeout=5) as connection:
            connection.sendall(garbage)
    runner = RemoteRunner(where, KEY)
    runner.start()
    with pytest.raises(TuneError, match="lost the measuring server"):
        runner._exchange({"op": "drop", "names": ["../../etc/passwd"]})


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(TuneError, match="no measuring server"):
        RemoteRunner("127.0.0.1:1", KEY).start()
    with pytest.raises(TuneError, match="HOST:PORT"):
        RemoteRunner("somewhere", KEY).start()
    with pytest.raises(TuneError, match="--key-file"):
        read_key(None)
    (tmp_path / "key").write_text("short")
    with pytest.raises(TuneError, match="16 or more"):
        read_key(tmp_path / "key")
