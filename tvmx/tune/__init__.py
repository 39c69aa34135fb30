"""Tuning: tasks → spaces → search → measure → log; and the log's winners applied to a module.

The package is callable: `tvmx.tune(model, ...)` is `tvmx.api.tune`, although importing this package puts it in the
place of a function of that name in `tvmx`.
"""

import sys
import types
from typing import Any

from tvmx.tune.apply import apply_schedules
from tvmx.tune.log import TuningLog
from tvmx.tune.lookup import open_logs
from tvmx.tune.measure import MeasureConfig
from tvmx.tune.progress import Progress
from tvmx.tune.search import SearchConfig
from tvmx.tune.session import TuneReport, tune
from tvmx.tune.task import Task, extract_tasks

__all__ = [
    "MeasureConfig",
    "Progress",
    "SearchConfig",
    "Task",
    "TuneReport",
    "TuningLog",
    "apply_schedules",
    "extract_tasks",
    "open_logs",
    "tune",
]


class _CallablePackage(types.ModuleType):
    def __call__(self, *args: Any, **options: Any) -> TuneReport:
        from tvmx.api import tune as tune_model

        report: TuneReport = tune_model(*args, **options)
        return report


sys.modules[__name__].__class__ = _CallablePackage
