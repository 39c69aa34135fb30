"""Orders of steps: topological, never worse than the original, as good as trying them all."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.orders import PROGRAMS
from tvmx.memory.order import Program, least_peak_order


@st.composite
def programs(draw: st.DrawFn, most: int = 7) -> Program:
    """A random program: step i writes storage i, perhaps some more of one made earlier, and reads some."""
    n = draw(st.integers(1, most))
    sizes = [64 * draw(st.integers(0, 6)) for _ in range(n)]
    after, touches, over = [], [], []
    for i in range(n):
        reads = sorted(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else []
        after.append(tuple(reads))
        touches.append((i, *reads))
        over.append(tuple((i, r) for r in reads if draw(st.booleans())))
    return Program(tuple(sizes), tuple(touches), tuple(after), tuple(over))


def peak_of(program: Program, order: tuple[int, ...]) -> int:
    """By definition: at each step, all storages between their first and last step, less what is overwritten."""
    at = {step: i for i, step in enumerate(order)}
    life: dict[int, list[int]] = {}
    for step, storages in enumerate(program.touches):
        for s in storages:
            life.setdefault(s, []).append(at[step])
    peak = 0
    for step, now in at.items():
        alive = {s for s, when in life.items() if min(when) <= now <= max(when)}
        saved, taken = 0, set()
        for out, source in program.over[step]:
            fits = min(life[out]) == now and max(life[source]) == now and min(life[source]) < now
            if fits and program.size[out] == program.size[source] and not {out, source} & taken:
                taken |= {out, source}
                saved += program.size[out]
        peak = max(peak, sum(program.size[s] for s in alive) - saved)
    return peak


def is_order(program: Program, order: tuple[int, ...]) -> bool:
    at = {step: i for i, step in enumerate(order)}
    return sorted(order) == list(range(len(program))) and all(
        at[p] < at[step] for step, before in enumerate(program.after) for p in before
    )


@settings(max_examples=120, deadline=None)
@given(programs())
def test_as_good_as_every_order(program: Program) -> None:
    found = least_peak_order(program)
    assert is_order(program, found.steps)
    assert found.peak == peak_of(program, found.steps)
    every = (o for o in itertools.permutations(range(len(program))) if is_order(program, o))
    assert found.peak == min(peak_of(program, o) for o in every)
    assert found.optimal


@settings(max_examples=60, deadline=None)
@given(programs(most=40), st.sampled_from([0, 50, 2000]))
def test_a_small_budget_never_makes_it_worse(program: Program, expansions: int) -> None:
    found = least_peak_order(program, expansions)
    assert is_order(program, found.steps)
    assert found.peak == peak_of(program, found.steps) <= found.original_peak
    assert found.original_peak == peak_of(program, tuple(range(len(program))))
    assert least_peak_order(program, expansions) == found, "two searches differ"


def test_nothing_to_gain_keeps_the_order() -> None:
    chain = Program((64, 128, 64), ((0,), (0, 1), (1, 2)), ((), (0,), (1,)), ((), (), ()))
    found = least_peak_order(chain)
    assert found.steps == (0, 1, 2)
    assert found.optimal
    # Two orders that are as good: the original stays.
    pair = Program((64, 64, 64), ((0,), (1,), (0, 1, 2)), ((), (), (0, 1)), ((), (), ()))
    assert least_peak_order(pair).steps == (0, 1, 2)


def test_branches_run_one_after_the_other() -> None:
    """Three wide branches that shrink: in the model's order all three wide values are alive at once."""
    wide, narrow = 1 << 20, 1 << 10
    size = (narrow, wide, wide, wide, narrow, narrow, narrow, narrow)
    touches = ((0,), (0, 1), (0, 2), (0, 3), (1, 4), (2, 5), (3, 6), (4, 5, 6, 7))
    after = ((), (0,), (0,), (0,), (1,), (2,), (3,), (4, 5, 6))
    found = least_peak_order(Program(size, touches, after, ((),) * 8))
    assert found.original_peak > 3 * wide
    assert found.peak < 1.01 * wide
    assert found.optimal


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_networks_with_branches(name: str) -> None:
    program = PROGRAMS[name](0)
    found = least_peak_order(program)
    assert is_order(program, found.steps)
    assert found.peak == peak_of(program, found.steps) <= found.original_peak
