"""Parameters as one read-only block: equal ones once, 64-byte aligned, streamed to a file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tvmx.runtime.arena import ALIGNMENT


class ConstantPool:
    """Collects the constants of all entries; `add` gives each its byte offset in the block that `write` makes."""

    def __init__(self) -> None:
        self._offsets: dict[bytes, int] = {}
        self._arrays: list[tuple[int, np.ndarray[Any, Any]]] = []
        self.bytes = 0

    def add(self, constants: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, int]:
        """Name → offset. Equal bytes share one offset, whatever their name, shape or dtype."""
        return {name: self._add(array) for name, array in constants.items()}

    def _add(self, array: np.ndarray[Any, Any]) -> int:
        data = _bytes(array)
        key = hashlib.sha256(data).digest() + len(data).to_bytes(8, "little")
        if key not in self._offsets:
            self._offsets[key] = self.bytes
            self._arrays.append((self.bytes, array))
            self.bytes += -(-len(data) // ALIGNMENT) * ALIGNMENT
        return self._offsets[key]

    def write(self, path: Path) -> None:
        """Write the block; never empty, so that its symbol has an address."""
        with path.open("wb") as file:
            for offset, array in self._arrays:
                _pad_to(file, offset)
                file.write(_bytes(array))
            _pad_to(file, max(self.bytes, ALIGNMENT))


def _bytes(array: np.ndarray[Any, Any]) -> memoryview:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data if flat.size else memoryview(b"")


def _pad_to(file: BinaryIO, offset: int) -> None:
    file.write(bytes(offset - file.tell()))
