"""A model's kernels as tuning tasks: what `tvmx tune` measures here, elsewhere, or puts into a bundle."""

from __future__ import annotations

from typing import Any

from tvmx.target import Target
from tvmx.tune.task import Task, extract_tasks


def tasks_of(
    model: Any,
    target: Target,
    shapes: Any = None,
    constants: Any = None,
    precision: Any = None,
    prefer: str | None = None,
) -> list[Task]:
    """The distinct kernels of every program of a model, lowered for `target`. Raises ModelError, ConfigError."""
    from tvmx import api
    from tvmx.precision import rules_from

    models: dict[str, Any] = {}
    api._flatten("main", api._programs(model, shapes, constants), models, {})
    rules, known = rules_from(precision, prefer=prefer), api._node_names(models)
    lowered = [api.lower(m, target, precision=rules, also_known=known) for m in models.values()]
    return [task for low in lowered for task in extract_tasks(low.mod)]
