"""Measure the candidates of an offline bundle: `python run.py` in its folder, on a machine without tvmx or TVM.

Appends a line to results.jsonl for every candidate as soon as it is measured; started again, it goes on from there.
Each candidate runs in a process that may crash. Needs numpy and, for GPUs, the CUDA driver.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tvmx.errors import TuneError
from tvmx.tune.judge import NOISE, contest, digits, robust_seconds
from tvmx.tune.worker import Worker, WorkerCrash, WorkerTimeout

FORMAT = 1
MANIFEST, SUM, RESULTS = "manifest.json", "manifest.sha256", "results.jsonl"
DONE, BROKEN, NO_DEVICE, DAMAGED, LEFT = 0, 2, 3, 4, 5
"""Exit codes: all measured; no usable bundle; no such device; some candidates' files are damaged; time is over."""

CHUNK = 16  # candidates of a task before the next task's turn
CHALLENGERS = 3  # of a task that meet its default


class BundleError(Exception):
    """The bundle's manifest is missing, damaged, or of another version."""


def load_manifest(folder: Path) -> dict[str, Any]:
    """Raises BundleError."""
    try:
        data = (folder / MANIFEST).read_bytes()
        expected = (folder / SUM).read_text().strip()
    except OSError as error:
        raise BundleError(f"{folder} is no offline bundle: {error}") from None
    if hashlib.sha256(data).hexdigest() != expected:
        raise BundleError(f"{folder / MANIFEST} is damaged (its checksum differs); unpack the bundle again")
    found: dict[str, Any] = json.loads(data)
    if found.get("format") != FORMAT:
        raise BundleError(f"bundle format {found.get('format')!r}; this runner reads format {FORMAT}")
    return found


