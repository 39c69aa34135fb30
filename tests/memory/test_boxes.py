"""Boxes and levels: what is joined, that a plan of the boxes is one of the blocks, and large plans at their bound."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.memory_problems import GENERATORS, coarse, cut, pinwheel
from tvmx.memory import Buffer, Problem, engine, plan, validate
from tvmx.memory.blocks import merge
from tvmx.memory.boxes import boxes
from tvmx.memory.components import component, components
from tvmx.memory.engine import stack
from tvmx.memory.levels import levels_of
from tvmx.memory.restarts import Restarts

needs_core = pytest.mark.skipif(
    engine.engine_name() != "c", reason="the compiled core is not built: python setup.py build_ext -i"
)


def largest_component(problem):
    blocks = merge(problem)
    return component(blocks, max(components(blocks), key=len), 1 << 24)


def problem_of(rows):
    return Problem(Buffer(str(i), life, size, 1) for i, (life, size) in enumerate(rows))


def test_a_guillotine_cut_becomes_one_box():
    part = largest_component(problem_of([((0, 4), 3), ((4, 9), 3), ((0, 9), 2), ((0, 9), 5)]))
    levels = boxes(part)
    assert len(levels[0].part.size) == 1
    assert int(levels[0].part.size[0]) == 10


def test_a_pinwheel_becomes_one_box_without_overlap():
    wheel = problem_of([((0, 3), 7), ((0, 6), 3), ((3, 6), 3), ((3, 10), 4), ((6, 10), 6)])
    part = largest_component(wheel)
    (level, *_) = boxes(part)
    assert len(level.part.size) == 1
    assert plan(wheel).height == 10


def test_instants_where_two_edges_meet_are_split_by_their_sizes():
    part = largest_component(problem_of([((0, 5), 4), ((5, 9), 4), ((0, 5), 7), ((5, 9), 2), ((5, 9), 5), ((0, 9), 1)]))
    assert len(boxes(part)[0].part.size) == 1


def test_blocks_of_several_alignments_are_not_joined():
    mixed = Problem([Buffer("a", (0, 2), 64, 64), Buffer("b", (0, 2), 64, 32)])
    assert boxes(largest_component(mixed)) == []


@pytest.mark.parametrize("make", [cut, pinwheel, coarse, GENERATORS["loose"]])
def test_a_plan_of_boxes_is_a_plan_of_the_blocks_at_every_level(make):
    part = largest_component(make(600, 1))
    for level in levels_of(part):
        rank = next(Restarts(level.part, 0).ranks())
        ones = np.ones(len(rank), dtype=np.int64)
        arrays = (level.part.start, level.part.end, level.part.size.astype(np.int64), ones, rank)
        offsets = level.expand(stack(*arrays).astype(np.int32))
        assert len(offsets) == len(part.size)
        order = np.argsort(part.start, kind="stable")
        for i in order.tolist():
            meets = (part.start < part.end[i]) & (part.end > part.start[i])
            above = (offsets < offsets[i] + part.size[i]) & (offsets + part.size > offsets[i])
            assert (meets & above).sum() == 1  # itself
        assert (level.expand(level.project(offsets)) == offsets).all()


@needs_core
@pytest.mark.parametrize("make", [cut, pinwheel])
def test_large_perfect_plans_are_found_again(make):
    problem = make(6000, 0)
    solution = plan(problem)
    assert solution.height <= 1.02 * solution.lower_bound


@needs_core
def test_large_plan_is_the_same_for_a_seed():
    problem = coarse(4100)
    first, again = (plan(problem, budget_s=0.05, seed=2) for _ in range(2))
    assert first.offsets == again.offsets


def test_sizes_beyond_the_units_of_the_search_keep_their_order():
    problem = Problem(Buffer(str(i), (i % 90, i % 90 + 7), (1 << 33) + 4097 * i, 1) for i in range(4200))
    solution = plan(problem, budget_s=0.01)
    assert solution.height >= solution.lower_bound


buffers = st.lists(
    st.tuples(
        st.integers(0, 12),
        st.integers(1, 8),
        st.sampled_from([0, 1, 7, 64, 100, 4096]),
        st.sampled_from([1, 2, 16, 64]),
        st.sampled_from(["", "", "", "pin", "view"]),
    ),
    max_size=24,
)


@settings(max_examples=80, deadline=None)
@given(buffers, st.sampled_from(["best", "search", "region", "coloring", "greedy", "best_fit"]), st.booleans())
def test_random_problems_give_valid_plans(rows, planner, with_capacity):
    made = []
    base = 1 << 20
    for i, (start, length, size, alignment, kind) in enumerate(rows):
        offset = None
        parent = made[i - 1] if made and kind == "view" and made[i - 1].alias_of is None else None
        if parent is not None and parent.size >= size:
            made.append(Buffer(str(i), (start, start + length), size, alignment, alias_of=parent.id))
            continue
        if kind == "pin":  # pins of their own addresses never contradict
            offset, base = base, base + 8192
        made.append(Buffer(str(i), (start, start + length), size, alignment, offset))
    problem = Problem(made)
    solution = plan(problem, budget_s=0.02, planner=planner, capacity=1 << 14 if with_capacity else None)
    validate(problem, solution)
    assert solution.height >= solution.lower_bound
