"""A tuning log: a folder with `records.jsonl` and `workloads.jsonl`, append-only JSON Lines.

Safe against kill -9 and concurrent writers: a line is written by one call under a file lock, and a line that
was cut off is skipped, reported in `damage`, and never takes its neighbours with it. No pickle anywhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmx.errors import TuneError
from tvmx.report.files import atomic_write
from tvmx.target import Target
from tvmx.tune.record import (
    CONFIRMED,
    FORMAT,
    AnyRecord,
    Prediction,
    Trial,
    Verdict,
    from_json,
    target_from_json,
    target_key,
    to_json,
    versions,
)
from tvmx.tune.workload import decode, encode, workload_hash

log = logging.getLogger(__name__)

SHOWN = 3  # damaged lines that are named
RECORDS, WORKLOADS, LOCK = "records.jsonl", "workloads.jsonl", ".lock"
Key = tuple[str, tuple[str, int]]  # workload, target_key


@dataclass(frozen=True)
class Damage:
    """A line that could not be read."""

    file: str
    line: int  # from 1
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class TuningLog:
    """Records by workload and target. Made if absent unless `readonly`.

    Raises TuneError when the folder cannot be made, read or written.
    """

    def __init__(self, folder: str | Path, readonly: bool = False) -> None:
        self.folder = Path(folder)
        self.readonly = readonly
        self.records: list[AnyRecord] = []
        self.damage: list[Damage] = []
        self._encoded: dict[str, tuple[str, str]] = {}  # workload → (task, text)
        self._decoded: dict[str, Any] = {}
        self._by_key: dict[Key, list[AnyRecord]] = {}
        if self.folder.exists() and not self.folder.is_dir():
            raise TuneError(f"the tuning log {self.folder} is not a folder; give a folder, made if absent")
        try:
            if not readonly:
                self.folder.mkdir(parents=True, exist_ok=True)
            with self._lock(shared=True):
                self._load()
        except OSError as error:
            raise TuneError(f"cannot read the tuning log {self.folder}: {error}") from None
        self._report_damage()

    def _report_damage(self) -> None:
        """Warn of lines that cannot be read. Raises TuneError where none can: the file is something else."""
        whole = _read(self.folder / RECORDS).endswith(b"\n")  # else its only line may be one that a crash cut off
        if not self.records and whole and (damage := [d for d in self.damage if d.file == RECORDS]):
            raise TuneError(
                f"{self.folder} is no tuning log that this tvmx can read: none of {len(damage)} lines is a record "
                f"({damage[0]}); give another folder"
            )
        for damaged in self.damage[:SHOWN]:
            log.warning("%s: skipped a damaged line: %s", self.folder, damaged)
        if len(self.damage) > SHOWN:
            log.warning("%s: skipped %d more damaged lines", self.folder, len(self.damage) - SHOWN)

    def best(self, workload: str, target: Target, default_hash: str | None = None) -> Verdict | None:
        """The winner confirmed last for this workload on targets that `target_key` calls equal, or None.

        With `default_hash`, the last one that beat the default of that hash (`schedule_hash`).
        """
        for record in reversed(self._by_key.get((workload, target_key(target)), [])):
            if isinstance(record, Verdict) and record.status == CONFIRMED:
                if default_hash is None or record.default_hash == default_hash:
                    return record
        return None

    def outdated(self, workload: str, target: Target, default_hash: str) -> bool:
        """Whether winners are known, but none that beat the default of that hash."""
        known = self.best(workload, target) is not None
        return known and self.best(workload, target, default_hash) is None

    def related(self, workload: str, target: Target) -> list[Verdict]:
        """The winners confirmed last for this workload on the target's instruction set, one per thread count."""
        level = target_key(target)[0]
        newest = {
            key: r
            for key, records in self._by_key.items()
            if key[0] == workload and key[1][0] == level
            for r in records
            if isinstance(r, Verdict) and r.status == CONFIRMED
        }
        return list(newest.values())

    def trials(self, workload: str, target: Target) -> list[Trial]:
        """What was measured of a workload on a target, oldest first."""
        return [r for r in self._by_key.get((workload, target_key(target)), []) if isinstance(r, Trial)]

    def verdicts(self, workload: str, target: Target) -> list[Verdict]:
        """Every winner that was measured against the default, oldest first."""
        return [r for r in self._by_key.get((workload, target_key(target)), []) if isinstance(r, Verdict)]

    def predictions(self, workload: str, target: Target) -> list[Prediction]:
        """What a model expects of candidates that were not measured, oldest first."""
        return [r for r in self._by_key.get((workload, target_key(target)), []) if isinstance(r, Prediction)]

    def workload(self, workload: str) -> Any:
        """The stored, unscheduled PrimFunc, or None where it is missing or damaged."""
        if workload not in self._decoded:
            func = None
            if workload in self._encoded:
                try:
                    func = decode(self._encoded[workload][1])
                    if workload_hash(func) != workload:
                        raise ValueError("its hash does not match")
                except ValueError as error:
                    log.warning("%s: workload %s: %s", self.folder, workload, error)
                    func = None
            self._decoded[workload] = func
        return self._decoded[workload]

    @property
    def workloads(self) -> dict[str, str]:
        """Hash → task name of the stored workloads."""
        return {key: task for key, (task, _) in self._encoded.items()}

    def add_workload(self, func: Any, task: str) -> str:
        """Store an unscheduled PrimFunc unless it is there; returns its hash."""
        key = workload_hash(func)
        if key not in self._encoded:
            self.add_encoded({key: (task, encode(func))})
        return key

    def add_encoded(self, workloads: dict[str, tuple[str, str]]) -> None:
        """Store workloads as another log holds them: hash → (task, text)."""
        new = {k: v for k, v in workloads.items() if k not in self._encoded}
        self._append(WORKLOADS, [_workload(k, *v) for k, v in new.items()])
        self._encoded.update(new)

    def encoded(self) -> dict[str, tuple[str, str]]:
        """The stored workloads, as `add_encoded` takes them."""
        return dict(self._encoded)

    def append(self, records: Sequence[AnyRecord]) -> None:
        """Write records at once. Raises TuneError when the disk refuses."""
        self._append(RECORDS, [to_json(r) for r in records])
        for record in records:
            self._index(record)

    def check_writable(self) -> None:
        """Raise TuneError, before much is measured, where nothing could be appended."""
        try:
            with self._lock():
                pass
        except OSError as error:
            raise TuneError(
                f"cannot write the tuning log {self.folder}: {error}; give a folder you may write"
            ) from None

    def rewrite(self, select: Callable[[list[AnyRecord]], list[AnyRecord]]) -> None:
        """Keep what `select` returns of the records now on disk, and the workloads that they name.

        Each file is replaced atomically. Raises TuneError when the disk refuses.
        """
        try:
            with self._lock():
                self._load()
                records = select(list(self.records))
                named = {r.workload for r in records}
                workloads = [_workload(k, *v) for k, v in self._encoded.items() if k in named]
                for name, lines in ((RECORDS, [to_json(r) for r in records]), (WORKLOADS, workloads)):
                    with atomic_write(self.folder / name) as file:
                        file.write(b"".join(map(_line, lines)))
                self._load()
        except OSError as error:
            raise TuneError(f"cannot write the tuning log {self.folder}: {error}") from None

    def _append(self, name: str, lines: list[dict[str, Any]]) -> None:
        if not lines:
            return
        if self.readonly:
            raise TuneError(f"the tuning log {self.folder} was opened for reading only")
        data = b"".join(_line(obj) for obj in lines)
        try:
            with self._lock(), open(self.folder / name, "ab+", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                if size:
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # a writer died in the middle of a line: keep it apart
                        data = b"\n" + data
                try:
                    while data:  # a disk that fills up takes a part first
                        data = data[file.write(data) :]
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            raise TuneError(
                f"cannot write the tuning log {self.folder}: {error}; what it holds is kept, "
                "and the same command goes on from there once the folder can be written"
            ) from None

    def _load(self) -> None:
        """Read both files again. The caller holds the lock."""
        for part in (self.records, self.damage, self._encoded, self._decoded, self._by_key):
            part.clear()
        for number, obj in self._lines(WORKLOADS):
            key, text = obj.get("workload"), obj.get("func")
            if not isinstance(key, str) or not isinstance(text, str) or obj.get("format") != FORMAT:
                self.damage.append(Damage(WORKLOADS, number, "not a workload of this format"))
            else:
                self._encoded[key] = (str(obj.get("task", key)), text)
        for number, obj in self._lines(RECORDS):
            try:
                self._index(from_json(obj))
            except ValueError as error:
                self.damage.append(Damage(RECORDS, number, str(error)))

    def _lines(self, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in enumerate(_read(self.folder / name).split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                obj = json.loads(line)
                if not isinstance(obj, dict):
                    raise ValueError("not an object")
            except (ValueError, RecursionError) as error:
                self.damage.append(Damage(name, number, f"not a whole JSON line ({error})"))
                continue
            yield number, obj

    def _index(self, record: AnyRecord) -> None:
        key = (record.workload, target_key(target_from_json(record.target)))
        self._by_key.setdefault(key, []).append(record)
        self.records.append(record)

    @contextlib.contextmanager
    def _lock(self, shared: bool = False) -> Iterator[None]:
        """Hold the folder's lock. A reader makes no lock file: where there is none, there is no writer."""
        create = 0 if self.readonly else os.O_CREAT
        try:
            handle = os.open(self.folder / LOCK, os.O_RDWR | create | os.O_CLOEXEC, 0o644)
        except OSError:
            if not shared:
                raise
            yield
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _line(obj: dict[str, Any]) -> bytes:
    return json.dumps(obj, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _workload(key: str, task: str, text: str) -> dict[str, Any]:
    return {"format": FORMAT, "workload": key, "task": task, "tvm": versions()[1], "func": text}
