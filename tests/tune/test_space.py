"""Tasks, spaces and the moves through them."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st

from tests.tune.helpers import matmul, module
from tvmx.schedule import apply_default, registry
from tvmx.target import Target
from tvmx.tune.apply import apply_schedules, schedule_hash
from tvmx.tune.evolve import crossover, draw, evolve, mutate, mutate_tile, prime_factors
from tvmx.tune.model import MIN_SAMPLES, CostModel
from tvmx.tune.space import Choice, Space, metaschedule_spaces, spaces_for
from tvmx.tune.task import Task, extract_tasks, merge_tasks
from tvmx.tune.trace import key_of, replay, skeleton, trace_json
from tvmx.tune.workload import workload_hash


def task(func: Any = None) -> Task:
    func = matmul(64, 64, 64) if func is None else func
    return Task("matmul", workload_hash(func), func, 1, 64**3)


def tiled(sch: Any, target: Target) -> None:
    """A small hand-made rule with one tile and one categorical."""
    block = sch.get_sblock("C")
    i, j, r = sch.get_loops(block)
    i0, i1 = sch.split(i, sch.sample_perfect_tile(i, 2, max_innermost_factor=16, decision=[8, 8]))
    step = sch.sample_categorical([0, 16, 64], [0.4, 0.3, 0.3], decision=1)
    sch.annotate(i0, "pragma_auto_unroll_max_step", step)
    sch.reorder(i0, r, i1, j)


@pytest.fixture
def space(target: Target) -> Space:
    scheduled = registry.apply_rule(registry.Rule("t", tiled, lambda w: True, lambda t: True, 0), task().func, target)
    return Space("t", task().func, scheduled.trace)


def test_tasks_count_calls_and_merge_equal_kernels() -> None:
    tasks = extract_tasks(module(calls=3))
    assert [(t.name, t.occurrences) for t in tasks] == [("matmul", 3), ("add_one", 1)]
    mod = module()
    twin = mod["matmul"].with_attr("op_pattern", 4)  # same computation under another name
    both = tvm.IRModule({**{v: f for v, f in mod.functions.items()}, tvm.ir.GlobalVar("copy"): twin})
    assert len(extract_tasks(both)) == 2
    assert [(t.name, t.occurrences) for t in merge_tasks([*tasks, *tasks])] == [("matmul", 6), ("add_one", 2)]


def test_symbolic_and_scheduled_kernels_are_left_out(target: Target) -> None:
    from tvm import relax, te

    assert extract_tasks(apply_schedules(module(), target)[0]) == []
    n = te.var("n")
    a = te.placeholder((n,), name="a")
    func = te.create_prim_func([a, te.compute((n,), lambda i: a[i] + 1.0)]).without_attr("global_symbol")
    builder = relax.BlockBuilder()
    size = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((size,), "float32"))
    kernel = builder.add_func(func, "symbolic")
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.call_tir(kernel, (x,), x.ty))
        builder.emit_func_output(out)
    assert extract_tasks(builder.get()) == []


def test_hash_is_equal_in_two_processes() -> None:
    code = (
        "from tests.tune.helpers import matmul; from tvmx.tune.workload import workload_hash as h; print(h(matmul()))"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]  # fmt: skip
    assert runs == [workload_hash(matmul())] * 2


@pytest.fixture(scope="module")
def kernels(target: Target) -> list[Task]:
    """Kernels of convolutions (Winograd, direct, 1x1, depthwise), matrix products, pooling, softmax."""
    from onnx import helper

    from tests.onnx_models import convnet, model
    from tvmx.api import import_onnx, lower

    rng = np.random.default_rng(0)
    depthwise, pointwise = (rng.standard_normal(s).astype("float32") for s in ((16, 1, 3, 3), (32, 16, 1, 1)))
    nodes = [
        helper.make_node("Conv", ["x", "depthwise"], ["d"], pads=[1, 1, 1, 1], group=16),
        helper.make_node("Conv", ["d", "pointwise"], ["p"]),
        helper.make_node("MaxPool", ["p"], ["m"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Softmax", ["m"], ["y"], axis=1),
    ]
    weights = {"depthwise": depthwise, "pointwise": pointwise}
    mobile = model(nodes, {"x": (1, 16, 14, 14)}, {"y": (1, 32, 7, 7)}, weights)
    return [t for m in (convnet(), mobile) for t in extract_tasks(lower(import_onnx(m), target).mod)]


def test_the_default_is_one_point_of_its_space(target: Target, kernels: list[Task]) -> None:
    """The one that the analytical model chose; other decisions give other schedules of the same kernel."""
    rules = set()
    for t in kernels:
        space = spaces_for(t, target)[0]
        default = space.candidate(space.given)
        assert default is not None
        assert schedule_hash(default.func) == schedule_hash(apply_default(t.func, target).func)
        assert apply_default(t.func, target).rule == space.name
        rules.add(space.name)
        if space.choices:
            drawn = (space.candidate([None] * len(space.choices), seed) for seed in range(8))
            assert any(c is not None and schedule_hash(c.func) != schedule_hash(default.func) for c in drawn)
    assert rules >= {"cpu.conv2d_winograd", "cpu.conv2d", "cpu.conv2d_1x1", "cpu.depthwise_conv2d", "cpu.matmul"}


def test_points_of_every_space_compute_the_same(target: Target, kernels: list[Task]) -> None:
    """A point may fail to build, as a trial may; it may not compute something else.

    (MetaSchedule's own rules do at times, on normalisations; that is what WRONG_OUTPUT is for.)
    """
    from tvmx.tune.measure import MeasureConfig, Measurer

    rng = random.Random(5)
    outcomes: list[str] = []
    with Measurer(target, MeasureConfig(repeat=1, min_repeat_ms=0.01)) as measurer:
        for t in kernels[:6]:
            spaces = [s for s in spaces_for(t, target) if not s.name.startswith("metaschedule.")]
            drawn = [s.candidate([draw(c, rng) for c in s.choices]) for s in spaces if s.choices]
            funcs = [apply_default(t.func, target).func, *(c.func for c in drawn if c is not None)]
            builds = measurer.build(funcs)
            assert builds[0].status == "OK"
            for func, build in zip(funcs, builds):
                outcomes.append(build.status)
                if build.status == "OK":
                    outcomes[-1] = measurer.trial(t.func, builds[0], build, float("inf")).status
                    assert outcomes[-1] == "OK", f"{t.name}:\n{func}"
    assert outcomes.count("OK") > 0.7 * len(outcomes), outcomes
    assert set(outcomes) <= {"OK", "BUILD_ERROR"}


def test_candidates_differ_and_replay_from_their_json(space: Space) -> None:
    assert [c.kind for c in space.choices] == ["SamplePerfectTile", "SampleCategorical"]
    assert (space.choices[0].extent, space.choices[0].parts, space.choices[1].limit) == (64, 2, 3)
    a, b = space.candidate([[8, 8], 1]), space.candidate([[4, 16], 2])
    assert a is not None
    assert b is not None
    assert a.key != b.key
    assert schedule_hash(a.func) != schedule_hash(b.func)
    trace = json.loads(json.dumps(b.trace))
    assert schedule_hash(replay(task().func, trace)) == schedule_hash(b.func)
    assert key_of(skeleton(trace), [d for _, d in trace[1]]) == b.key
    before = schedule_hash(b.func)
    b.release()
    assert schedule_hash(b.func) == before


def test_decisions_that_do_not_fit_give_none(space: Space) -> None:
    assert space.candidate([[8, 8], 9]) is None
    assert space.candidate([None, None], seed=3) is not None  # None draws


@given(st.integers(1, 4000), st.integers(2, 4), st.integers(1, 64), st.integers(0, 10**6))
def test_tiles_keep_their_product_and_limit(extent: int, parts: int, limit: int, seed: int) -> None:
    rng = random.Random(seed)
    tile = draw(Choice("SamplePerfectTile", limit, parts, extent), rng)
    for _ in range(3):
        assert math.prod(tile) == extent
        assert tile[-1] <= limit
        tile = mutate_tile(tile, limit, rng)


def test_prime_factors() -> None:
    assert prime_factors(1) == []
    assert prime_factors(360) == [2, 2, 2, 3, 3, 5]
    assert prime_factors(97) == [97]


def test_mutation_changes_little_and_crossover_mixes(space: Space) -> None:
    rng = random.Random(1)
    changed = [sum(a != b for a, b in zip(space.given, mutate(space, space.given, rng))) for _ in range(50)]
    assert 1 in changed
    assert all(v in ([8, 8], [4, 16]) for v in (crossover(([8, 8], 1), ([4, 16], 2), rng)[0] for _ in range(9)))


def test_evolve_finds_what_the_score_wants(space: Space) -> None:
    """The score likes a large inner tile and the last category; the given decisions have neither."""

    def score(candidates: Any) -> list[float]:
        return [c.decisions[0][1] + 10 * c.decisions[1] for c in candidates]

    first = space.candidate(space.given)
    assert first is not None
    found = evolve([space], [first], score, random.Random(0), population=16, generations=3)
    assert found[0].decisions == ([4, 16], 2)
    assert len({c.key for c in found}) == len(found)


def test_metaschedule_spaces_compute_the_same(target: Target) -> None:
    t = task()
    spaces = metaschedule_spaces(t, target)
    assert spaces
    candidates = [c for s in spaces for i in range(3) if (c := s.candidate([None] * len(s.choices), i))]
    assert candidates
    a, b = (np.random.default_rng(i).standard_normal((64, 64)).astype("float32") for i in (0, 1))
    for c in candidates[:3]:
        out = tvm.runtime.empty((64, 64), "float32")
        tvm.compile(tvm.IRModule({"main": c.func}), target.tvm())["main"](*map(tvm.runtime.tensor, (a, b)), out)
        np.testing.assert_allclose(out.numpy(), np.maximum(a @ b, 0), rtol=1e-4, atol=1e-4)
        assert schedule_hash(replay(t.func, json.loads(json.dumps(c.trace)))) == schedule_hash(c.func)


def test_a_space_generator_that_raises_gives_way_to_a_simpler_one(target: Target, kernels: list[Task]) -> None:
    """Multi-level tiling cannot move the output transform of a Winograd convolution."""
    winograd = next(t for t in kernels if "winograd" in t.name)
    names = [s.name for s in spaces_for(winograd, target)]
    assert names[0] == "cpu.conv2d_winograd"
    assert any(n.startswith("metaschedule.") for n in names)


@pytest.mark.parametrize("error", [IndexError, KeyError, AssertionError, RuntimeError])
def test_a_rule_that_raises_is_skipped(target: Target, monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def broken(sch: Any, target: Target) -> None:
        sch.get_loops(sch.get_sblock("C"))
        raise error("no such thing")

    names = [s.name for s in spaces_for(task(), target)]
    rule = registry.Rule("broken", broken, lambda w: True, lambda t: True, 10**6)
    monkeypatch.setattr(registry, "_RULES", [rule, *registry._RULES])
    assert [s.name for s in spaces_for(task(), target)] == names
    assert apply_default(task().func, target).rule == names[0]


def test_a_candidate_without_features_does_not_take_the_others_with_it(
    target: Target, space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, t = CostModel(target), task()
    extract = model._extract

    def picky(t: Task, candidates: Any) -> Any:
        if any(c.decisions[1] == 2 for c in candidates):
            raise IndexError("does not lower")
        return extract(t, candidates)

    monkeypatch.setattr(model, "_extract", picky)
    good, bad = space.candidate([[8, 8], 1]), space.candidate([[8, 8], 2])
    rows = model.features(t, [good, bad])
    assert rows.shape[0] == 2
    assert rows[0].any()
    assert not rows[1].any()


def test_the_model_learns_an_order(target: Target, space: Space) -> None:
    """Times that grow with the inner tile are ranked that way, and failures below everything."""
    model, t = CostModel(target), task()
    tiles = [[64 // n, n] for n in (1, 2, 4, 8, 16)]
    candidates = [c for tile in tiles for d in range(3) if (c := space.candidate([tile, d]))]
    assert len(candidates) >= MIN_SAMPLES
    assert set(model.predict(t, candidates)) == {0.0}  # nothing known yet
    seconds = [c.decisions[0][1] * 1e-3 if c.decisions[0][1] < 16 else None for c in candidates]
    model.add(t, candidates, seconds)
    scores = dict(zip((c.key for c in candidates), model.predict(t, candidates)))
    fast, slow, failed = (key_of(space.skeleton, [tile, 1]) for tile in (tiles[0], tiles[3], tiles[4]))
    assert scores[fast] > scores[slow] > scores[failed]


def test_trace_json_is_plain(space: Space) -> None:
    assert json.loads(json.dumps(trace_json(space.trace))) == trace_json(space.trace)
