"""The casting pass: a program and a precision plan → the program in those precisions. It only obeys the plan."""

from tvmx.passes.precision.assign import (
    PLAN_ATTR,
    assign_precision,
    plan_of,
    with_rules,
)

__all__ = ["PLAN_ATTR", "assign_precision", "plan_of", "with_rules"]
