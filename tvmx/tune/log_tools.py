"""`tvmx log`: show, best, merge, prune, and conversion to and from MetaSchedule's two-file JSON database."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tvmx.errors import TuneError
from tvmx.report.files import write_text
from tvmx.target import Target, resolve
from tvmx.tune.log import TuningLog
from tvmx.tune.lookup import open_logs
from tvmx.tune.record import (
    CONFIRMED,
    AnyRecord,
    Prediction,
    Trial,
    Verdict,
    target_from_json,
    target_key,
    target_to_json,
    to_json,
)
from tvmx.tune.workload import canonical, workload_hash

MS_WORKLOADS, MS_RECORDS = "database_workload.json", "database_tuning_record.json"


def run_action(action: str, folders: Sequence[Path]) -> dict[str, Any]:
    """Do one action of `tvmx log` and report on it. Raises TuneError for a wrong action or folder."""
    actions: dict[str, tuple[int, Callable[..., dict[str, Any]]]] = {
        "show": (1, show),
        "best": (1, best),
        "prune": (1, prune),
        "merge": (2, lambda *paths: merge(paths[:-1], paths[-1])),
        "export": (2, export_metaschedule),
        "import": (2, import_any),
    }
    if action not in actions:
        raise TuneError(f"unknown action {action!r}; use one of {', '.join(actions)}")
    least, function = actions[action]
    if len(folders) < least or (action != "merge" and len(folders) > least):
        raise TuneError(f"`tvmx log {action}` takes {'a source and a destination' if least == 2 else 'one'} folder")
    return function(*folders)


def show(folder: Path) -> dict[str, Any]:
    """How many records of each kind and status, for which targets, and which lines are damaged."""
    log = _open(folder)
    kinds = Counter(f"{to_json(r)['kind']} {r.status}" for r in log.records)
    targets = Counter(_target_name(r) for r in log.records)
    return {
        "workloads": len(log.workloads),
        "records": len(log.records),
        **dict(sorted(kinds.items())),
        "targets": dict(targets),
        "damaged": [str(d) for d in log.damage],
    }


def best(folder: Path) -> dict[str, Any]:
    """Per task and target: the confirmed winner's rule, latency and speed-up on the default."""
    log = _open(folder)
    out: dict[str, Any] = {}
    for record in _winners(log.records):
        out[f"{record.task} [{_target_name(record)}] {record.workload}"] = {
            "rule": record.rule,
            "us": round(1e6 * min(record.run_s), 2),
            "speedup": round(record.speedup, 3),
            "time": record.time,
        }
    return out


def merge(sources: Sequence[Path], destination: Path) -> dict[str, Any]:
    """Append to `destination` what it lacks of the sources; says how much that was."""
    into = TuningLog(destination)
    seen = {_identity(r) for r in into.records}
    added = 0
    for source in sources:
        log = _open(source)
        into.add_encoded(log.encoded())
        new = {_identity(r): r for r in log.records if _identity(r) not in seen}
        seen |= new.keys()
        into.append(list(new.values()))
        added += len(new)
    return {"added": added, "records": len(into.records), "workloads": len(into.workloads)}


def prune(folder: Path, keep_trials: int = 0) -> dict[str, Any]:
    """Keep the newest confirmed winner of each workload and target, and its `keep_trials` fastest trials."""
    log = _open(folder, readonly=False)
    before = len(log.records)

    def select(records: list[AnyRecord]) -> list[AnyRecord]:
        kept: set[int] = {id(r) for r in _winners(records)}
        trials: dict[Any, list[Trial]] = {}
        for record in records:
            if isinstance(record, Trial) and record.seconds is not None:
                trials.setdefault(_key(record), []).append(record)
        for found in trials.values():
            kept |= {id(r) for r in sorted(found, key=lambda r: r.seconds or 0.0)[:keep_trials]}
        return [r for r in records if id(r) in kept]

    log.rewrite(select)
    return {"records before": before, "records": len(log.records), "workloads": len(log.workloads)}


