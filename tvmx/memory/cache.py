"""Plans of a model with symbolic dims: one per shape signature, shared by shapes that are near."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tvmx.errors import InputError, PlanError
from tvmx.memory.blocks import Blocks, Ints, lower_bound, merge
from tvmx.memory.planner import plan_blocks
from tvmx.memory.problem import Problem, Solution
from tvmx.memory.validate import validate

Signature = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class CacheStats:
    """Counts since the cache was made, and what it holds now.

    `hits` found the very signature, `near_hits` the head-room of another plan, `misses` planned.
    `arena_bytes` is the block that serves every plan held.
    """

    hits: int = 0
    near_hits: int = 0
    misses: int = 0
    evictions: int = 0
    entries: int = 0
    arena_bytes: int = 0
    planning_seconds: float = 0.0


@dataclass(frozen=True)
class _Plan:
    """Offsets of blocks whose sizes include head-room."""

    blocks: Blocks
    offsets: Ints
    height: int
    planner: str


class PlanCache:
    """Least-recently-used plans per shape signature.

    `problem_of(dims)` gives the planning problem of a shape: the same buffers and lifespans for
    every shape, only sizes and alias offsets differ. `bounds` are the declared inclusive ranges,
    as of `Dim("N", 1, 8)`. A plan is made for sizes `head_room` larger than asked for (never larger
    than at the upper bounds), and a shape that fits into such a plan uses it, unless the plan was
    made for more than (1 + head_room)² times its bytes.

    The lowest plan of `planners` is taken; 500 tensors take a few milliseconds with the default ones. Not thread-safe:
    an executor owns its cache.
    """

    def __init__(
        self,
        problem_of: Callable[[Mapping[str, int]], Problem],
        bounds: Mapping[str, tuple[int, int | None]] | None = None,
        limit: int = 64,
        head_room: float = 0.1,
        planners: Sequence[str] = ("greedy", "best_fit"),
    ) -> None:
        if limit < 1:
            raise PlanError(f"limit={limit}: the cache must hold at least one plan")
        if not 0 <= head_room <= 1:
            raise PlanError(f"head_room={head_room} is not in [0, 1]")
        self._problem_of = problem_of
        self._bounds = dict(bounds or {})
        self._limit = limit
        self._head_room = head_room
        self._planners = tuple(planners)
        self._solutions: OrderedDict[Signature, tuple[_Plan, Solution]] = OrderedDict()
        self._ceiling: Blocks | None = None
        self._stats = CacheStats()

    def plan(self, dims: Mapping[str, int]) -> Solution:
        """The plan of one shape; its height is that of the block it was planned into.

        Raises InputError for a dim outside its declared bounds.
        """
        signature = tuple(sorted(dims.items()))
        known = self._solutions.get(signature)
        if known is not None:
            self._solutions.move_to_end(signature)
            self._count(hits=1)
            return known[1]
        self._check_bounds(dims)
        begin = time.perf_counter()
        problem = self._problem_of(dims)
        blocks = merge(problem)
        made = self._near(blocks)
        if made is None:
            made = self._make(blocks)
            self._count(misses=1)
        else:
            self._count(near_hits=1)
        solution = Solution(
            offsets=blocks.expand(made.offsets),
            height=blocks.height(made.offsets),
            lower_bound=lower_bound(blocks),
            planner=made.planner,
            seconds=time.perf_counter() - begin,
        )
        validate(problem, solution)
        self._solutions[signature] = (made, solution)
        if len(self._solutions) > self._limit:
            self._solutions.popitem(last=False)
            self._count(evictions=1)
        self._count(planning_seconds=time.perf_counter() - begin)
        return solution

    def trim(self, keep: int = 0) -> int:
        """Forget all plans but the `keep` used last; returns how many bytes the arena may shrink."""
        before = self.arena_bytes
        while len(self._solutions) > max(keep, 0):
            self._solutions.popitem(last=False)
        return before - self.arena_bytes

    @property
    def arena_bytes(self) -> int:
        """The block that serves every plan held, head-room included."""
        return max((made.height for made, _ in self._solutions.values()), default=0)

    @property
    def stats(self) -> CacheStats:
        return replace(self._stats, entries=len(self._solutions), arena_bytes=self.arena_bytes)

    def _count(self, **more: float) -> None:
        now = {name: getattr(self._stats, name) + value for name, value in more.items()}
        self._stats = replace(self._stats, **now)

    def _check_bounds(self, dims: Mapping[str, int]) -> None:
        for name, (low, high) in self._bounds.items():
            value = dims.get(name)
            if value is None:
                raise InputError(f"dim {name!r} is not given; the model declares it")
            if value < low or (high is not None and value > high):
                span = f"[{low}, {high}]" if high is not None else f"at least {low}"
                raise InputError(
                    f"dim {name!r} is {value}, outside its declared bounds {span}; "
                    "compile with wider bounds or give a shape inside them"
                )

    def _near(self, blocks: Blocks) -> _Plan | None:
        """The plan last used whose blocks are as large, if it is not wasteful for this shape."""
        allowed = (1 + self._head_room) ** 2 * int(blocks.size.sum())
        for made, _ in reversed(self._solutions.values()):
            if int(made.blocks.size.sum()) <= allowed and _fits(blocks, made.blocks):
                return made
        return None

    def _make(self, blocks: Blocks) -> _Plan:
        size = (blocks.size * (1 + self._head_room)).astype(np.int64)
        ceiling = self._sizes_at_upper_bounds()
        if ceiling is not None and len(ceiling) == len(size):
            size = np.minimum(size, np.maximum(ceiling.size, blocks.size))
        roomy = replace(blocks, size=size)
        made = []
        for planner in self._planners:
            outcome = plan_blocks(roomy, planner, 0.0)
            made.append(_Plan(roomy, outcome.offsets, roomy.height(outcome.offsets), outcome.planner))
            if made[-1].height <= lower_bound(roomy):
                break
        return min(made, key=lambda plan: plan.height)

    def _sizes_at_upper_bounds(self) -> Blocks | None:
        if self._ceiling is None and self._bounds:
            upper = {name: high for name, (_, high) in self._bounds.items() if high is not None}
            if len(upper) == len(self._bounds):
                self._ceiling = merge(self._problem_of(upper))
        return self._ceiling


def _fits(blocks: Blocks, into: Blocks) -> bool:
    return (
        len(blocks) == len(into)
        and bool((blocks.size <= into.size).all())
        and np.array_equal(blocks.start, into.start)
        and np.array_equal(blocks.end, into.end)
        and np.array_equal(blocks.align, into.align)
        and np.array_equal(blocks.pinned, into.pinned)
    )
