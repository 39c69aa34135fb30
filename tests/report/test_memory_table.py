"""`tvmx memory compare`: the table, what is kept of an interrupted run, and clear errors."""

import io
import json

import pytest

from tvmx import cli
from tvmx.memory import PLANNERS, Buffer, Problem, Solution
from tvmx.memory import planner as planner_module
from tvmx.report.memory_table import Progress


@pytest.fixture
def chain(tmp_path):
    path = tmp_path / "chain.csv"
    Problem([Buffer(f"t{i}", (i, i + 2), 100, 1) for i in range(30)]).to_csv(path)
    return str(path)


def test_compare_lists_every_planner_with_its_time(chain, capsys):
    assert cli.main(["memory", "compare", chain, "--budget-s", "0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["planner", "bytes", "lower", "bound", "ratio", "seconds"]
    assert sorted(line.split()[0] for line in lines[1:]) == sorted(set(PLANNERS) - {"best"})


def test_an_interrupted_compare_shows_what_is_done(chain, capsys, monkeypatch):
    def interrupted(blocks, goal):
        raise KeyboardInterrupt

    monkeypatch.setitem(planner_module.PLANNERS, "region", interrupted)
    assert cli.main(["memory", "compare", chain, "--json"]) == 130
    out, err = capsys.readouterr()
    assert [s["planner"] for s in json.loads(out)] == ["greedy", "best_fit", "none"]
    assert "interrupted" in err


def test_a_compare_interrupted_at_once_prints_no_table(chain, capsys, monkeypatch):
    def interrupted(blocks, goal):
        raise KeyboardInterrupt

    monkeypatch.setitem(planner_module.PLANNERS, "none", interrupted)
    assert cli.main(["memory", "compare", chain]) == 130
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "text", ["", "id,lower,upper\n", "id,lower,upper,size\na,3,1,4\n", "id,lower,upper,size\na,0,1,-1\n"]
)
def test_a_bad_csv_is_one_line(tmp_path, capsys, text):
    (tmp_path / "p.csv").write_text(text)
    assert cli.main(["memory", "compare", str(tmp_path / "p.csv")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tvmx: PlanError: ")
    assert len(err.splitlines()) == 1


def test_progress_is_written_to_a_terminal_only():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    done = Solution({}, 0, 0, "greedy")
    for stream, expected in ((Terminal(), "greedy"), (io.StringIO(), "")):
        progress = Progress(stream)
        progress("greedy", None)
        progress("greedy", done)
        assert progress.done == [done]
        assert expected in stream.getvalue()
        assert bool(stream.getvalue()) == bool(expected)
