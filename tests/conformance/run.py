"""Run ONNX's backend node tests through tvmx and print pass / unsupported / wrong by operator.

`python -m tests.conformance.run --all --json out.json`. Each worker is a process of its own: a test
that kills it counts as a crash, and a fresh worker goes on. With `--resume out.jsonl` each outcome is
appended there at once, and tests that stand there already are not run again.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.conformance.suite import Case, Outcome, cases, run_case

TIMEOUT_S = 120
CASES_A_WORKER = 150  # then a fresh one takes over: what compiled code a process loaded, it keeps


def run_all(
    todo: list[Case], via: str, workers: int, progress: Callable[[Outcome], None] | None = None
) -> list[Outcome]:
    """Outcomes in the order of `todo`."""
    # The parent must not have loaded TVM: its threads do not survive the fork.
    context = multiprocessing.get_context("fork")
    results: dict[int, Outcome] = {}
    waiting = list(range(len(todo)))[::-1]
    alive: dict[Connection, tuple[Any, int, float]] = {}
    served: Counter[Connection] = Counter()

    def start() -> Connection:
        mine, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, todo, via), daemon=True)
        process.start()
        theirs.close()
        alive[mine] = (process, -1, 0.0)
        return mine

    def give(conn: Connection) -> None:
        process, _, _ = alive[conn]
        if not waiting or served[conn] == CASES_A_WORKER:
            conn.send(-1)  # closing would not end it: a forked child holds both ends of its pipe
            del alive[conn]
            process.join()
            if waiting:
                give(start())
            return
        served[conn] += 1
        index = waiting.pop()
        alive[conn] = (process, index, time.monotonic())
        conn.send(index)

    def done(index: int, outcome: Outcome) -> None:
        results[index] = outcome
        if progress:
            progress(outcome)

    for _ in range(min(workers, len(todo))):
        give(start())
    while alive:
        for conn in wait(list(alive), timeout=5):
            assert isinstance(conn, Connection)
            process, index, _ = alive[conn]
            try:
                done(index, conn.recv())
                give(conn)
            except EOFError:
                process.join()
                case = todo[index]
                done(index, Outcome(case.name, case.op, "crash", f"exit code {process.exitcode}"))
                del alive[conn]
                if waiting:
                    give(start())
        for conn, (process, index, since) in list(alive.items()):
            if time.monotonic() - since > TIMEOUT_S:
                process.kill()
                process.join()
                case = todo[index]
                done(index, Outcome(case.name, case.op, "crash", f"longer than {TIMEOUT_S} s"))
                del alive[conn]
                if waiting:
                    give(start())
    return [results[i] for i in range(len(todo))]


def _work(conn: Connection, todo: list[Case], via: str) -> None:
    warnings.simplefilter("ignore")
    faulthandler.disable()
    # TVM prints its own diagnostics; the table is what matters here.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    while (index := conn.recv()) >= 0:
        conn.send(run_case(todo[index], via))


def table(outcomes: list[Outcome]) -> str:
    """Counts by operator, the operators that do not pass fully first."""
    by_op: dict[str, Counter[str]] = defaultdict(Counter)
    for o in outcomes:
        by_op[o.op][o.status] += 1
    kinds = ("pass", "unsupported", "wrong", "crash")
    lines = [f"{'operator':28}" + "".join(f"{k:>13}" for k in kinds)]
    counted = {op: c for op, c in by_op.items() if any(c[k] for k in kinds)}
    for op, c in sorted(counted.items(), key=lambda x: (sum(x[1][k] for k in kinds[1:]) == 0, x[0])):
        lines.append(f"{op:28}" + "".join(f"{c[k] or '':>13}" for k in kinds))
    total = Counter(o.status for o in outcomes)
    inside = sum(total[k] for k in kinds)
    lines.append(f"{'total':28}" + "".join(f"{total[k]:>13}" for k in kinds))
    rate = 100 * total["pass"] / inside if inside else 0.0
    lines.append(
        f"{inside} float and integer tests, {rate:.1f} % pass; {total['out of scope']} more are out "
        "of scope (strings, sequences, optionals, training, classic machine learning)"
    )
    return "\n".join(lines)


def _read_outcomes(path: Path | None) -> list[Outcome]:
    if path is None or not path.exists():
        return []
    return [Outcome(**json.loads(line)) for line in path.read_text().splitlines() if line.endswith("}")]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.conformance.run", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every test (the default)")
    parser.add_argument("--sample", type=int, default=1, metavar="N", help="every Nth test")
    parser.add_argument("--match", default="", help="only tests with this text in their name")
    parser.add_argument("--op", default="", help="only tests of this operator")
    parser.add_argument("--via", choices=("vm", "so"), default="so")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write all outcomes here")
    parser.add_argument("-v", "--verbose", action="store_true", help="print what does not pass")
    parser.add_argument("--resume", type=Path, metavar="JSONL", help="append outcomes here; skip those it holds")
    args = parser.parse_args(argv)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        todo = [c for c in cases() if args.match in c.name and args.op in ("", c.op)]
    todo = todo[:: 1 if args.all else args.sample]

    known = {o.name: o for o in _read_outcomes(args.resume)}

    def progress(o: Outcome) -> None:
        if args.resume:
            with args.resume.open("a") as file:
                file.write(json.dumps(vars(o)) + "\n")
        if args.verbose and o.status not in ("pass", "out of scope"):
            print(f"{o.status:12} {o.name}: {o.detail[:400]}", flush=True)

    run = run_all([c for c in todo if c.name not in known], args.via, args.workers, progress)
    known |= {o.name: o for o in run}
    outcomes = [known[c.name] for c in todo]
    print(table(outcomes))
    if args.json:
        import onnx

        content = {
            "onnx": onnx.__version__,
            "via": args.via,
            "total": Counter(o.status for o in outcomes),
            "outcomes": [vars(o) for o in outcomes],
        }
        args.json.write_text(json.dumps(content, indent=1))
    bad = [o for o in outcomes if o.status in ("wrong", "crash")]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
