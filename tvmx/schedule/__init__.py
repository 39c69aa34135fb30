"""Schedule rules: registry, analysis of a workload, application of defaults and spaces."""

from tvmx.schedule.registry import (
    Rule,
    Scheduled,
    apply_default,
    apply_rule,
    rules_for,
    schedule_rule,
)
from tvmx.schedule.workload import Block, Workload

__all__ = [
    "Block",
    "Rule",
    "Scheduled",
    "Workload",
    "apply_default",
    "apply_rule",
    "rules_for",
    "schedule_rule",
]
