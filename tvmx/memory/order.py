"""The order of a program's steps: among the topological ones, one that needs fewer bytes at its peak.

What is alive depends only on which steps are done, not on how one got there, so that the least peak is a shortest
path over sets of done steps, a path being as long as its highest step. Three things keep that small: a step that every
other step is before or after cuts the program in two problems; a step that fits under the peak reached and frees at
least what it needs can always come first; and what is still too large is improved window by window from the best greedy
order of both directions (compare Ahn et al., "Ordering Chaos", 2020). The search counts expansions, so that it gives
one order on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvmx.memory.order_cost import Costs
from tvmx.memory.order_search import Budget, best_part

DEFAULT_EXPANSIONS = 80_000


@dataclass(frozen=True)
class Program:
    """Steps 0..n-1 in their original order over storages of `size` bytes (0 for what lies elsewhere).

    `touches[i]` are the storages that step i reads or writes, `after[i]` the steps that must precede it, and `over[i]`
    pairs (written, read) of which the first may take the place of the second when that is not used again.
    A storage is alive from the first to the last step that touches it.
    """

    size: tuple[int, ...]
    touches: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    over: tuple[tuple[tuple[int, int], ...], ...]

    def __post_init__(self) -> None:
        assert len(self.touches) == len(self.after) == len(self.over)
        assert all(p < i for i, before in enumerate(self.after) for p in before), "the original order is no order"

    def __len__(self) -> int:
        return len(self.touches)


@dataclass(frozen=True)
class Order:
    """`steps` in the order to run; `optimal` says that no order has a lower peak."""

    steps: tuple[int, ...]
    peak: int
    original_peak: int
    optimal: bool
    expansions: int


def least_peak_order(program: Program, expansions: int = DEFAULT_EXPANSIONS) -> Order:
    """The order with the lowest peak found; the original one unless another is strictly lower.

    Time is bounded by `expansions`, each a few microseconds.
    """
    costs, budget = Costs(program), Budget(expansions)
    original = list(range(len(program)))
    before = costs.peak(original)
    bound = costs.least_step()
    if before <= bound:
        return Order(tuple(original), before, before, True, 0)
    parts = _parts(program)
    done, live = 0, 0
    starts = []
    for part in parts:
        starts.append((done, live))
        for step in part:
            live += costs.cost(done, step)[1]
            done |= 1 << step
    peaks = [max(costs.profile(*start, part)) for start, part in zip(starts, parts)]
    optimal = True
    # The highest part decides: below what it can be brought to, the others need no work.
    for index in sorted(range(len(parts)), key=lambda i: (-peaks[i], i)):
        if peaks[index] <= bound:
            break
        found = best_part(costs, *starts[index], parts[index], budget, bound)
        parts[index] = found.steps
        optimal = optimal and found.optimal
        bound = max(bound, found.peak)
    steps = [step for part in parts for step in part]
    peak = costs.peak(steps)
    if peak >= before:
        steps, peak = original, before
    return Order(tuple(steps), peak, before, optimal, expansions - budget.left)


def _parts(program: Program) -> list[list[int]]:
    """Cut where a step is before or after every other: what is done there is the same in every order."""
    n = len(program)
    ancestors = [0] * n
    for step, before in enumerate(program.after):
        for p in before:
            ancestors[step] |= ancestors[p] | 1 << p
    descendants = [0] * n
    for step in reversed(range(n)):
        for p in program.after[step]:
            descendants[p] |= descendants[step] | 1 << step
    everything = (1 << n) - 1
    parts: list[list[int]] = []
    current: list[int] = []
    # A cut step's ancestors are all that stand before it, also in the original order.
    for step in range(n):
        current.append(step)
        if ancestors[step] | descendants[step] | 1 << step == everything:
            parts.append(current)
            current = []
    return [*parts, current] if current else parts
