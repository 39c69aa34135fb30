"""Measure for a tuning session on another machine: `python run.py --serve HOST:PORT --key-file FILE` of any bundle,
or `python -m tvmx.tune.rpc_server`. Needs numpy and, for GPUs, the CUDA driver; carried along in offline bundles.

The server runs code that the client sends: bind it to 127.0.0.1 and come through an SSH tunnel, or to a network you
trust. Both sides prove that they know the key; the key itself never travels. One client at a time.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from tvmx.errors import TuneError
from tvmx.tune.worker import Worker, WorkerCrash, WorkerTimeout

MAX_LINE = 256 << 20  # of a message
MIN_KEY = 16  # bytes
IDLE_S = 3600.0  # between two requests: the session compiles meanwhile
GREETING_S = 5.0  # for a client to prove that it knows the key
_STRANGE = (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError)  # what a stranger's messages raise


def address(text: str) -> tuple[str, int]:
    """ "HOST:PORT" taken apart. Raises TuneError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) < 65536:
        raise TuneError(f"{text!r} is no HOST:PORT, such as 127.0.0.1:9190")
    return host, int(port)


def read_key(path: Path | None) -> bytes:
    """The shared secret. Raises TuneError."""
    if path is None:
        raise TuneError("name a file with the secret that both sides know: --key-file FILE")
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise TuneError(f"cannot read the key: {error}") from None
    if len(key) < MIN_KEY:
        raise TuneError(
            f"the key in {path} has {len(key)} bytes; use {MIN_KEY} or more, such as `openssl rand -hex 32`"
        )
    return key


def send(stream: Any, obj: Any) -> None:
    stream.write(json.dumps(obj, separators=(",", ":")).encode() + b"\n")
    stream.flush()


def receive(stream: Any) -> Any:
    """The next message. Raises EOFError at the end, ValueError for what is none."""
    line = stream.readline(MAX_LINE + 1)
    if not line:
        raise EOFError
    if len(line) > MAX_LINE or not line.endswith(b"\n"):
        raise ValueError("a message is cut off or too long")
    return json.loads(line)


def proof(key: bytes, side: str, nonce: str) -> str:
    """What shows to the other side, which chose `nonce`, that this one knows the key."""
    return hmac.new(key, f"{side} {nonce}".encode(), hashlib.sha256).hexdigest()


def greet(stream: Any, key: bytes, side: str, other: str) -> bool:
    """Both sides challenge each other; False where the other does not know the key."""
    mine = secrets.token_hex(16)
    send(stream, {"nonce": mine})
    theirs = receive(stream)["nonce"]
    if not isinstance(theirs, str):
        return False
    send(stream, {"proof": proof(key, side, theirs)})
    return hmac.compare_digest(str(receive(stream).get("proof")), proof(key, other, mine))


class Server:
    """Answers one client after the other. `port` 0 takes a free one."""

    def __init__(self, where: str, key: bytes, device: str) -> None:
        self.key, self.device = key, device
        self.socket = socket.create_server(address(where))
        self.port = int(self.socket.getsockname()[1])

    def serve_one(self) -> None:
        """One client, from greeting to goodbye. Whatever it sends cannot end the server."""
        connection, _ = self.socket.accept()
        with contextlib.suppress(*_STRANGE), connection, tempfile.TemporaryDirectory(prefix="tvmx-rpc-") as folder:
            connection.settimeout(GREETING_S)
            with connection.makefile("rwb") as stream:
                if not greet(stream, self.key, "server", "client"):
                    return
                connection.settimeout(IDLE_S)
                client = _Client(Path(folder), self.device)
                try:
                    while True:
                        send(stream, client.answer(receive(stream)))
                finally:
                    client.worker.close()

    def close(self) -> None:
        self.socket.close()


class _Client:
    """What one client has sent, and the process that runs it."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device = folder, device
        self.worker = Worker("tvmx.tune.runner", {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["op"] == "have":
            return {"have": [n for n in message["names"] if self.file(n).is_file()]}
        if message["op"] == "put":
            data = base64.b64decode(message["data"], validate=True)
            name = hashlib.sha256(data).hexdigest()
            self.file(name).write_bytes(data)
            return {"name": name}
        if message["op"] == "drop":
            for name in message["names"]:
                self.file(name).unlink(missing_ok=True)
            return {}
        try:
            return {"answer": self.worker.request(self.local(message["request"]), float(message["timeout_s"]))}
        except WorkerTimeout as error:
            return {"timeout": str(error)}
        except (WorkerCrash, TuneError) as error:
            return {"crash": str(error)}

    def local(self, request: dict[str, Any]) -> dict[str, Any]:
        """The request with this machine's device and paths."""
        out = {**request}
        if "device" in out:
            out["device"] = self.device
        if "path" in out:
            out["path"] = str(self.file(out["path"]))
        if "paths" in out:
            out["paths"] = [str(self.file(p)) for p in out["paths"]]
        if "spec" in out:
            spec = {**out["spec"], "device": self.device}
            out["spec"] = {**spec, "reference": str(self.file(spec["reference"]))}
        return out

    def file(self, name: str) -> Path:
        """Files are named by their SHA-256; anything else is refused."""
        if len(name) != 64 or any(c not in "0123456789abcdef" for c in name):
            raise ValueError(f"{name!r} names no file")
        return self.folder / name


def serve_forever(where: str, key_file: Path | None, device: str) -> int:
    """Serve until interrupted. Raises TuneError."""
    key = read_key(key_file)
    try:
        server = Server(where, key, device)
    except OSError as error:
        raise TuneError(f"cannot listen on {where}: {error}") from None
    print(f"measuring on {device} for whoever knows the key, port {server.port}; Ctrl-C ends it", flush=True)
    try:
        while True:
            server.serve_one()
    except KeyboardInterrupt:
        return 0
    finally:
        server.close()


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="tvmx.tune.rpc_server", description=__doc__)
    parser.add_argument("where", metavar="HOST:PORT")
    parser.add_argument("--key-file", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args(argv)
    try:
        return serve_forever(args.where, args.key_file, args.device)
    except TuneError as error:
        print(f"rpc_server: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
