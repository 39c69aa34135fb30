"""The memory planner: buffers with lifespans → byte offsets in one arena. No TVM, numpy only."""

from tvmx.memory.cache import CacheStats, PlanCache
from tvmx.memory.planner import PLANNERS, compare, plan
from tvmx.memory.problem import INPLACE, VIEW, Buffer, Problem, Solution
from tvmx.memory.validate import validate

__all__ = [
    "INPLACE",
    "PLANNERS",
    "VIEW",
    "Buffer",
    "CacheStats",
    "PlanCache",
    "Problem",
    "Solution",
    "compare",
    "plan",
    "validate",
]
