"""The session's end of `tvmx.tune.rpc_server`: stands in for the process that runs candidates."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import socket
from pathlib import Path
from typing import Any

from tvmx.errors import TuneError
from tvmx.tune.rpc_server import address, greet, receive, send
from tvmx.tune.worker import WorkerCrash, WorkerTimeout


class RemoteRunner:
    """Answers `request` as a `Worker` of `tvmx.tune.runner` does; libraries travel once, named by their checksum.

    Raises TuneError where nobody listens, the keys differ, or the connection breaks.
    """

    def __init__(self, where: str, key: bytes) -> None:
        self.where = where
        self.key = key
        self._socket: socket.socket | None = None
        self._stream: Any = None
        self._sums: dict[str, str] = {}  # path → checksum

    def start(self) -> None:
        """Connect and greet."""
        if self._stream is not None:
            return
        try:
            self._socket = socket.create_connection(address(self.where), timeout=10.0)
            self._stream = self._socket.makefile("rwb")
            known = greet(self._stream, self.key, "client", "server")
        except (OSError, EOFError, ValueError, KeyError, AttributeError) as error:
            self.close()
            raise TuneError(f"no measuring server at {self.where}: {error or 'it hung up'}") from None
        if not known:
            self.close()
            raise TuneError(f"the server at {self.where} does not know this key; give both sides the same --key-file")

    def request(self, obj: dict[str, Any], timeout_s: float) -> Any:
        """Send the libraries that it lacks, then the request. Raises WorkerTimeout or WorkerCrash."""
        self.start()
        assert self._socket is not None
        self._socket.settimeout(timeout_s + 60.0)
        answer = self._exchange({"op": "run", "request": self._named(obj), "timeout_s": timeout_s})
        if "timeout" in answer:
            raise WorkerTimeout(answer["timeout"])
        if "crash" in answer:
            raise WorkerCrash(answer["crash"])
        return answer["answer"]

    def close(self) -> None:
        """Hang up."""
        for part in (self._stream, self._socket):
            with contextlib.suppress(OSError):
                if part is not None:
                    part.close()
        self._stream = self._socket = None
        self._sums.clear()  # the server forgets a client's files

    def _named(self, obj: dict[str, Any]) -> dict[str, Any]:
        """The request with checksums in place of paths, once the server has the files."""
        out = {**obj}
        if "path" in out:
            out["path"] = self._sent(out["path"])
        if "paths" in out:
            out["paths"] = [self._sent(p) for p in out["paths"]]
        if "spec" in out:
            out["spec"] = {**out["spec"], "reference": self._sent(out["spec"]["reference"])}
        return out

    def _sent(self, path: str) -> str:
        if path not in self._sums:
            data = Path(path).read_bytes()
            name = hashlib.sha256(data).hexdigest()
            if name not in self._exchange({"op": "have", "names": [name]})["have"]:
                self._exchange({"op": "put", "data": base64.b64encode(data).decode()})
            self._sums[path] = name
        return self._sums[path]

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._stream is not None
        try:
            send(self._stream, message)
            answer: dict[str, Any] = receive(self._stream)
        except (OSError, EOFError, ValueError) as error:
            self.close()
            raise TuneError(f"lost the measuring server at {self.where} ({error or 'it hung up'})") from None
        return answer
