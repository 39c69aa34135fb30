"""Precision assignment as data: which operator computes in fp32, fp16, bf16 or int8, why, and its accumulator."""

from tvmx.precision.files import load_rules, rules_from
from tvmx.precision.plan import Entry, PrecisionPlan
from tvmx.precision.resolve import resolve
from tvmx.precision.rules import Assignment, PrecisionRules

__all__ = ["Assignment", "Entry", "PrecisionPlan", "PrecisionRules", "load_rules", "resolve", "rules_from"]
