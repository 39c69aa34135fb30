"""`plan`: one problem, one named planner, a validated solution."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from tvmx.errors import PlanError
from tvmx.memory.blocks import Blocks, Ints, lower_bound, merge
from tvmx.memory.engine import engine_name
from tvmx.memory.greedy import plan_best_fit, plan_greedy, plan_none
from tvmx.memory.problem import Problem, Solution
from tvmx.memory.validate import validate

if TYPE_CHECKING:
    from tvmx.memory.search import Sketch


@dataclass(frozen=True)
class Goal:
    """When to stop: at `target` bytes (the capacity or the lower bound), or out of `budget_s`."""

    target: int
    budget_s: float
    seed: int


@dataclass(frozen=True)
class Outcome:
    """Offsets per block and how they came about."""

    offsets: Ints
    planner: str
    truncated: bool = False
    engine: str = "python"
    steps: int = 0


class Planner(Protocol):
    def __call__(self, blocks: Blocks, goal: Goal) -> Outcome: ...


def _heuristic(name: str, place: Callable[[Blocks], Ints]) -> Planner:
    def planner(blocks: Blocks, goal: Goal) -> Outcome:
        return Outcome(place(blocks), name, engine=engine_name())

    return planner


def plan_region(blocks: Blocks) -> Ints:
    from tvmx.memory import region

    return region.plan_region(blocks)


def plan_coloring(blocks: Blocks) -> Ints:
    from tvmx.memory import coloring

    return coloring.plan_coloring(blocks)


# What the runtime does not plan with is imported at its first use (import time is start-up time).
HEURISTICS: dict[str, Callable[[Blocks], Ints]] = {
    "greedy": plan_greedy,
    "best_fit": plan_best_fit,
    "region": plan_region,
    "coloring": plan_coloring,
}
# Above so many blocks `best` leaves a heuristic out: colouring is quadratic, regions place everything several
# times, and neither wins on a large problem.
MAX_TRIED = {"coloring": 300, "region": 20_000}
# Problems for which the heuristics take seconds; where a sketch by chains comes so near the target, they are left out.
LARGE = 4000
GOOD_ENOUGH = 1.05
MAX_BUDGET_S = 100_000
MAX_SEED = 1 << 32


def _best_heuristic(blocks: Blocks, target: int) -> Outcome:
    best: Outcome | None = None
    for name, place in HEURISTICS.items():
        if len(blocks) > MAX_TRIED.get(name, len(blocks)):
            continue
        found = Outcome(place(blocks), name, engine=engine_name())
        if best is None or blocks.height(found.offsets) < blocks.height(best.offsets):
            best = found
        if blocks.height(best.offsets) <= target:
            break
    assert best is not None
    return best


def _searched(blocks: Blocks, goal: Goal, best: Outcome, sketch: Sketch | None = None) -> Outcome:
    if blocks.height(best.offsets) <= goal.target or (blocks.pinned >= 0).any():
        return best
    from tvmx.memory.search import search

    levels = sketch.levels if sketch else None
    found = search(blocks, best.offsets, goal.target, goal.budget_s, goal.seed, levels)
    lower = blocks.height(found.offsets) < blocks.height(best.offsets)
    name = "search" if lower else best.planner
    return Outcome(found.offsets, name, found.truncated, found.engine, found.steps)


def plan_best(blocks: Blocks, goal: Goal) -> Outcome:
    """The best heuristic plan, lowered by the search; named after what found it."""
    if len(blocks) <= LARGE or goal.budget_s <= 0 or (blocks.pinned >= 0).any():
        return _searched(blocks, goal, _best_heuristic(blocks, goal.target))
    from tvmx.memory.search import sketched

    sketch = sketched(blocks, goal.target, goal.seed)
    best = Outcome(sketch.offsets, "search", engine=engine_name()) if sketch else None
    slow = engine_name() == "python" and best is not None  # heuristics take minutes there
    if best is None or (blocks.height(best.offsets) > GOOD_ENOUGH * goal.target and not slow):
        other = _best_heuristic(blocks, goal.target)
        if best is None or blocks.height(other.offsets) <= blocks.height(best.offsets):
            best = other
    return _searched(blocks, goal, best, sketch)


def plan_search(blocks: Blocks, goal: Goal) -> Outcome:
    """The same under the name of the search, whoever found the plan."""
    return replace(plan_best(blocks, goal), planner="search")


PLANNERS: dict[str, Planner] = {
    "none": _heuristic("none", plan_none),
    **{name: _heuristic(name, place) for name, place in HEURISTICS.items()},
    "search": plan_search,
    "best": plan_best,
}


def plan(
    problem: Problem,
    budget_s: float = 2.0,
    planner: str = "best",
    seed: int = 0,
    capacity: int | None = None,
) -> Solution:
    """Place the buffers of `problem` in one arena.

    Stops at `capacity` bytes when given, else at the lower bound; otherwise the search ends after
    the number of steps that `budget_s` seconds buy, so that a seed gives the same plan on any
    machine. A plan may be higher than `capacity` when none was found below: compare
    `Solution.height`.

    Raises PlanError for an unknown planner or a problem whose pins or aliases contradict.
    """
    begin = time.perf_counter()
    blocks = merge(problem)
    bound = lower_bound(blocks)
    outcome = plan_blocks(blocks, planner, budget_s, seed, capacity, bound)
    solution = Solution(
        offsets=blocks.expand(outcome.offsets),
        height=blocks.height(outcome.offsets),
        lower_bound=bound,
        planner=outcome.planner,
        seconds=time.perf_counter() - begin,
        truncated=outcome.truncated,
        engine=outcome.engine,
        steps=outcome.steps,
    )
    validate(problem, solution)
    return solution


def compare(
    problem: Problem,
    budget_s: float = 2.0,
    seed: int = 0,
    capacity: int | None = None,
    watch: Callable[[str, Solution | None], None] | None = None,
) -> list[Solution]:
    """The plan of every planner, the lowest first ("best" is left out: it is the first of these).

    `watch(name, None)` is called before a planner starts, `watch(name, solution)` when it is done.
    Raises PlanError as `plan` does.
    """
    solutions = []
    for name in PLANNERS:
        if name == "best":
            continue
        if watch:
            watch(name, None)
        solutions.append(plan(problem, budget_s, name, seed, capacity))
        if watch:
            watch(name, solutions[-1])
    return sorted(solutions, key=lambda s: s.height)


def plan_blocks(
    blocks: Blocks,
    planner: str,
    budget_s: float = 0.0,
    seed: int = 0,
    capacity: int | None = None,
    bound: int | None = None,
) -> Outcome:
    """`plan` on merged blocks: chosen offsets, not validated. `bound` saves computing it again."""
    if planner not in PLANNERS:
        raise PlanError(f"planner {planner!r} is unknown; choose one of {', '.join(PLANNERS)}")
    if not 0 <= budget_s <= MAX_BUDGET_S:
        raise PlanError(f"budget_s={budget_s} must be within [0, {MAX_BUDGET_S}] seconds")
    if not 0 <= seed < MAX_SEED:
        raise PlanError(f"seed={seed} must be within [0, 2**32)")
    if bound is None:
        bound = lower_bound(blocks)
    goal = Goal(bound if capacity is None else max(bound, capacity), budget_s, seed)
    return PLANNERS[planner](blocks, goal)
