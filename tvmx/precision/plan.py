"""The precision of every operator of one program, with the reason of each: printed, saved, diffed, applied."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tvmx.errors import ConfigError
from tvmx.precision.rules import Assignment, PrecisionRules


@dataclass(frozen=True)
class Entry:
    """One operator's assignment. `name` is its ONNX node's, with `:kind` where the node became several operators.

    `storage`: the target has no arithmetic of this precision; constants are stored in it, the rest is float32.
    """

    name: str
    kind: str
    assignment: Assignment
    reason: str = ""
    storage: bool = False

    @property
    def precision(self) -> str:
        return self.assignment.precision


@dataclass(frozen=True)
class PrecisionPlan:
    """Entries in program order; names are unique."""

    entries: tuple[Entry, ...] = ()
    io: str = "keep"

    def __post_init__(self) -> None:
        repeated = [name for name, count in Counter(e.name for e in self.entries).items() if count > 1]
        if repeated:
            raise ConfigError(f"a precision plan names {repeated[0]!r} twice; keep one of them")

    def __getitem__(self, name: str) -> Entry:
        """Raises ConfigError naming the nearest operators."""
        from tvmx.precision.resolve import nearest

        for entry in self.entries:
            if entry.name == name:
                return entry
        raise ConfigError(f"no operator {name!r} in the plan; {nearest(name, [e.name for e in self.entries])}")

    @property
    def is_identity(self) -> bool:
        """True if the plan changes nothing in a float32 program."""
        return self.io in ("keep", "fp32") and all(e.precision == "fp32" for e in self.entries)

    def rules(self) -> PrecisionRules:
        """Rules that assign exactly this to the same program."""
        return PrecisionRules(operators={e.name: e.assignment for e in self.entries}, io=self.io, prefer="size")

    def counts(self) -> dict[str, int]:
        """Operators by precision."""
        return dict(Counter(str(e.assignment) for e in self.entries).most_common())

    def reasons(self) -> dict[str, int]:
        """Operators by "precision: reason", most frequent first."""
        return dict(Counter(f"{e.assignment}: {e.reason}" for e in self.entries).most_common())

    def diff(self, other: PrecisionPlan) -> list[str]:
        """One line for every operator that differs, as `name: before -> after`; absent ones are "-"."""
        mine, theirs = ({e.name: str(e.assignment) for e in p.entries} for p in (self, other))
        lines = [
            f"{name}: {mine.get(name, '-')} -> {theirs.get(name, '-')}"
            for name in dict.fromkeys((*mine, *theirs))
            if mine.get(name) != theirs.get(name)
        ]
        return lines + ([f"io: {self.io} -> {other.io}"] if self.io != other.io else [])

    def __str__(self) -> str:
        rows = [(e.name, e.kind, str(e.assignment), e.assignment.accumulate, e.reason) for e in self.entries]
        rows.insert(0, ("operator", "kind", "precision", "accumulate", "reason"))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths)), row[4]]).rstrip() for row in rows]
        total = ", ".join(f"{count} {name}" for name, count in self.counts().items())
        return "\n".join([*lines, f"{len(self.entries)} operators: {total}; inputs and outputs: {self.io}"])

    def to_json(self) -> dict[str, Any]:
        entries = [{**asdict(e), "assignment": None} | asdict(e.assignment) for e in self.entries]
        for entry in entries:
            del entry["assignment"]
        return {"version": 1, "io": self.io, "entries": entries}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PrecisionPlan:
        """Raises ConfigError for what is no plan."""
        try:
            entries = tuple(
                Entry(e["name"], e["kind"], Assignment(e["precision"], e["accumulate"]), e["reason"], e["storage"])
                for e in data["entries"]
            )
            return cls(entries, data["io"])
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"not a precision plan: {error!r} is missing or misplaced; save one with `tvmx precision`"
            ) from None

    def save(self, path: str | Path) -> None:
        """Write the plan, atomically: `.json` as it is, `.toml` as rules that name every operator."""
        from tvmx.precision.files import plan_toml
        from tvmx.report.files import write_text

        path = Path(path)
        if path.suffix not in (".json", ".toml"):
            raise ConfigError(f"{path}: save a precision plan as .toml or .json")
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n" if path.suffix == ".json" else plan_toml(self))
