"""Tuning: tasks → spaces → search → measure → log; and the log's winners applied to a module."""

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
