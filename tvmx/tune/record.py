"""What one line of a tuning log says: a measured trial, or the verdict on a winner."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import math
import os
from dataclasses import dataclass, field
from typing import Any

from tvmx.errors import ConfigError
from tvmx.target import _LLVM_ARM, _LLVM_X86, Gpu, Target, cpu_model, detect_host
from tvmx.tune.judge import robust_seconds

FORMAT = 1

STATUSES = (
    "OK",
    "BUILD_ERROR",
    "BUILD_TIMEOUT",
    "BUILD_CRASH",
    "RUN_ERROR",
    "RUN_TIMEOUT",
    "RUN_CRASH",
    "WRONG_OUTPUT",
)
CONFIRMED, REJECTED, PREDICTED = "CONFIRMED", "REJECTED", "PREDICTED"


@functools.cache
def hardware_fingerprint() -> str:
    """CPU model, cores and cache sizes of this machine."""
    host = detect_host()
    sizes = "/".join(f"{size >> 10}K" for size in (host.l1_bytes, host.l2_bytes, host.l3_bytes))
    return f"{cpu_model()} | {os.cpu_count()} cores | {sizes}"


@functools.cache
def versions() -> tuple[str, str]:
    """Of tvmx and of TVM."""
    from tvmx import __version__

    return __version__, importlib.metadata.version("apache-tvm")


def now() -> str:
    """UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds")


@dataclass(frozen=True)
class Record:
    """Fields that every record has."""

    workload: str  # workload_hash of the unscheduled kernel
    task: str  # a name for people
    target: dict[str, Any]  # `target_to_json`
    rule: str  # the schedule rule or space that the trace comes from
    trace: Any  # TVM's JSON form of the schedule's trace
    status: str
    hardware: str = field(default_factory=hardware_fingerprint)
    tvmx: str = field(default_factory=lambda: versions()[0])
    tvm: str = field(default_factory=lambda: versions()[1])
    time: str = field(default_factory=now)
    format: int = FORMAT

    def __post_init__(self) -> None:
        for name in ("workload", "task", "rule", "status", "hardware"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a string")
        if not isinstance(self.target, dict):
            raise ValueError("target must be an object")


@dataclass(frozen=True)
class Trial(Record):
    """One candidate and what became of it. `run_s` holds every sample (seconds a call), empty unless OK."""

    decisions: list[Any] = field(default_factory=list)  # of the trace's sampling instructions, in order
    run_s: list[float] = field(default_factory=list)
    error: str = ""
    default: bool = False  # the untuned schedule, trial 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.status not in STATUSES:
            raise ValueError(f"unknown status {self.status!r}")
        _check_seconds(self.run_s)
        if (self.status == "OK") != bool(self.run_s):
            raise ValueError("run_s must hold samples if and only if the status is OK")

    @property
    def seconds(self) -> float | None:
        """The latency that this trial counts with, None if it failed."""
        return robust_seconds(self.run_s) if self.run_s else None


@dataclass(frozen=True)
class Verdict(Record):
    """A winner measured again, interleaved with the default, outputs compared. CONFIRMED or REJECTED."""

    default_hash: str = ""  # identity of the scheduled default that it was compared with
    default_s: list[float] = field(default_factory=list)
    run_s: list[float] = field(default_factory=list)
    reason: str = ""  # of a rejection

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.status not in (CONFIRMED, REJECTED):
            raise ValueError(f"unknown status {self.status!r}")
        _check_seconds(self.run_s)
        _check_seconds(self.default_s)
        if self.status == CONFIRMED and not (self.default_s and self.run_s):
            raise ValueError("a confirmation needs both samples")

    @property
    def speedup(self) -> float:
        """Default's latency over the winner's."""
        if not (self.default_s and self.run_s):
            return 1.0
        return robust_seconds(self.default_s) / robust_seconds(self.run_s)


@dataclass(frozen=True)
class Prediction(Record):
    """A candidate that no device has run: a model's estimate. Never counted among trials, never a winner.

    `facts` are the compiler's: registers, spills, shared memory, resident blocks.
    """

    decisions: list[Any] = field(default_factory=list)
    predicted_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    default: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.status != PREDICTED:
            raise ValueError(f"unknown status {self.status!r}")
        _check_seconds([self.predicted_s])


AnyRecord = Trial | Verdict | Prediction
_KINDS: dict[str, type[AnyRecord]] = {"trial": Trial, "verdict": Verdict, "prediction": Prediction}


def to_json(record: AnyRecord) -> dict[str, Any]:
    """A record as a JSON object: `kind`, then the dataclass' fields."""
    kind = next(name for name, cls in _KINDS.items() if isinstance(record, cls))
    return {"kind": kind, **dataclasses.asdict(record)}


def from_json(obj: Any) -> AnyRecord:
    """The record in a parsed line; fields it does not know are ignored. Raises ValueError for any other line."""
    if not isinstance(obj, dict) or obj.get("kind") not in _KINDS:
        raise ValueError("not a record")
    if obj.get("format") != FORMAT:
        raise ValueError(f"record format {obj.get('format')!r}; this tvmx reads format {FORMAT}")
    cls = _KINDS[obj["kind"]]
    known = {f.name for f in dataclasses.fields(cls)}
    try:
        return cls(**{k: v for k, v in obj.items() if k in known})
    except TypeError as error:
        raise ValueError(str(error)) from None


def _check_seconds(samples: list[float]) -> None:
    if not isinstance(samples, list) or not all(isinstance(s, (int, float)) and 0 < s < math.inf for s in samples):
        raise ValueError("samples must be positive seconds")


def target_to_json(target: Target) -> dict[str, Any]:
    """Every field of a Target, with the features that code generation knows."""
    features = sorted(f for f in target.features if f in _LLVM_X86 or f in _LLVM_ARM or f == "asimd")
    return {**dataclasses.asdict(target), "features": features}


def target_from_json(obj: dict[str, Any]) -> Target:
    """The inverse. Raises ValueError for anything else."""
    known = {f.name for f in dataclasses.fields(Target)}
    try:
        fields = {k: v for k, v in obj.items() if k in known}
        if fields.get("gpu"):
            fields["gpu"] = Gpu(**fields["gpu"])
        return Target(**{**fields, "features": frozenset(fields["features"])})
    except (TypeError, KeyError, ConfigError) as error:
        raise ValueError(f"not a target: {error}") from None


def target_class(target: Target) -> str:
    """The instruction set level by which logs are shared: `x86_64-avx512-vnni`, `aarch64-dotprod`, ..."""
    if target.kind != "cpu":
        return target.name
    if target.arch == "aarch64":
        return f"aarch64-{'dotprod' if target.has('asimddp') else 'neon'}" + ("-i8mm" if target.has("i8mm") else "")
    level = {64: "avx512", 32: "avx2"}.get(target.vector_bytes, "sse")
    level += "-vnni" if target.has("avx512_vnni") or (level == "avx2" and target.has("avx_vnni")) else ""
    return f"{target.arch}-{level}" + ("-amx" if target.has("amx_int8") else "")


def target_key(target: Target) -> tuple[str, int]:
    """Records fit a target of equal instruction set level and equal thread count."""
    return target_class(target), target.threads
