"""A long-lived worker process that answers JSON lines: started once, replaced when it hangs or dies.

Both ends live here. A worker never outlives its parent, never sees the terminal's Ctrl-C, and what it prints
goes to a file, not into the protocol.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from tvmx.errors import TuneError
from tvmx.runtime.machine import TILES, cpu_features, request_tiles

START_TIMEOUT_S = 120.0  # importing TVM on a busy machine
_PR_SET_PDEATHSIG = 1


class WorkerTimeout(Exception):
    """The worker did not answer in time; it has been killed."""


class WorkerCrash(Exception):
    """The worker died. Says what of: a signal's name or an exit status, and its last words."""


class Worker:
    """One worker process running `main()` of a module. Started by `start` or at the first request."""

    def __init__(self, module: str, env: Mapping[str, str] | None = None) -> None:
        self.module = module
        self.env = dict(env or {})
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._pending = b""
        self._ready = False

    def start(self) -> None:
        """Start the process without waiting until it is ready."""
        if self._process is not None:
            return
        env = {**os.environ, **self.env, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONSAFEPATH": "1"}
        self._stderr = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.module, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=env,
            start_new_session=True,
        )
        self._pending = b""
        self._ready = False
        self.starts += 1

    def request(self, obj: Any, timeout_s: float) -> Any:
        """Send a request, wait for its answer. Raises WorkerTimeout or WorkerCrash; the next call starts anew."""
        self.start()
        if not self._ready:
            self._read(START_TIMEOUT_S)  # the greeting
            self._ready = True
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(obj).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._crash() from None
        return self._read(timeout_s)

    def close(self) -> None:
        """Kill the worker and what it started."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if pipe:
                        pipe.close()
            process.wait()
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    def _read(self, timeout_s: float) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        handle = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        try:
            while b"\n" not in self._pending:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([handle], [], [], left)[0]:
                    self.close()
                    raise WorkerTimeout(f"no answer in {timeout_s:g} s")
                chunk = os.read(handle, 1 << 16)
                if not chunk:
                    raise self._crash()
                self._pending += chunk
        except KeyboardInterrupt:
            self.close()  # its answer would be taken for the next request's
            raise
        line, self._pending = self._pending.split(b"\n", 1)
        try:
            return json.loads(line)
        except ValueError:
            self.close()
            raise WorkerCrash("it broke the protocol") from None

    def _crash(self) -> WorkerCrash:
        process, words = self._process, ""
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        if self._stderr is not None:
            self._stderr.seek(0, os.SEEK_END)
            self._stderr.seek(max(0, self._stderr.tell() - 2000))
            words = self._stderr.read().decode(errors="replace").strip()
        status = process.returncode
        self.close()
        if not self._ready:
            raise TuneError(f"{self.module} does not start (exit status {status}):\n{words}")
        how = signal.Signals(-status).name if status is not None and status < 0 else f"exit status {status}"
        return WorkerCrash(f"{how} {words.splitlines()[-1] if words else ''}".strip())


def serve(handle: Callable[[Any], Any]) -> None:
    """Answer requests on stdin until it closes; `handle` returns what is sent back as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return  # the parent died before the line above
    if cpu_features() & TILES:
        request_tiles()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answers.write(b'"ready"\n')
    answers.flush()
    for line in sys.stdin.buffer:
        answers.write(json.dumps(handle(json.loads(line))).encode() + b"\n")
        answers.flush()
