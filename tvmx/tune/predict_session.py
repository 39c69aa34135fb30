"""A session without any device: candidates are built, ranked by a model, and logged as predictions."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from tvmx.target import Target
from tvmx.tune.log import TuningLog
from tvmx.tune.measure import Measurer
from tvmx.tune.predict import Predictor
from tvmx.tune.progress import Progress, TaskProgress
from tvmx.tune.record import PREDICTED, Prediction, target_to_json
from tvmx.tune.report import TuneReport
from tvmx.tune.shortlist import share, shortlist
from tvmx.tune.space import Candidate
from tvmx.tune.task import Task


def predict_tasks(
    tasks: Sequence[Task],
    target: Target,
    tuning_log: TuningLog,
    measurer: Measurer,
    max_trials: int,
    time_budget_s: float,
    seed: int,
    stop: Callable[[], bool],
    show: Callable[[Progress], None],
    reason: str,
) -> TuneReport:
    """Append a `Prediction` for each candidate that builds; `reason` is why none was measured.

    No trial and no verdict is written, so nothing that `compile` uses changes.
    """
    begin = time.monotonic()
    rng = random.Random(seed)

    def over() -> bool:
        return stop() or time.monotonic() - begin > time_budget_s

    defaults: list[float] = []
    for task in tasks:
        first = shortlist(task, target, 1, rng)
        defaults.append(Predictor(task, target)(first[0]) if first else 0.0)
    failed: dict[str, int] = {}
    best: dict[str, tuple[float, str]] = {}  # workload → predicted seconds, rule
    counts: dict[str, int] = {}

    def progress(active: str, stage: str) -> Progress:
        rows = tuple(
            TaskProgress(
                t.name, best.get(t.workload, (0.0, ""))[1], t.occurrences, counts.get(t.workload, 0), 0, None, None,
                t.workload in counts, t.workload == active,
            )
            for t in tasks
        )  # fmt: skip
        return Progress(rows, sum(counts.values()), max_trials, time.monotonic() - begin, time_budget_s, stage)

    for task, count in zip(tasks, share(list(tasks), defaults, max_trials)):
        if over() or count == 0:
            break
        show(progress(task.workload, "predicting"))
        tuning_log.add_workload(task.func, task.name)
        chosen = shortlist(task, target, count, rng, over)
        model = Predictor(task, target)
        records = []
        for candidate, build in zip(chosen, measurer.build([c.func for c in chosen], over)):
            build.delete()
            if build.path is None:
                failed[build.status] = failed.get(build.status, 0) + 1
                continue
            records.append(_record(task, target, candidate, model(candidate, build.facts), build.facts))
            candidate.release()
        tuning_log.append(records)
        counts[task.workload] = len(records)
        if records:
            first_choice = min(records, key=lambda r: r.predicted_s)
            best[task.workload] = (first_choice.predicted_s, f"predicted:{first_choice.rule}")
    final = progress("", "done")
    show(final)
    return TuneReport(
        log=str(tuning_log.folder),
        progress=final,
        new_trials=0,
        failed=failed,
        confirmed=0,
        interrupted=stop(),
        seconds=time.monotonic() - begin,
        spent={},
        predicted=sum(counts.values()),
        note=reason,
    )


def _record(task: Task, target: Target, candidate: Candidate, seconds: float, facts: dict[str, object]) -> Prediction:
    return Prediction(
        task.workload,
        task.name,
        target_to_json(target),
        candidate.space,
        candidate.trace,
        PREDICTED,
        hardware="none: predicted",
        decisions=list(candidate.decisions),
        predicted_s=float(f"{seconds:.5g}"),
        facts=dict(facts),
        default=candidate.decisions == candidate.origin.given,
    )
