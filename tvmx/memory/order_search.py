"""Orders of one part of a program: greedy from both ends, exact where that is small enough, window by window else."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvmx.memory.order_cost import Costs

WINDOWS = (16, 32, 64)  # steps of a window that is searched exactly
_WINDOW_EXPANSIONS = 3000


@dataclass
class Budget:
    """Expansions that are left: looks at one step that could come next."""

    left: int


@dataclass(frozen=True)
class Found:
    """Steps of one part in order, their highest bytes, and whether nothing lower exists (or none below the bound)."""

    steps: list[int]
    peak: int
    optimal: bool


def best_part(costs: Costs, done: int, live: int, part: list[int], budget: Budget, bound: int) -> Found:
    """The best order found for `part` after `done`; the given one where none is lower.

    Stops at `bound`, below which the whole program cannot come.
    """
    best = Found(part, max(costs.profile(done, live, part)), False)
    for steps in _greedy_orders(costs, done, live, part):
        peak = max(costs.profile(done, live, steps))
        if peak < best.peak:
            best = Found(steps, peak, False)
    if best.peak <= bound:
        return Found(best.steps, best.peak, True)
    better = _exact(costs, done, live, part, best.peak, budget, budget.left // 2, bound)
    if better is not None:
        steps = better or best.steps
        return Found(steps, max(costs.profile(done, live, steps)), True)
    steps = _by_windows(costs, done, live, best.steps, budget, bound)
    return Found(steps, max(costs.profile(done, live, steps)), False)


@dataclass(frozen=True)
class _Node:
    """A set of done steps on the search's way, and how it got there."""

    done: int
    live: int
    ready: tuple[int, ...]
    step: int
    parent: _Node | None

    def path(self) -> list[int]:
        steps, node = [], self
        while node.parent is not None:
            steps.append(node.step)
            node = node.parent
        return steps[::-1]


def _exact(
    costs: Costs, done: int, live: int, part: Sequence[int], peak: int, budget: Budget, limit: int, bound: int
) -> list[int] | None:
    """An order with the least peak; [] when none is below `peak`, None when `limit` expansions did not tell.

    Sets of done steps leave the heap lowest peak first, so the first whole one is the best.
    """
    inside = sum(1 << s for s in part)
    goal = done | inside
    ready = tuple(s for s in sorted(part) if not costs.before[s] & ~done)
    lowest = {done: bound}
    heap = [(bound, 0, 0, _Node(done, live, ready, -1, None))]
    spent = pushed = 0
    while heap:
        height, _, _, node = heapq.heappop(heap)
        if height > lowest[node.done]:
            continue
        if node.done == goal:
            budget.left -= spent
            return node.path()
        spent += len(node.ready)
        if spent > limit:
            budget.left -= spent
            return None
        for step, top, grows in _moves(costs, node, height):
            top = max(top, height)
            after = node.done | 1 << step
            if top >= peak or top >= lowest.get(after, peak):
                continue
            lowest[after] = top
            opened = [f for f in costs.followers[step] if inside >> f & 1 and not costs.before[f] & ~after]
            child = _Node(after, node.live + grows, (*(r for r in node.ready if r != step), *opened), step, node)
            pushed += 1
            heapq.heappush(heap, (top, -after.bit_count(), pushed, child))
    budget.left -= spent
    return []


def _moves(costs: Costs, node: _Node, height: int) -> list[tuple[int, int, int]]:
    """(step, bytes while it runs, bytes more alive after it) of the steps that can come next.

    One that fits under the height reached and leaves no more alive can come first in some best order: later steps find
    no more alive than without it. Then it is the only move.
    """
    moves = []
    for step in node.ready:
        need, grows = costs.cost(node.done, step)
        if grows <= 0 and node.live + need <= height:
            return [(step, node.live + need, grows)]
        moves.append((step, node.live + need, grows))
    return moves


def _greedy_orders(costs: Costs, done: int, live: int, part: list[int]) -> list[list[int]]:
    """List scheduling by several rules, from the front and from the back."""
    orders = []
    inside = sum(1 << s for s in part)
    for rule in (_least_growth, _lowest_step):
        orders.append(_schedule(costs, part, done, costs.before, costs.followers, rule, live))
        # From the back the steps that follow the part count as done, and a follower is a predecessor.
        rest = costs.everything & ~(done | inside)
        backward = _schedule(costs, part, rest, costs.after_masks, costs.predecessors, rule, costs.live(done | inside))
        orders.append(backward[::-1])
    return orders


Rule = Callable[[int, int, int, int], tuple[int, ...]]


def _least_growth(live: int, peak: int, need: int, grows: int) -> tuple[int, ...]:
    return (grows, need)


def _lowest_step(live: int, peak: int, need: int, grows: int) -> tuple[int, ...]:
    """Whatever fits under the peak reached, the one that frees most; else what raises it least."""
    return (max(live + need, peak), grows)


def _schedule(
    costs: Costs,
    part: list[int],
    done: int,
    before: Sequence[int],
    followers: Sequence[Sequence[int]],
    rule: Rule,
    live: int,
) -> list[int]:
    inside = sum(1 << s for s in part)
    # What is not done of other parts lies on the far side, and no step of this part waits for it.
    ready = {s: costs.cost(done, s) for s in part if not before[s] & inside}
    steps: list[int] = []
    peak = 0
    while ready:
        step = min(ready, key=lambda s: (*rule(live, peak, *ready[s]), s))
        need, grows = ready.pop(step)
        peak = max(peak, live + need)
        live += grows
        done |= 1 << step
        steps.append(step)
        for f in followers[step]:
            if inside >> f & 1 and not before[f] & inside & ~done:
                ready[f] = costs.cost(done, f)
        for s in costs.counted[step]:
            mask = costs.touched[s]
            for other in ready:
                if mask >> other & 1:
                    ready[other] = costs.cost(done, other)
    return steps


def _by_windows(costs: Costs, done: int, live: int, steps: list[int], budget: Budget, bound: int) -> list[int]:
    """Search windows around the highest step exactly until none of them brings it down."""
    steps = list(steps)
    while budget.left > 0:
        heights = costs.profile(done, live, steps)
        if max(heights) <= bound or not _lower_window(costs, done, live, steps, heights, budget):
            break
    return steps


def _lower_window(costs: Costs, done: int, live: int, steps: list[int], heights: list[int], budget: Budget) -> bool:
    """Reorder one window around the highest step so that it stays below that height; whether that was possible."""
    peak = max(heights)
    at = heights.index(peak)
    for width in WINDOWS:
        for share in (2, 4, 1):  # the step in the middle, late, first
            begin = max(0, at - width + width // share) if share > 1 else max(0, at - width + 1)
            window = steps[begin : begin + width]
            before, alive = done, live
            for step in steps[:begin]:
                alive += costs.cost(before, step)[1]
                before |= 1 << step
            # Lower than what stands outside is of no use.
            others = max([*heights[:begin], *heights[begin + width :]], default=0)
            found = _exact(costs, before, alive, window, peak, budget, _WINDOW_EXPANSIONS, min(others, peak - 1))
            if found:
                steps[begin : begin + width] = found
                return True
            if budget.left <= 0:
                return False
    return False
