"""Buffers, problems and their CSV form: what is accepted, what is refused and how it says so."""

import os
from pathlib import Path

import pytest

from tvmx.errors import PlanError
from tvmx.memory import Buffer, Problem, plan

DATA = Path(__file__).parents[1] / "data" / "minimalloc"


def test_csv_of_minimalloc_is_read_with_exclusive_upper_and_alignment_one():
    problem = Problem.from_csv(DATA / "input.12.csv")
    assert problem["b1"] == Buffer("b1", (0, 3), 4, alignment=1)
    assert [b.id for b in problem] == ["b1", "b2", "b3", "b4", "b5"]


def test_csv_round_trip_keeps_every_field(tmp_path):
    problem = Problem(
        [
            Buffer("a", (0, 4), 256, 64),
            Buffer("pin", (0, 2), 64, 32, offset=512),
            Buffer("v", (1, 6), 64, 64, alias_of="a", alias_offset=128),
            Buffer("i", (5, 8), 300, 4, alias_of="v", alias="inplace"),
            Buffer("with,comma", (0, 1), 0, 1),
        ]
    )
    problem.to_csv(tmp_path / "p.csv")
    assert Problem.from_csv(tmp_path / "p.csv") == problem
    assert list(tmp_path.iterdir()) == [tmp_path / "p.csv"]


def test_csv_without_optional_columns_is_written_as_minimalloc_writes_it(tmp_path):
    Problem.from_csv(DATA / "B.1048576.csv").to_csv(tmp_path / "b.csv")
    assert (tmp_path / "b.csv").read_text() == (DATA / "B.1048576.csv").read_text()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("id,lower,upper\na,0,1\n", "needs id,lower,upper,size"),
        ("id,lower,upper,size,colour\na,0,1,4,red\n", "header"),
        ("id,lower,upper,size\na,0,1\n", ":2: 3 fields"),
        ("id,lower,upper,size\na,0,1,x\n", ":2: size 'x' is not a whole number"),
        ("id,lower,upper,size\na,0,1,1.5\n", "size '1.5' is not a whole number"),
        ("id,lower,upper,size\na,,1,4\n", "lower '' is not a whole number"),
        (f"id,lower,upper,size\na,0,1,{'9' * 5000}\n", "is not a whole number"),
        (f"id,lower,upper,size\na,0,{'9' * 25},4\n", "is not within"),
        (f"id,lower,upper,size\na,-{'9' * 25},1,4\n", "is not within"),
        (f"id,lower,upper,size\na,0,1,{'9' * 25}\n", "size 9{25} is not in"),
        ("id,lower,upper,size\na,5,2,4\n", r"lifespan \[5, 2\) is empty"),
        ("id;lower;upper;size\na;0;1;4\n", "needs id,lower,upper,size"),
        ("\0\1", "needs id,lower,upper,size"),
        ("id,lower,upper,size\na,0,1,4\nb,3,3,4\n", ":3: buffer 'b': lifespan"),
        ("id,lower,upper,size\na,0,1,-4\n", "size -4"),
        ("id,lower,upper,size\na,0,1,4\na,0,1,4\n", "'a' is used twice"),
    ],
)
def test_bad_csv_is_refused_naming_the_line(tmp_path, text, says):
    (tmp_path / "p.csv").write_text(text)
    with pytest.raises(PlanError, match=says):
        Problem.from_csv(tmp_path / "p.csv")


def test_csv_of_a_spreadsheet_is_read(tmp_path):
    (tmp_path / "p.csv").write_bytes(b"\xef\xbb\xbfid,lower,upper,size,alignment\r\na,-3, 4,16,\r\n\r\n")
    assert list(Problem.from_csv(tmp_path / "p.csv")) == [Buffer("a", (-3, 4), 16, 1)]


def test_empty_cells_and_rows_that_a_spreadsheet_pads_with_are_no_fields(tmp_path):
    path = tmp_path / "padded.csv"
    path.write_text("id,lower,upper,size,,\r\na,0,2,8,,\r\n,,,,,\r\n\r\nb,1,3,4\r\n")
    assert [b.id for b in Problem.from_csv(path)] == ["a", "b"]
    path.write_text("id,lower,upper,size\na,0,2,8,9\n")
    with pytest.raises(PlanError, match="5 fields, the header has 4"):
        Problem.from_csv(path)


def test_missing_file_is_a_plan_error(tmp_path):
    with pytest.raises(PlanError, match=r"no\.csv"):
        Problem.from_csv(tmp_path / "no.csv")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"lifespan": (2, 2)}, "is empty"),
        ({"size": 1 << 61}, "size"),
        ({"alignment": 0}, "alignment"),
        ({"offset": 32}, "not a multiple"),
        ({"offset": -64}, "out of range"),
        ({"alias_offset": 64}, "needs alias_of"),
        ({"alias_of": "x", "alias": "copy"}, "not 'view' or 'inplace'"),
    ],
)
def test_bad_buffer_is_refused(fields, says):
    with pytest.raises(PlanError, match=says):
        Buffer(**{"id": "b", "lifespan": (0, 1), "size": 4, **fields})


@pytest.mark.parametrize(
    ("alias", "says"),
    [
        (Buffer("v", (0, 1), 64, alias_of="nobody"), "not a buffer"),
        (Buffer("v", (0, 1), 65, alias_of="a"), "does not fit"),
        (Buffer("v", (0, 1), 8, alias_of="a", alias_offset=8), "not a multiple of its alignment"),
        (Buffer("v", (0, 1), 8, alias_of="v"), "cycle"),
    ],
)
def test_bad_alias_is_refused(alias, says):
    with pytest.raises(PlanError, match=says):
        Problem([Buffer("a", (0, 1), 64), alias])


def test_alias_cycle_of_two_is_refused():
    with pytest.raises(PlanError, match="cycle"):
        Problem([Buffer("a", (0, 1), 8, alias_of="b"), Buffer("b", (0, 1), 8, alias_of="a")])


def test_unshared_bytes_count_values_but_not_views():
    problem = Problem(
        [
            Buffer("a", (0, 2), 100),
            Buffer("v", (1, 3), 100, alias_of="a"),
            Buffer("i", (2, 4), 100, alias_of="a", alias="inplace"),
        ]
    )
    assert problem.unshared_bytes == 256


def test_csv_with_a_solution_pins_every_buffer_to_it(tmp_path):
    problem = Problem.from_csv(DATA / "input.12.csv")
    solution = plan(problem, capacity=12)
    problem.to_csv(tmp_path / "p.csv", solution)
    pinned = Problem.from_csv(tmp_path / "p.csv")
    assert {b.id: b.offset for b in pinned} == solution.offsets
    assert plan(pinned).offsets == solution.offsets
    assert plan(pinned, planner="none").height == 12


def test_csv_with_a_solution_of_another_problem_is_refused(tmp_path):
    other = plan(Problem([Buffer("other", (0, 1), 4)]))
    with pytest.raises(PlanError, match="not of this problem"):
        Problem([Buffer("a", (0, 1), 4)]).to_csv(tmp_path / "p.csv", other)


def test_csv_that_cannot_be_written_is_a_plan_error(tmp_path):
    with pytest.raises(PlanError, match="cannot be written"):
        Problem([]).to_csv(tmp_path / "no" / "p.csv")


def test_written_csv_is_readable_as_the_umask_says(tmp_path):
    before = os.umask(0o022)
    try:
        Problem([]).to_csv(tmp_path / "p.csv")
    finally:
        os.umask(before)
    assert (tmp_path / "p.csv").stat().st_mode & 0o777 == 0o644
