"""The results of an offline bundle → log records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tvmx.errors import TuneError
from tvmx.tune.log import TuningLog
from tvmx.tune.record import AnyRecord, Prediction, Verdict, from_json, to_json
from tvmx.tune.workload import decode, workload_hash


def import_results(source: Path, destination: Path) -> dict[str, Any]:
    """Append what `source` (results.jsonl) holds to the log at `destination`, made if absent; twice adds nothing.

    A line that a kill cut off is counted as damaged. Raises TuneError for a file without any result, and for the
    workload of a record that is missing or not what its hash says.
    """
    try:
        data = source.read_bytes()
    except OSError as error:
        raise TuneError(f"cannot read {source}: {error}") from None
    workloads: dict[str, tuple[str, str]] = {}
    records: list[AnyRecord] = []
    damaged = 0
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        try:
            obj = json.loads(line)
            if isinstance(obj, dict) and obj.get("kind") == "workload":
                workloads[str(obj["workload"])] = (str(obj["task"]), _checked(obj))
                continue
            record = from_json(obj)
            if isinstance(record, Prediction):
                raise ValueError("a prediction is no result")
        except (ValueError, KeyError, RecursionError):
            damaged += 1
            continue
        records.append(record)
    if not records:
        raise TuneError(f"{source} holds no results of an offline bundle ({damaged} lines are unreadable)")
    missing = {r.workload for r in records} - workloads.keys()
    if missing:
        raise TuneError(f"{source} lacks the kernel of {sorted(missing)[0]}: its lines are damaged; copy it again")
    log = TuningLog(destination)
    known = {_identity(r) for r in log.records}
    new = [r for r in records if _identity(r) not in known]
    log.add_encoded({k: v for k, v in workloads.items() if any(r.workload == k for r in records)})
    log.append(new)
    return {
        "imported": len(new),
        "known already": len(records) - len(new),
        "winners": sum(isinstance(r, Verdict) and r.status == "CONFIRMED" for r in new),
        "workloads": len(workloads),
        "damaged": damaged,
        "measured on": sorted({r.hardware for r in records}),
    }


def _checked(obj: dict[str, Any]) -> str:
    """The encoded function. Raises ValueError when it is not the one that the hash names."""
    text = obj["func"]
    if not isinstance(text, str) or workload_hash(decode(text)) != obj["workload"]:
        raise ValueError("its hash does not match")
    return text


def _identity(record: AnyRecord) -> str:
    return json.dumps(to_json(record), sort_keys=True)
