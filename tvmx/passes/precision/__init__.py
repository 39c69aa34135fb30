"""The casting pass: a program and a precision plan → the program in those precisions. It only obeys the plan."""

from tvmx.passes.precision.assign import (
    PLAN_ATTR,
    assign_precision,
    plan_of,
    with_rules,
)
from tvmx.passes.precision.operators import node_names

__all__ = ["PLAN_ATTR", "assign_precision", "node_names", "plan_of", "with_rules"]
