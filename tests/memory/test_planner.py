"""`plan`: every planner on shapes whose best answer is known, and its refusals."""

from pathlib import Path

import pytest

from tvmx.errors import PlanError
from tvmx.memory import PLANNERS, Buffer, Problem, compare, plan

DATA = Path(__file__).parents[1] / "data" / "minimalloc"
SHARING = [name for name in PLANNERS if name != "none"]


def test_none_gives_every_buffer_its_own_bytes():
    solution = plan(Problem([Buffer("a", (0, 1), 60), Buffer("b", (5, 6), 64)]), planner="none")
    assert solution.offsets == {"a": 0, "b": 64}
    assert solution.lower_bound == 64


@pytest.mark.parametrize("planner", SHARING)
def test_chain_needs_two_buffers_at_a_time(planner):
    chain = Problem([Buffer(f"t{i}", (i, i + 2), 1000) for i in range(50)])
    solution = plan(chain, planner=planner, budget_s=0.1)
    assert solution.height == solution.lower_bound == 2024


@pytest.mark.parametrize("planner", PLANNERS)
def test_empty_problem_needs_nothing(planner):
    solution = plan(Problem([]), planner=planner)
    assert (solution.offsets, solution.height, solution.lower_bound) == ({}, 0, 0)


@pytest.mark.parametrize("planner", PLANNERS)
def test_only_zero_sizes_need_nothing(planner):
    assert plan(Problem([Buffer("z", (0, 1), 0)]), planner=planner).height == 0


@pytest.mark.parametrize("planner", PLANNERS)
def test_pins_stay_and_others_go_around_them(planner):
    problem = Problem(
        [
            Buffer("pin", (0, 10), 64, offset=128),
            Buffer("a", (0, 10), 128),
            Buffer("b", (0, 10), 192),
        ]
    )
    solution = plan(problem, planner=planner, budget_s=0.1)
    assert solution.offsets["pin"] == 128
    assert solution.lower_bound == 384
    assert solution.height == (512 if planner in ("none", "region", "coloring") else 384)


@pytest.mark.parametrize("planner", PLANNERS)
def test_aliases_share_and_keep_their_storage(planner):
    problem = Problem(
        [
            Buffer("x", (0, 2), 256),
            Buffer("r", (6, 8), 256, alias_of="x"),
            Buffer("y", (3, 5), 256),
        ]
    )
    solution = plan(problem, planner=planner, budget_s=0.1)
    assert solution.offsets["r"] == solution.offsets["x"]
    assert solution.height == 512


def test_contradicting_pins_in_one_storage_are_refused():
    problem = Problem([Buffer("a", (0, 1), 64, offset=0), Buffer("b", (0, 1), 64, offset=64, alias_of="a")])
    with pytest.raises(PlanError, match="'b' pinned to 64 contradicts 'a'"):
        plan(problem)


def test_overlapping_pins_are_refused_naming_the_pair():
    problem = Problem([Buffer("a", (0, 2), 64, offset=0), Buffer("b", (1, 2), 64, offset=0)])
    with pytest.raises(PlanError, match=r"'[ab]'.*'[ab]'"):
        plan(problem)


def test_unknown_planner_is_refused_with_the_names():
    with pytest.raises(PlanError, match="choose one of none, greedy"):
        plan(Problem([]), planner="magic")


def test_lower_bound_counts_alignment():
    problem = Problem([Buffer(n, (0, 1), 10, 64) for n in "abc"])
    solution = plan(problem)
    assert solution.height == solution.lower_bound == 2 * 64 + 10


def test_lower_bound_of_the_minimalloc_set():
    bounds = {n: plan(Problem.from_csv(DATA / f"{n}.1048576.csv"), planner="none").lower_bound for n in "ABCDEF"}
    assert bounds["A"] <= 1048576
    assert bounds["C"] < 1048576
    assert bounds["D"] < 1048576


def test_greedy_is_close_on_the_hard_set():
    for name in "ABCDEF":
        solution = plan(Problem.from_csv(DATA / f"{name}.1048576.csv"), planner="greedy")
        assert solution.height <= 1.41 * solution.lower_bound


@pytest.mark.parametrize("option", [{"budget_s": float("inf")}, {"budget_s": float("nan")}, {"seed": -1}])
def test_options_out_of_range_are_refused(option):
    with pytest.raises(PlanError, match=f"{next(iter(option))}=.* must be within"):
        plan(Problem([Buffer("a", (0, 1), 1)]), **option)


def test_compare_runs_every_planner_and_gives_the_lowest_first():
    problem = Problem.from_csv(DATA / "B.1048576.csv")
    solutions = compare(problem, budget_s=0.2)
    assert sorted(s.planner for s in solutions) == sorted(set(PLANNERS) - {"best"})
    assert [s.height for s in solutions] == sorted(s.height for s in solutions)
    assert solutions[-1].planner == "none"
    assert solutions[-1].height == problem.unshared_bytes
