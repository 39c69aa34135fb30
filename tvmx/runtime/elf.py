"""Just enough ELF to find a section before anything is loaded. Every number from the file is checked."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import BinaryIO

from tvmx.errors import ArtifactError

MACHINES = {"x86_64": 62, "aarch64": 183}
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_NOBITS = 8


@dataclass(frozen=True)
class Section:
    """Where a section lies in the file."""

    offset: int
    size: int


@dataclass(frozen=True)
class Elf:
    """Machine, and sections by name."""

    machine: int
    sections: dict[str, Section]


def read_elf(file: BinaryIO, size: int, path: str) -> Elf:
    """Read the headers of a 64-bit little-endian shared library of `size` bytes. Raises ArtifactError."""
    file.seek(0)
    raw = file.read(_HEADER.size)
    if len(raw) < _HEADER.size or raw[:4] != b"\x7fELF":
        raise ArtifactError(f"{path} is not an ELF library; give the .so that tvmx.compile wrote")
    ident, kind, machine, _, _, _, table, _, _, _, _, entry, count, names = _HEADER.unpack(raw)
    if ident[4] != 2 or ident[5] != 1 or kind != 3:
        raise ArtifactError(f"{path} is not a 64-bit little-endian shared library")
    if entry != _SECTION.size or table + entry * count > size or not names < count:
        raise ArtifactError(
            f"{path} is truncated: it has {size} bytes, its section table needs {table + entry * count}; copy it again"
        )
    file.seek(table)
    headers = list(_SECTION.iter_unpack(file.read(entry * count)))
    for header in headers:
        if header[1] != _NOBITS and header[4] + header[5] > size:
            raise ArtifactError(f"{path} is truncated or damaged: a section ends beyond the file; copy it again")
    file.seek(headers[names][4])
    strings = file.read(headers[names][5])
    sections = {}
    for header in headers:
        end = strings.find(b"\0", header[0])
        if header[1] != _NOBITS and end >= 0:
            sections[strings[header[0] : end].decode("latin-1")] = Section(header[4], header[5])
    return Elf(machine, sections)
