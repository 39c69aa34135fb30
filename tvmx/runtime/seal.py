"""The seal of an artifact: a section with the file's size and the SHA-256 of all its other bytes."""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tvmx.errors import ArtifactError
from tvmx.runtime.elf import Elf, Section, read_elf

SEAL_SECTION = ".tvmx.seal"
MANIFEST_SECTION = ".tvmx.manifest"
CUDA_SECTION = ".tvmx.cuda"  # device code of a CUDA target
SEAL_MAGIC = b"TVMXSEAL"
SEAL_SIZE = 64
_FIELDS = struct.Struct("<8sQ32s16x")
_CHUNK = 1 << 20


def seal(path: Path) -> None:
    """Fill in the empty seal of a freshly linked library."""
    size = path.stat().st_size
    with path.open("rb+") as file:
        at = _seal_section(read_elf(file, size, str(path)), str(path))
        digest = _digest(file, at)
        file.seek(at.offset)
        file.write(_FIELDS.pack(SEAL_MAGIC, size, digest))


@dataclass(frozen=True)
class Sealed:
    """What a checked file holds: its headers, the seal's bytes, the manifest's bytes."""

    elf: Elf
    seal: bytes
    manifest: bytes


def open_sealed(file: BinaryIO, path: str, check_hash: bool = True) -> Sealed:
    """Check size and hash of an open artifact. Raises ArtifactError."""
    size = os.fstat(file.fileno()).st_size
    elf = read_elf(file, size, path)
    at = _seal_section(elf, path)
    file.seek(at.offset)
    found = file.read(SEAL_SIZE)
    magic, sealed_size, digest = _FIELDS.unpack(found)
    if magic != SEAL_MAGIC:
        raise ArtifactError(f"{path} has a damaged seal; compile the model again")
    if sealed_size != size:
        raise ArtifactError(f"{path} has {size} bytes but was written with {sealed_size}; copy it again")
    if check_hash and _digest(file, at) != digest:
        raise ArtifactError(f"{path} was changed after it was written (its SHA-256 differs); copy or compile it again")
    manifest = elf.sections.get(MANIFEST_SECTION)
    if manifest is None:
        raise ArtifactError(f"{path} holds no manifest; compile the model again")
    file.seek(manifest.offset)
    return Sealed(elf, found, file.read(manifest.size).rstrip(b"\0"))


def _seal_section(elf: Elf, path: str) -> Section:
    at = elf.sections.get(SEAL_SECTION)
    if at is None or at.size != SEAL_SIZE:
        raise ArtifactError(f"{path} is a library but not one of tvmx; give the .so that tvmx.compile wrote")
    return at


def _digest(file: BinaryIO, at: Section) -> bytes:
    """SHA-256 of the file with the seal's bytes left out. Reads, never maps: a mapped file that shrinks kills."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK))
    file.seek(0)
    position = 0
    while count := file.readinto(buffer):  # type: ignore[attr-defined]
        low, high = max(at.offset - position, 0), min(at.offset + at.size - position, count)
        if low < high:
            digest.update(buffer[:low])
            digest.update(buffer[high:count])
        else:
            digest.update(buffer[:count])
        position += count
    return digest.digest()
