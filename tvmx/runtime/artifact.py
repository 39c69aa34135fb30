"""Open a compiled library: everything is checked in Python before the system's loader sees the file."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tvmx.errors import ArtifactError
from tvmx.runtime.elf import MACHINES
from tvmx.runtime.machine import TILES, architecture, cpu_features, request_tiles
from tvmx.runtime.manifest import Manifest, read_manifest
from tvmx.runtime.seal import open_sealed


@dataclass(frozen=True)
class Artifact:
    """A whole, unchanged library; `path` is absolute, `seal` tells it from any other."""

    path: str
    seal: bytes
    manifest: Manifest


def read_artifact(path: str | os.PathLike[str], check_hash: bool = True) -> Artifact:
    """Check that `path` is a whole, unchanged artifact; it may be for another machine.

    Raises ArtifactError saying what is wrong and what to do.
    """
    absolute = os.path.abspath(os.fspath(path))
    try:
        with open(absolute, "rb") as file:
            sealed = open_sealed(file, absolute, check_hash)
    except OSError as error:
        raise ArtifactError(f"cannot read {absolute}: {error.strerror or error}") from None
    manifest = read_manifest(sealed.manifest, absolute)
    if MACHINES.get(manifest.arch) != sealed.elf.machine:
        raise ArtifactError(f"{absolute} says it is for {manifest.arch}, but its code is for another machine")
    return Artifact(absolute, sealed.seal, manifest)


def check_machine(artifact: Artifact) -> None:
    """Raise ArtifactError unless this machine can run the artifact, saying what does not fit."""
    manifest = artifact.manifest
    if manifest.arch != architecture():
        raise ArtifactError(
            f"{artifact.path} is compiled for {manifest.arch}, this machine is {architecture()}; "
            f"compile it with a target for {architecture()}"
        )
    have = cpu_features()
    missing = sorted(manifest.features - have)
    if missing and have:
        raise ArtifactError(
            f"{artifact.path} is compiled for {manifest.target} and needs the CPU features {', '.join(missing)}, "
            "which this machine lacks; compile it with target='x86_64-avx2', 'x86_64-sse', or on this machine"
            if manifest.arch == "x86_64"
            else f"{artifact.path} needs the CPU features {', '.join(missing)}, which this machine lacks; "
            "compile it with target='aarch64-neon'"
        )
    refused = request_tiles() if manifest.features & TILES else None
    if refused is not None:
        raise ArtifactError(
            f"{artifact.path} uses AMX tiles, which the system does not grant this process ({refused}); use Linux 5.16 "
            "or later without a seccomp filter on arch_prctl, or compile it with target='x86_64-avx512-vnni'"
        )
