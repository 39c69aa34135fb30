"""Tune the zoo, and put the winners over today's defaults into the logs that ship with tvmx.

python -m benchmarks.tune_zoo [--models orient,minilm-l3] [--threads 1,2] [--budget-s 150] [--log DIR] [--ship]

Sessions resume, so it may be stopped and started at will. `--ship` rewrites `tuning_logs/<level>/`; with
`--budget-s 0` nothing is tuned first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import tvmx
from benchmarks.models import ModelUnavailable, ZooModel, zoo
from tvmx.api import lower
from tvmx.schedule import apply_default
from tvmx.target import Target, resolve
from tvmx.tune.apply import schedule_hash
from tvmx.tune.log import TuningLog
from tvmx.tune.record import Verdict, target_class
from tvmx.tune.task import extract_tasks

SHIPPED = Path(__file__).parent.parent / "tuning_logs"


def winners(models: Sequence[ZooModel], target: Target, sources: Sequence[TuningLog]) -> Iterator[Verdict]:
    """For each kernel of the models the first source's winner over today's default, where there is one."""
    seen = set()
    for model in models:
        imported = tvmx.import_onnx(str(model.path), shapes=model.shapes, constants=model.constants or None)
        for task in extract_tasks(lower(imported, target).mod):
            if task.workload in seen:
                continue
            seen.add(task.workload)
            default = schedule_hash(apply_default(task.func, target).func)
            found = (s.best(task.workload, target, default) for s in sources)
            if verdict := next(filter(None, found), None):
                yield verdict


def ship(models: Sequence[ZooModel], targets: Sequence[Target], log: Path) -> str:
    """Rewrite the shipped log of the targets' level from `log` and what it held; says what it holds now."""
    folder = SHIPPED / target_class(targets[0])
    shipped, tuned = TuningLog(folder), TuningLog(log, readonly=True)
    kept = [v for t in targets for v in winners(models, t, (tuned, shipped))]
    threads = {t.threads for t in targets}
    shipped.add_encoded({k: v for k, v in tuned.encoded().items() if k in {w.workload for w in kept}})
    shipped.rewrite(lambda old: [*(r for r in old if r.target["threads"] not in threads), *kept])
    size = sum(f.stat().st_size for f in folder.glob("*.jsonl"))
    return f"{folder}: {len(shipped.records)} winners of {len(shipped.workloads)} kernels, {size / 1e3:.0f} KB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="comma-separated names (default: the whole zoo)")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--budget-s", type=float, default=150.0, help="seconds for each model and thread count")
    parser.add_argument("--log", type=Path, default=SHIPPED / "local")
    parser.add_argument("--ship", action="store_true", help="rewrite the shipped log at the end (whole zoo only)")
    arguments = parser.parse_args()
    wanted = arguments.models.split(",") if arguments.models else [m.name for m in zoo()]
    models = [m for m in zoo() if m.name in wanted]
    targets = [resolve("native", int(t)) for t in arguments.threads.split(",")]
    if arguments.ship and len(models) < len(zoo()):
        parser.error("--ship needs the whole zoo: a part of it would drop the other models' winners")
    for target in targets if arguments.budget_s else ():
        for model in models:
            try:
                report = tvmx.tune(
                    str(model.path),
                    target,
                    arguments.log,
                    time_budget_s=arguments.budget_s,
                    shapes=model.shapes,
                    constants=model.constants or None,
                )
            except (tvmx.TvmxError, ModelUnavailable) as error:
                print(f"{model.name}: {type(error).__name__}: {error}", file=sys.stderr)
                return 1
            print(f"{model.name}, {target.threads} thread(s): {report}", flush=True)
            if report.interrupted:
                return 130
    if arguments.ship:
        print(ship(models, targets, arguments.log))
    return 0


if __name__ == "__main__":
    sys.exit(main())