def export_metaschedule(folder: Path, destination: Path) -> dict[str, Any]:
    """Write the OK trials and winners as MetaSchedule's `database_workload.json` and `database_tuning_record.json`."""
    import tvm

    from tvmx.compat import load_tensor_intrinsics

    load_tensor_intrinsics()
    from tvm.s_tir.meta_schedule import arg_info, database

    log = _open(folder)
    index: dict[str, int] = {}
    workloads, lines = [], []
    skipped = 0
    for record in log.records:
        measured = not isinstance(record, Prediction) and record.run_s
        func = log.workload(record.workload) if measured else None
        if func is None:
            skipped += 1
            continue
        if record.workload not in index:
            index[record.workload] = len(index)
            workloads.append(database.Workload(tvm.IRModule({"main": func})).as_json())
        target = target_from_json(record.target).tvm()
        arguments = [a.as_json() for a in arg_info.ArgInfo.from_prim_func(func)]
        assert not isinstance(record, Prediction)
        body = [record.trace, record.run_s, _plain(target.export()), _plain(arguments)]
        lines.append([index[record.workload], body])
    destination.mkdir(parents=True, exist_ok=True)
    for name, rows in ((MS_WORKLOADS, [_plain(w) for w in workloads]), (MS_RECORDS, lines)):
        write_text(destination / name, "".join(json.dumps(r) + "\n" for r in rows))
    return {"exported": len(lines), "workloads": len(index), "not exported (failed trials)": skipped}


def import_any(source: Path, destination: Path) -> dict[str, Any]:
    """The results of an offline bundle (a .jsonl file), or a MetaSchedule database (a folder)."""
    if source.is_file():
        from tvmx.tune.offline_import import import_results

        return import_results(source, destination)
    if not source.exists():
        raise TuneError(f"there is no {source}: give an offline bundle's results.jsonl or a MetaSchedule folder")
    return import_metaschedule(source, destination)


def import_metaschedule(folder: Path, destination: Path, target: str | Target = "native") -> dict[str, Any]:
    """Append the records of a MetaSchedule database as trials, as measured on `target`.

    MetaSchedule stores TVM's target only, which names neither caches nor the machine; so the caller says
    what they were measured on, with the thread count that each record's `num-cores` holds.
    """
    import dataclasses

    from tvmx.compat import load_tensor_intrinsics

    load_tensor_intrinsics()
    from tvm.s_tir.meta_schedule import database

    paths = [folder / MS_WORKLOADS, folder / MS_RECORDS]
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        raise TuneError(f"no MetaSchedule database at {folder}: {' and '.join(missing)} missing")
    machine = resolve(target)
    log, seen, skipped = TuningLog(destination), set(), 0
    workloads: list[Any] = []
    for line in paths[0].read_text().splitlines():
        try:
            workloads.append(database.Workload.from_json(json.loads(line)).mod["main"])
        except (ValueError, RuntimeError, TypeError, KeyError):
            workloads.append(None)
            skipped += 1
    records = []
    for line in paths[1].read_text().splitlines():
        try:
            number, (trace, run_s, tvm_target, _) = json.loads(line)
            func = workloads[number]
            cores = int(tvm_target.get("num-cores", machine.threads))
            if func is None or not run_s:
                raise ValueError("a failed trial")
            key = workload_hash(func)
            made_for = dataclasses.replace(machine, threads=cores)
            record = Trial(
                key, key, target_to_json(made_for), "metaschedule", trace, "OK", run_s=[float(s) for s in run_s]
            )
        except (ValueError, TypeError, IndexError, AttributeError):
            skipped += 1
            continue
        if key not in seen:
            log.add_workload(canonical(func), key)
            seen.add(key)
        records.append(record)
    log.append(records)
    return {"imported": len(records), "workloads": len(seen), "skipped": skipped}


def _open(folder: Path, readonly: bool = True) -> TuningLog:
    return open_logs(folder, shipped=False).logs[0] if readonly else TuningLog(folder)


def _winners(records: Sequence[AnyRecord]) -> list[Verdict]:
    newest = {_key(r): r for r in records if isinstance(r, Verdict) and r.status == CONFIRMED}
    return sorted(newest.values(), key=lambda r: r.task)


def _key(record: AnyRecord) -> Any:
    return record.workload, target_key(target_from_json(record.target))


def _target_name(record: AnyRecord) -> str:
    level, threads = target_key(target_from_json(record.target))
    return f"{level} {threads}t"


def _identity(record: AnyRecord) -> str:
    return json.dumps(to_json(record), sort_keys=True)


def _plain(obj: Any) -> Any:
    """TVM's containers as Python's, so that json can write them."""
    if obj is None or isinstance(obj, (bool, int, float, str)):
        return obj
    if hasattr(obj, "items"):
        return {str(k): _plain(v) for k, v in obj.items()}
    if hasattr(obj, "value"):
        return obj.value
    return [_plain(v) for v in obj]
