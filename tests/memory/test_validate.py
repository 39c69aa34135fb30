"""The validator accepts right plans and refuses one wrong plan per kind of violation."""

import pytest

from tvmx.errors import PlanError
from tvmx.memory import Buffer, Problem, Solution, validate


def claim(offsets, height, bound=0):
    return Solution(offsets=offsets, height=height, lower_bound=bound, planner="by hand")


TWO = Problem([Buffer("a", (0, 2), 64), Buffer("b", (1, 3), 64)])


def test_right_plan_is_accepted():
    validate(TWO, claim({"a": 0, "b": 64}, 128, 128))


def test_half_open_lifespans_may_share_bytes():
    validate(Problem([Buffer("a", (0, 2), 64), Buffer("b", (2, 3), 64)]), claim({"a": 0, "b": 0}, 64))


@pytest.mark.parametrize(
    ("offsets", "height", "bound", "says"),
    [
        ({"a": 0, "b": 0}, 64, 0, "'[ab]'.*'[ab]'.*overlap"),
        ({"a": 0}, 64, 0, "'b' has no offset"),
        ({"a": 0, "b": 64, "c": 0}, 128, 0, "'c', which is not a buffer"),
        ({"a": 0, "b": -64}, 64, 0, "'b' is at the negative"),
        ({"a": 0, "b": 72}, 136, 0, "'b': offset 72 is not a multiple"),
        ({"a": 0, "b": 64}, 64, 0, "claims a height of 64"),
        ({"a": 0, "b": 64}, 192, 0, "claims a height of 192"),
        ({"a": 0, "b": 64}, 128, 129, "lower bound 129"),
    ],
)
def test_wrong_plans_are_refused(offsets, height, bound, says):
    with pytest.raises(PlanError, match=says):
        validate(TWO, claim(offsets, height, bound))


def test_overlap_with_a_long_lived_buffer_far_back_in_time_is_seen():
    problem = Problem([Buffer("long", (0, 100), 640)] + [Buffer(f"s{i}", (i, i + 1), 64) for i in range(1, 99)])
    offsets = {"long": 64, **{f"s{i}": 0 for i in range(1, 99)}}
    validate(problem, claim(offsets, 704))
    with pytest.raises(PlanError, match="'s98'"):
        validate(problem, claim({**offsets, "s98": 640}, 704))


def test_moved_pin_is_refused():
    problem = Problem([Buffer("p", (0, 2), 64, offset=128)])
    validate(problem, claim({"p": 128}, 192))
    with pytest.raises(PlanError, match="'p' is pinned to 128"):
        validate(problem, claim({"p": 0}, 64))


def test_alias_away_from_its_parent_is_refused():
    problem = Problem([Buffer("a", (0, 2), 128), Buffer("v", (1, 3), 64, alias_of="a", alias_offset=64)])
    validate(problem, claim({"a": 0, "v": 64}, 128))
    with pytest.raises(PlanError, match="'v' at 128 shares 'a'"):
        validate(problem, claim({"a": 0, "v": 128}, 192))


def test_storage_read_through_a_view_after_its_parent_died_stays_alive():
    problem = Problem(
        [
            Buffer("a", (0, 2), 64),
            Buffer("v", (5, 6), 64, alias_of="a"),
            Buffer("other", (3, 4), 64),
        ]
    )
    validate(problem, claim({"a": 0, "v": 0, "other": 64}, 128))
    with pytest.raises(PlanError, match=r"stays alive"):
        validate(problem, claim({"a": 0, "v": 0, "other": 0}, 64))


def inplace(x_end, *more):
    return Problem([Buffer("x", (0, x_end), 64), Buffer("y", (1, 4), 64, alias_of="x", alias="inplace"), *more])


def test_inplace_at_the_last_use_is_accepted():
    validate(inplace(2), claim({"x": 0, "y": 0}, 64))


def test_inplace_over_a_value_used_later_is_refused():
    with pytest.raises(PlanError, match="'y', written at 1, overwrites 'x'"):
        validate(inplace(3), claim({"x": 0, "y": 0}, 64))


def test_inplace_over_a_value_read_later_through_a_view_is_refused():
    problem = inplace(2, Buffer("v", (2, 3), 64, alias_of="x"))
    with pytest.raises(PlanError, match="'y', written at 1, overwrites 'v'"):
        validate(problem, claim({"x": 0, "y": 0, "v": 0}, 64))


def test_two_inplace_writers_of_one_value_are_refused():
    problem = inplace(2, Buffer("z", (1, 4), 64, alias_of="x", alias="inplace"))
    with pytest.raises(PlanError, match=r"'[yz]'.*'[yz]'"):
        validate(problem, claim({"x": 0, "y": 0, "z": 0}, 64))


def test_inplace_beside_the_bytes_of_a_living_slice_is_accepted():
    problem = Problem(
        [
            Buffer("x", (0, 2), 128),
            Buffer("upper", (1, 9), 64, alias_of="x", alias_offset=64),
            Buffer("y", (1, 4), 64, alias_of="x", alias="inplace"),
        ]
    )
    validate(problem, claim({"x": 0, "upper": 64, "y": 0}, 128))


def slots(second_offset):
    return Problem(
        [
            Buffer("p", (0, 3), 64, alias_of="cat"),
            Buffer("q", (1, 3), 64, alias_of="cat", alias_offset=second_offset),
            Buffer("cat", (2, 5), 128),
        ]
    )


def test_concat_written_into_its_slots_is_accepted():
    validate(slots(64), claim({"p": 0, "q": 64, "cat": 0}, 128))


def test_slots_that_overlap_are_refused():
    with pytest.raises(PlanError, match="slots of one parent"):
        validate(slots(0), claim({"p": 0, "q": 0, "cat": 0}, 128))


def test_slot_overwritten_before_the_concat_is_refused():
    problem = Problem(
        [
            Buffer("p", (0, 1), 64, alias_of="cat"),
            Buffer("cat", (3, 5), 64),
            Buffer("thief", (1, 2), 64, alias_of="p", alias="inplace"),
        ]
    )
    with pytest.raises(PlanError, match="'thief', written at 1, overwrites 'p'"):
        validate(problem, claim({"p": 0, "cat": 0, "thief": 0}, 64))


def test_zero_size_buffers_need_no_room():
    problem = Problem([Buffer("a", (0, 2), 64), Buffer("z", (0, 2), 0)])
    validate(problem, claim({"a": 0, "z": 0}, 64))
