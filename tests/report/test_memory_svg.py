"""The picture of a plan: one rectangle a buffer where the plan says, marks, labels, entries, refusals."""

import random
import re
import xml.etree.ElementTree as ElementTree

import pytest

import tvmx
from tests.onnx_models import mlp
from tvmx.config import CompileConfig, Dim
from tvmx.errors import PlanError
from tvmx.memory import Buffer, Problem, plan
from tvmx.report.memory_kinds import COLORS, operator_kind
from tvmx.report.memory_svg import draw_artifact, draw_problem

SVG = "{http://www.w3.org/2000/svg}"


def many(count):
    rng = random.Random(count)
    return Problem(
        Buffer(f"t{i}", (i, i + 1 + rng.choice([1, 1, 2, 3, 40])), 64 * rng.randrange(1, 500)) for i in range(count)
    )


def rectangles(root):
    """Buffer id → (x, y, width, height)."""
    return {
        r.find(f"{SVG}title").text.split()[0]: tuple(float(r.get(k)) for k in ("x", "y", "width", "height"))
        for r in root.iter(f"{SVG}rect")
        if r.find(f"{SVG}title") is not None
    }


@pytest.mark.parametrize("count", [30, 1000])
def test_rectangles_lie_to_scale_and_do_not_overlap(tmp_path, count):
    problem = many(count)
    solution = plan(problem, planner="greedy")
    draw_problem(problem, solution, tmp_path / "p.svg", "many <tensors>")
    root = ElementTree.parse(tmp_path / "p.svg").getroot()
    drawn = rectangles(root)
    assert len(drawn) == count
    per_step = drawn["t0"][2] / (problem["t0"].end - problem["t0"].start)
    assert per_step * count <= float(root.get("width"))
    for b in problem:
        assert drawn[b.id][2] == pytest.approx(per_step * (b.end - b.start), abs=0.02)
    boxes = sorted(drawn.values())
    for i, (x, y, w, h) in enumerate(boxes):
        for x2, y2, _, h2 in boxes[i + 1 :]:
            if x2 >= x + w - 0.02:
                break
            assert y2 >= y + h - 0.02 or y >= y2 + h2 - 0.02
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert f"{solution.height:,} bytes" in texts
    assert f"{solution.lower_bound:,} bytes" in texts
    assert "many <tensors>" in texts


def test_labels_are_written_where_there_is_room(tmp_path):
    problem = Problem([Buffer("wide", (0, 90), 64), Buffer("tall", (0, 2), 6400), Buffer("speck", (90, 91), 64)])
    draw_problem(problem, plan(problem), tmp_path / "p.svg")
    texts = [t.text for t in ElementTree.parse(tmp_path / "p.svg").getroot().iter(f"{SVG}text")]
    labels = [t for t in texts if t and re.match("wide|tall|speck", t)]
    assert labels == ["tall · 6.25 KiB"]


def test_shared_storage_is_marked(tmp_path):
    problem = Problem([Buffer("a", (0, 3), 640), Buffer("b", (2, 5), 640, alias_of="a", alias="inplace")])
    draw_problem(problem, plan(problem), tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text()
    assert "inplace of a" in text
    assert COLORS["in place"] in text


def test_a_problem_without_bytes_is_drawn(tmp_path):
    draw_problem(Problem([]), plan(Problem([])), tmp_path / "p.svg")
    ElementTree.parse(tmp_path / "p.svg")


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("conv2d+add+relu", "convolution"),
        ("matmul+gelu", "matrix product"),
        ("transpose", "data movement"),
        ("add+relu", "elementwise"),
        ("max_pool2d", "pooling, reduction"),
        ("layer_norm", "normalisation"),
    ],
)
def test_operators_have_kinds(op, kind):
    assert operator_kind(op) == kind
    assert kind in COLORS


def test_entries_of_a_library_are_drawn_together_or_alone(tmp_path):
    entries = {"b1": {"x.in": (1, 16)}, "bn": {"x.in": (Dim("N", 1, 8), 16)}}
    options = {"threads": 1, "config": CompileConfig(use_shipped_logs=False)}
    path = tvmx.compile(mlp(), tmp_path / "m.so", entries=entries, **options).path
    draw_artifact(path, tmp_path / "all.svg")
    draw_artifact(path, tmp_path / "one.svg", entry="bn")
    both, one = (ElementTree.parse(tmp_path / f"{n}.svg").getroot() for n in ("all", "one"))
    titles = [t.text for t in both.iter(f"{SVG}text") if t.text and "entry" in t.text]
    assert titles == ["m.so, entry b1", "m.so, entry bn at N=8"]
    assert len(rectangles(one)) == 1
    with pytest.raises(PlanError, match="no entry 'b9'; choose one of b1, bn"):
        draw_artifact(path, tmp_path / "x.svg", entry="b9")
    assert not (tmp_path / "x.svg").exists()