@dataclass
class Results:
    """The results file: what is measured already, and where new lines go."""

    path: Path
    bundle: str
    statuses: dict[tuple[str, str], str] = field(default_factory=dict)  # (workload, candidate) → status
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    verdicts: dict[tuple[str, str], str] = field(default_factory=dict)
    workloads: set[str] = field(default_factory=set)

    @contextlib.contextmanager
    def open(self) -> Iterator[Results]:
        """Read what is there; hold the file alone. Raises BundleError when another runner does, or it is foreign."""
        with open(self.path, "ab+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BundleError(f"another runner is writing {self.path}") from None
            file.seek(0)
            data = file.read()
            if data and not data.endswith(b"\n"):
                file.write(b"\n")  # a line that a kill cut off stays apart
                file.flush()
            self._file = file
            for line in data.split(b"\n"):
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    self._note(json.loads(line))
            yield self

    def write(self, obj: dict[str, Any]) -> None:
        """One line, on the disk before this returns."""
        obj = {**obj, "bundle": self.bundle}
        self._file.write(json.dumps(obj, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._note(obj)

    def _note(self, obj: dict[str, Any]) -> None:
        if obj["bundle"] != self.bundle:
            raise BundleError(
                f"{self.path} holds results of another bundle, device or cache mode; name another file with --out"
            )
        if obj["kind"] == "workload":
            self.workloads.add(obj["workload"])
            return
        key = (obj["workload"], obj["candidate"])
        if obj["kind"] == "trial":
            self.statuses[key] = obj["status"]
            if obj["status"] == "OK":
                self.seconds[key] = robust_seconds(obj["run_s"])
        elif obj["kind"] == "verdict":
            self.verdicts[key] = obj["status"]


class Session:
    """One run over a bundle on one device."""

    def __init__(self, folder: Path, manifest: dict[str, Any], device: str, cache: str | None, deadline: float) -> None:
        self.folder, self.manifest, self.device = folder, manifest, device
        self.measure = {**manifest["measure"], **({"cache": cache} if cache else {})}
        self.deadline = deadline
        self.worker = Worker("tvmx.tune.runner", {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
        self.damaged: list[str] = []
        self.hardware = ""
        self._good: dict[str, bool] = {}

    def check_device(self) -> str:
        """Why candidates cannot run here; empty when they can."""
        answer = self.request({"op": "facts", "device": self.device}, 60.0)
        if answer["status"] != "OK":
            return str(answer["error"])
        facts = answer["facts"]
        self.hardware = facts["name"]
        wanted = self.manifest["sm"]
        if facts["kind"] == "cpu":
            if wanted:
                return f"these candidates are for a GPU (sm_{wanted}); choose --device cuda:0"
            if facts["arch"] != self.manifest["machine"]:
                return f"these candidates are for {self.manifest['machine']}, this machine is {facts['arch']}"
        elif not wanted:
            return "these candidates are for a CPU; choose --device cpu"
        elif facts["sm"] // 10 != wanted // 10 or facts["sm"] < wanted:
            return f"these candidates are for sm_{wanted}, this device is {facts['name']}"
        return ""

    def run(self, results: Results) -> int:
        """Measure what is left. Returns how many candidates still are."""
        tasks = self.manifest["tasks"]
        for task in tasks:
            if task["workload"] not in results.workloads:
                line = {"kind": "workload", "workload": task["workload"], "task": task["name"], "func": task["func"]}
                results.write({**line, "format": self.manifest["record_format"], "tvm": self.manifest["tvm"]})
        longest = max((len(t["candidates"]) for t in tasks), default=0)
        for start in range(0, longest, CHUNK):
            for task in tasks:
                for candidate in task["candidates"][start : start + CHUNK]:
                    if time.monotonic() > self.deadline:
                        return self.left(results)
                    self.trial(task, candidate, results)
        for task in tasks:
            if time.monotonic() > self.deadline:
                break
            self.confirm(task, results)
        return self.left(results)

    def left(self, results: Results) -> int:
        """Candidates that another run could measure."""
        open_tasks = [t for t in self.manifest["tasks"] if not self.blocked(t, results)]
        every = [(t, c) for t in open_tasks for c in t["candidates"] if c["file"] not in self.damaged]
        return sum((t["workload"], c["id"]) not in results.statuses for t, c in every)

    def blocked(self, task: dict[str, Any], results: Results) -> bool:
        """Is there nothing to compare this task's candidates with?"""
        files = {task["reference"]["file"]}
        if self.reference_of(task)[1] != "cpu":
            default = task["candidates"][0]
            status = results.statuses.get((task["workload"], default["id"]), "OK")
            if status != "OK":
                return True
        return bool(files & set(self.damaged))

    def trial(self, task: dict[str, Any], candidate: dict[str, Any], results: Results) -> None:
        key = (task["workload"], candidate["id"])
        if key in results.statuses:
            return
        if not self.intact(task["reference"]) or not self.intact(candidate) or self.blocked(task, results):
            return
        best = min((s for (w, _), s in results.seconds.items() if w == task["workload"]), default=None)
        limit = best * self.measure["give_up"] if best is not None else None
        request = {"op": "trial", "path": self.path(candidate), "give_up_s": limit, "spec": self.spec(task, 0)}
        answer = self.request(request, self.measure["run_timeout_s"])
        ok = answer["status"] == "OK"
        results.write(
            {
                "kind": "trial",
                **self.record(task, candidate, answer["status"]),
                "decisions": candidate["decisions"],
                "run_s": digits(answer["samples"]) if ok else [],
                "error": answer["error"],
                "default": candidate["default"],
            }
        )
        figure = (
            f"{robust_seconds(answer['samples']) * 1e6:10.2f} us" if ok else f"{answer['status']} {answer['error']}"
        )
        print(f"{task['name'][:48]:48} {candidate['id']} {figure}", flush=True)

    def confirm(self, task: dict[str, Any], results: Results) -> None:
        """The fastest candidates of a task meet its default, interleaved, until one beats it."""
        default, workload = task["candidates"][0], task["workload"]
        base = results.seconds.get((workload, default["id"]))
        if base is None or any(w == workload and v == "CONFIRMED" for (w, _), v in results.verdicts.items()):
            return
        least = base * (1 - self.measure["min_gain"])
        times = {c["id"]: results.seconds.get((workload, c["id"])) for c in task["candidates"]}
        faster = sorted((s, i) for i, s in times.items() if s is not None and s < least and i != default["id"])
        by_id = {c["id"]: c for c in task["candidates"]}
        for _, name in faster[:CHALLENGERS]:
            if (workload, name) in results.verdicts:
                continue
            if not self.intact(by_id[name]) or not self.intact(default):
                continue
            self.verdict(task, by_id[name], results)
            if results.verdicts.get((workload, name)) == "CONFIRMED":
                return

    def verdict(self, task: dict[str, Any], candidate: dict[str, Any], results: Results) -> None:
        default = task["candidates"][0]
        seeds = iter((1, 2))

        def compare() -> tuple[str, str, list[list[float]]]:
            request: dict[str, Any] = {"op": "compare", "paths": [self.path(default), self.path(candidate)]}
            request |= {"rounds": self.measure["rounds"], "spec": self.spec(task, next(seeds))}
            answer = self.request(request, 2 * self.measure["run_timeout_s"])
            return answer["status"], answer["error"], answer["samples"]

        reason, (before, after) = contest(compare, 2, self.measure["min_gain"])
        status = "REJECTED" if reason else "CONFIRMED"
        verdict = {"default_hash": task["default_hash"], "default_s": digits(before), "run_s": digits(after)}
        if reason and not (before and after):
            verdict |= {"default_s": [], "run_s": []}
        record = self.record(task, candidate, status)
        results.write({"kind": "verdict", **record, **verdict, "reason": reason})
        gain = f"{robust_seconds(before) / robust_seconds(after):.3f} x the default" if before and after else ""
        quiet = " (a quieter machine may tell)" if reason.endswith(NOISE) else ""
        print(f"{task['name'][:48]:48} {candidate['id']} {status} {gain} {reason}{quiet}", flush=True)

    def record(self, task: dict[str, Any], candidate: dict[str, Any], status: str) -> dict[str, Any]:
        """What every line of a log has."""
        return {
            "workload": task["workload"],
            "task": task["name"],
            "target": self.manifest["target"],
            "rule": candidate["rule"],
            "trace": candidate["trace"],
            "status": status,
            "hardware": self.hardware,
            "tvmx": self.manifest["tvmx"],
            "tvm": self.manifest["tvm"],
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
            "format": self.manifest["record_format"],
            "candidate": candidate["id"],
        }

    def spec(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        path, device = self.reference_of(task)
        m = self.measure
        return {
            "args": task["args"],
            "outputs": task["outputs"],
            "reference": path,
            "reference_device": device,
            "device": self.device,
            "threads": m["threads"],
            "seed": m["seed"] + seed,
            "repeat": m["repeat"],
            "min_repeat_s": m["min_repeat_s"],
            "warmup_s": m["warmup_s"],
            "cache": m["cache"],
            "rotate_bytes": m["rotate_bytes"],
        }

    def reference_of(self, task: dict[str, Any]) -> tuple[str, str]:
        given = task["reference"]
        return self.path(given), "cpu" if given["device"] == "cpu" else self.device

    def path(self, entry: dict[str, Any]) -> str:
        return str(self.folder / entry["file"])

    def intact(self, entry: dict[str, Any]) -> bool:
        """Is the file as it was written? A damaged shared object may kill the process that opens it."""
        name = entry["file"]
        if name not in self._good:
            try:
                found = hashlib.sha256((self.folder / name).read_bytes()).hexdigest()
            except OSError:
                found = ""
            self._good[name] = found == entry["sha256"]
            if not self._good[name]:
                self.damaged.append(name)
                print(f"{name} is damaged or missing and not measured", file=sys.stderr)
        return self._good[name]

    def request(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self.worker.request(request, timeout_s)
        except WorkerTimeout as error:
            return {"status": "RUN_TIMEOUT", "samples": [], "error": str(error)}
        except WorkerCrash as error:
            return {"status": "RUN_CRASH", "samples": [], "error": str(error)}
        return answer


def main(folder: Path, argv: list[str] | None = None) -> int:
    """The command. Returns one of the exit codes above."""
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__)
    parser.add_argument("--device", help="cuda:0, cuda:1, ... or cpu (default: what the candidates are for)")
    parser.add_argument("--out", type=Path, default=folder / RESULTS, help="results file, gone on with if there")
    parser.add_argument("--time-budget-s", type=float, default=480.0)
    parser.add_argument("--cache", choices=["rotate", "hot", "cold"], help="cold: L2 is flushed before every call")
    parser.add_argument("--check", action="store_true", help="only check files and device")
    parser.add_argument("--serve", metavar="HOST:PORT", help="measure for a tuning session elsewhere instead")
    parser.add_argument("--key-file", type=Path, help="with --serve: a file with the secret that both sides know")
    args = parser.parse_args(argv)
    try:
        if args.serve:
            from tvmx.tune.rpc_server import serve_forever

            return serve_forever(args.serve, args.key_file, args.device or "cuda:0")
        return _measure(folder, args)
    except (BundleError, TuneError) as error:
        print(f"run.py: {error}", file=sys.stderr)
        return BROKEN


def _measure(folder: Path, args: argparse.Namespace) -> int:
    manifest = load_manifest(folder)
    device = args.device or ("cuda:0" if manifest["sm"] else "cpu")
    session = Session(folder, manifest, device, args.cache, time.monotonic() + args.time_budget_s)
    try:
        if args.check:
            every = [e for t in manifest["tasks"] for e in (t["reference"], *t["candidates"])]
            print(f"{sum([session.intact(e) for e in every])} of {len(every)} files are as they were written")
            if session.damaged:
                return DAMAGED
        reason = session.check_device()
        if reason:
            print(f"run.py: nothing was measured: {reason}", file=sys.stderr)
            return NO_DEVICE
        print(f"{session.hardware}: {sum(len(t['candidates']) for t in manifest['tasks'])} candidates", flush=True)
        if args.check:
            return DONE
        identity = f"{manifest['id']} {session.hardware} {session.measure['cache']}"
        with Results(args.out, identity).open() as results:
            left = session.run(results)
            won = sum(v == "CONFIRMED" for v in results.verdicts.values())
            print(f"{len(results.statuses)} measured, {left} left, {won} winners confirmed: {args.out}")
            print(f"take it home: tvmx log import {args.out.name} LOG_FOLDER")
    finally:
        session.worker.close()
    return LEFT if left else DAMAGED if session.damaged else DONE
