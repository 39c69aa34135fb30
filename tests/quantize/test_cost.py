"""Which layers stay in float for speed: by the model of both kernels, and by measured times that a file keeps."""

import json

import numpy as np
import pytest
from onnx import helper

import tvmx
from tests.onnx_models import model
from tests.quantize.helpers import normal_feeds
from tvmx import api_quantize
from tvmx.errors import ConfigError
from tvmx.passes.legalize.integer_model import Work
from tvmx.quantize import Scheme, make_plan
from tvmx.quantize.cost import LayerCost, measured, modelled
from tvmx.quantize.graph import OnnxGraph
from tvmx.quantize.settings import QuantizeConfig
from tvmx.quantize.timing import case_of, measure_cases
from tvmx.target import PRESETS

RNG = np.random.default_rng(0)
node = helper.make_node


def weight(*shape):
    return (RNG.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


def separable():
    """3×3 → depthwise → 1×1."""
    return model(
        [
            node("Conv", ["x", "w0"], ["a"], "dense", pads=[1, 1, 1, 1]),
            node("Conv", ["a", "w1"], ["b"], "depthwise", pads=[1, 1, 1, 1], group=64),
            node("Conv", ["b", "w2"], ["y"], "pointwise"),
        ],
        {"x": (1, 16, 28, 28)},
        {"y": (1, 96, 28, 28)},
        {"w0": weight(64, 16, 3, 3), "w1": weight(64, 1, 3, 3), "w2": weight(96, 64, 1, 1)},
    )


def kept(target, **scheme):
    plan = make_plan(separable(), "m", Scheme(**scheme).for_target(PRESETS[target]), PRESETS[target])
    return {k.name: k.reason for k in plan.placement.kept}


def test_the_model_leaves_depthwise_layers_in_float_only_without_avx512():
    assert kept("x86_64-avx512-vnni") == {}
    found = kept("x86_64-avx2")
    assert "depthwise" in found
    assert "by the model" in found["depthwise"]
    assert "pointwise" not in found
    assert kept("x86_64-avx2", prefer="size") == {}


def test_rounding_an_input_counts():
    work = Work(1, 1, 512, 64, 64, inputs=512 * 64, weights=64 * 64)
    target = PRESETS["x86_64-avx512-vnni"]

    def cost(rounded):
        return LayerCost("MatMul", 512 * 64 * 64, 512 * 64, rounded, 512 * 64, 64 * 64, False, work)

    assert modelled(cost(0), target) is None
    assert "round its input" in (modelled(cost(1 << 22), target) or "")


def test_measured_times_decide_and_others_are_left_to_the_model():
    hook = measured({"dense": (1e-3, 5e-4), "pointwise": (1e-4, 2e-4)})
    target = PRESETS["x86_64-avx512-vnni"]
    plan = make_plan(separable(), "m", Scheme().for_target(target), target, cost=hook)
    assert {k.name for k in plan.placement.kept} == {"pointwise"}
    assert "measured slower in int8: 200.0 µs" in plan.placement.kept[0].reason


def cases():
    graph = OnnxGraph(separable())
    return [c for n in graph.nodes if (c := case_of(graph, n, 127)) is not None]


def test_times_are_kept_by_machine_and_case(tmp_path):
    calls = []

    def profile(program):
        calls.append(len(program.graph.output))
        return [1e-3 * (k + 1) for k in range(len(program.graph.output))]

    log = tmp_path / "deep" / "times.jsonl"
    first = measure_cases(cases(), profile, log, "m1")
    assert sorted(first.values()) == [(1e-3, 1e-3), (2e-3, 2e-3), (3e-3, 3e-3)]
    assert calls == [3, 3]
    log.write_text(log.read_text() + '{"version": 1, "machine": "m1", "ca')  # killed while writing
    assert measure_cases(cases(), profile, log, "m1") == first
    assert calls == [3, 3]
    measure_cases(cases(), profile, log, "m2")
    assert calls == [3, 3, 3, 3]


def test_programs_that_do_not_fall_into_one_kernel_a_layer_are_not_trusted(tmp_path):
    assert measure_cases(cases(), lambda program: [1e-3], tmp_path / "t.jsonl", "m") == {}
    assert not (tmp_path / "t.jsonl").exists()


def test_an_unreadable_log_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="layer times"):
        measure_cases(cases(), lambda program: [], tmp_path, "m")


def test_quantize_measures_layers_once(tmp_path, monkeypatch):
    proto, log = separable(), tmp_path / "times.jsonl"
    config = QuantizeConfig(observer="minmax", measure_speed=True, speed_log=str(log), threads=1)
    result = tvmx.quantize(proto, normal_feeds(proto), config=config)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(records) == 3
    assert all(s > 0 for r in records for s in r["seconds"])
    monkeypatch.setattr(api_quantize, "_kernel_seconds", lambda *_: pytest.fail("measured again"))
    again = tvmx.quantize(proto, normal_feeds(proto), config=config)
    assert again.report.kept == result.report.kept


def test_measuring_needs_a_machine_that_runs_the_code():
    proto = separable()
    target, config = PRESETS["aarch64-neon"], QuantizeConfig(measure_speed=True)
    with pytest.raises(ConfigError, match="cannot run code for aarch64-neon"):
        api_quantize._cost_hook(proto, Scheme().for_target(target), target, {}, config)
