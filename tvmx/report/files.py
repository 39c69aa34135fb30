"""Files that are either the old one or the whole new one."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tvmx.errors import ConfigError


def check_writable(path: str | Path) -> None:
    """Raise ConfigError where no file can be written: before long work rather than after it."""
    place = Path(path).absolute()
    if place.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder; name a file")
    folder = next(p for p in place.parents if p.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "may not be written to" if folder.is_dir() else "is no folder"
        raise ConfigError(f"cannot write {path}: {folder} {why}; choose another place")


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path`; it replaces `path` only when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    # not mkstemp: its files are for their owner alone, whatever the umask says
    handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as file:
        file.write(text.encode())
