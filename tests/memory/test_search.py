"""The search planner: the public hard instances, optimality on small problems, determinism."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.memory_problems import loose
from tvmx.memory import Buffer, Problem, engine, fallback, plan
from tvmx.memory.components import component, components
from tvmx.memory.planner import merge
from tvmx.memory.restarts import luby

DATA = Path(__file__).parents[1] / "data" / "minimalloc"
needs_core = pytest.mark.skipif(
    engine.engine_name() != "c", reason="the compiled core is not built: python setup.py build_ext -i"
)


@needs_core
@pytest.mark.parametrize("name", "ABCDEF")
def test_hard_instances_fit_their_capacity(name):
    problem = Problem.from_csv(DATA / f"{name}.1048576.csv")
    solution = plan(problem, budget_s=60, capacity=1048576)
    assert solution.height <= 1048576
    assert not solution.truncated


def test_example_of_minimalloc_is_solved_to_its_capacity():
    solution = plan(Problem.from_csv(DATA / "input.12.csv"), capacity=12)
    assert solution.height == 12


@needs_core
def test_same_seed_gives_the_same_plan():
    problem = Problem.from_csv(DATA / "D.1048576.csv")
    first, again = (plan(problem, budget_s=0.4, seed=3) for _ in range(2))
    assert first.offsets == again.offsets
    assert first.steps == again.steps


@needs_core
def test_budget_that_is_too_small_says_truncated_and_still_gives_a_plan():
    problem = loose(4000)  # the hard instances of MiniMalloc are solved in less
    solution = plan(problem, budget_s=0.001, planner="search")
    assert solution.truncated
    assert solution.height > solution.lower_bound


def test_zero_budget_is_the_best_heuristic():
    problem = Problem.from_csv(DATA / "A.1048576.csv")
    heights = [plan(problem, planner=p).height for p in ("greedy", "best_fit", "region", "coloring")]
    assert plan(problem, budget_s=0).height <= min(heights)


def lowest_by_enumeration(sizes, lifespans):
    """The optimum of a small problem: first fit in every order reaches every canonical plan."""
    best = sum(sizes)
    for order in itertools.permutations(range(len(sizes))):
        at = {}
        for i in order:
            spans = sorted(
                (at[k], at[k] + sizes[k])
                for k in at
                if lifespans[k][0] < lifespans[i][1] and lifespans[i][0] < lifespans[k][1]
            )
            cursor = 0
            for low, high in spans:
                if low - cursor >= sizes[i]:
                    break
                cursor = max(cursor, high)
            at[i] = cursor
        best = min(best, max(at[i] + sizes[i] for i in at))
    return best


small = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4), st.integers(1, 9)), min_size=2, max_size=6)


@settings(max_examples=60, deadline=None)
@given(small)
def test_search_finds_the_optimum_of_small_problems(rows):
    lifespans = [(start, start + length) for start, length, _ in rows]
    sizes = [size for *_, size in rows]
    problem = Problem(Buffer(str(i), life, size, 1) for i, (life, size) in enumerate(zip(lifespans, sizes)))
    solution = plan(problem, budget_s=1, planner="search")
    assert solution.height == lowest_by_enumeration(sizes, lifespans)
    assert not solution.truncated


@pytest.mark.parametrize("run", [engine.depth_first, fallback.depth_first], ids=["engine", "python"])
@settings(max_examples=60, deadline=None)
@given(small)
def test_depth_first_proves_what_enumeration_finds(run, rows):
    lifespans = [(start, start + length) for start, length, _ in rows]
    sizes = [size for *_, size in rows]
    blocks = merge(Problem(Buffer(str(i), life, size, 1) for i, (life, size) in enumerate(zip(lifespans, sizes))))
    for index in components(blocks):
        part = component(blocks, index, 1 << 20)
        best = lowest_by_enumeration([sizes[i] for i in index], [lifespans[i] for i in index])
        rank = np.arange(len(index), dtype=np.int32)
        weights = np.zeros(len(index))

        def outcome(units, part=part, rank=rank, weights=weights):
            arrays = (part.start, part.end, part.size, part.align, rank)
            return run(*arrays, units, 10.0, 10**9, weights)

        status, _, offsets = outcome(best // part.unit)
        assert status == engine.SOLVED
        assert int((offsets + part.size).max()) * part.unit == best
        assert outcome(best // part.unit - 1)[0] == engine.INFEASIBLE


def test_mixed_alignments_are_searched():
    problem = Problem([Buffer("a", (0, 2), 96, 32), Buffer("b", (0, 3), 64, 64), Buffer("c", (1, 3), 32, 32)])
    solution = plan(problem, planner="search", budget_s=0.2)
    assert solution.height == 192


def test_luby_sequence():
    assert [luby(i) for i in range(1, 16)] == [1, 1, 2, 1, 1, 2, 4, 1, 1, 2, 1, 1, 2, 4, 8]
