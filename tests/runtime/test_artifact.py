"""Damaged, foreign and misfit files are errors, found before the system's loader sees them."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys

import pytest

from tvmx.errors import ArtifactError
from tvmx.runtime import GraphExecutor
from tvmx.runtime.artifact import Artifact, check_machine, read_artifact
from tvmx.runtime.machine import cpu_features, request_tiles
from tvmx.runtime.manifest import read_manifest
from tvmx.runtime.seal import MANIFEST_SECTION, SEAL_SECTION, open_sealed


def test_a_whole_file_is_accepted(library):
    artifact = read_artifact(library)
    assert artifact.manifest.executor == "graph"
    assert list(artifact.manifest.entries) == ["main"]


@pytest.mark.parametrize("keep", [0, 3, 63, 64, 1000, 0.25, 0.5, 0.9, -1])
def test_truncation_is_an_error(library, tmp_path, keep):
    data = library.read_bytes()
    cut = int(len(data) * keep) if isinstance(keep, float) else keep
    path = tmp_path / "cut.so"
    path.write_bytes(data[:cut])
    with pytest.raises(ArtifactError, match=r"truncated|not an ELF|bytes"):
        GraphExecutor(path)


def test_every_kind_of_edit_is_an_error(library, tmp_path):
    data = library.read_bytes()
    for at in range(16, len(data), len(data) // 60):
        edited = bytearray(data)
        edited[at] ^= 0x41
        path = tmp_path / "edited.so"
        path.write_bytes(edited)
        with pytest.raises(ArtifactError):
            read_artifact(path)


def test_appended_bytes_are_an_error(library, tmp_path):
    path = tmp_path / "long.so"
    path.write_bytes(library.read_bytes() + b"x")
    with pytest.raises(ArtifactError, match="was written with"):
        read_artifact(path)


def test_foreign_files(tmp_path):
    import numpy

    text = tmp_path / "notes.so"
    text.write_text("hello" * 100)
    with pytest.raises(ArtifactError, match="not an ELF"):
        GraphExecutor(text)
    other = next(p for p in __import__("pathlib").Path(numpy.__file__).parent.rglob("*.so"))
    with pytest.raises(ArtifactError, match="not one of tvmx"):
        GraphExecutor(other)
    with pytest.raises(ArtifactError, match="cannot read"):
        GraphExecutor(tmp_path / "absent.so")
    with pytest.raises(ArtifactError, match="cannot read"):
        GraphExecutor(tmp_path)


def test_a_bare_name_means_the_current_folder(library, tmp_path):
    shutil.copy(library, tmp_path / "m.so")
    code = "from tvmx.runtime import GraphExecutor; GraphExecutor('m.so').close()"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_missing_cpu_features_are_named(library):
    artifact = read_artifact(library)
    manifest = dataclasses.replace(artifact.manifest, features=frozenset({"sse4_1", "avx1024"}))
    with pytest.raises(ArtifactError, match="avx1024"):
        check_machine(Artifact(artifact.path, artifact.seal, manifest))
    manifest = dataclasses.replace(artifact.manifest, arch="riscv64")
    with pytest.raises(ArtifactError, match="riscv64"):
        check_machine(Artifact(artifact.path, artifact.seal, manifest))


def test_tiles_need_the_systems_permission(library, monkeypatch):
    artifact = read_artifact(library)
    manifest = dataclasses.replace(artifact.manifest, features=frozenset({"amx_tile"}))
    monkeypatch.setattr("tvmx.runtime.artifact.cpu_features", lambda: frozenset({"amx_tile"}))
    monkeypatch.setattr("tvmx.runtime.artifact.request_tiles", lambda: "no such thing")
    with pytest.raises(ArtifactError, match=r"AMX tiles.*no such thing"):
        check_machine(Artifact(artifact.path, artifact.seal, manifest))
    monkeypatch.setattr("tvmx.runtime.artifact.request_tiles", lambda: None)
    check_machine(Artifact(artifact.path, artifact.seal, manifest))


@pytest.mark.skipif("amx_tile" in cpu_features(), reason="this CPU has tiles")
def test_a_cpu_without_tiles_grants_none():
    assert request_tiles() is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("entries"),
        lambda m: m.update(format=99),
        lambda m: m.update(target=[]),
        lambda m: m["entries"]["main"]["inputs"][0].update(shape=[-1]),
        lambda m: m["entries"]["main"]["inputs"][0].update(shape="abc", name=None) or m.pop("abi"),
        lambda m: m["entries"]["main"]["arena"].update(buffers=[[1]]),
        lambda m: m.update(executor="bash"),
    ],
)
def test_hostile_manifests_are_artifact_errors(library, change):
    with library.open("rb") as file:
        raw = json.loads(open_sealed(file, str(library)).manifest)
    change(raw)
    with pytest.raises(ArtifactError):
        read_manifest(json.dumps(raw).encode(), "m.so")
    with pytest.raises(ArtifactError):
        read_manifest(b"\xff{", "m.so")


def test_sections_survive_strip(library, tmp_path):
    """Stripping changes the file, so the seal no longer fits: an error, not a crash."""
    if shutil.which("strip") is None:
        pytest.skip("no strip on this machine")
    path = tmp_path / "stripped.so"
    subprocess.run(["strip", "-o", path, library], check=True)
    with pytest.raises(ArtifactError, match=r"bytes|SHA-256"):
        read_artifact(path)
    assert MANIFEST_SECTION.encode() in path.read_bytes()
    assert SEAL_SECTION.encode() in path.read_bytes()
