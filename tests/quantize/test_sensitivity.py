"""The switched program is the float model, the quantised one, and anything between; max_drop finds the culprit."""

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.onnx_models import convnet, model, reference
from tests.quantize.helpers import TARGET, calibration_of, normal_feeds, plan_of, sqnr
from tvmx.errors import ConfigError
from tvmx.quantize import Scheme, finish, make_plan, parse_override
from tvmx.quantize.metrics import cosine, ctc, load_metric, metric_of, signal, top1
from tvmx.quantize.placement import Layer, Placement
from tvmx.quantize.quantizer import draft
from tvmx.quantize.sensitivity import RANKING_SAMPLES, SwitchedRuns, analyse, careful
from tvmx.quantize.settings import QuantizeConfig
from tvmx.quantize.switched import FLAGS, flags_for, switchable, switched_model


def switched_runs(plan, data, observer="minmax"):
    made = draft(plan, calibration_of(plan, data), observer)
    proto = switched_model(plan.graph, made.plan.placement, made.inserted, show=True)
    onnx.checker.check_model(proto, full_check=True)
    shown = {la.name: plan.graph.nodes[la.node].output[0] for la in switchable(made.plan.placement)}
    return made, proto, SwitchedRuns(lambda f: reference(proto, f), data, made.plan.placement, ["y"], shown)


@pytest.mark.parametrize("in_float", [("c0", "c1", "s", "p", "y/Gemm"), (), ("c0",), ("c1", "s", "p")])
def test_every_setting_is_the_model_with_those_layers_in_float(in_float):
    proto, data = convnet(), normal_feeds(convnet(), 4)
    everything = Scheme(overrides=(parse_override("op:*=int8"),))
    plan = plan_of(proto, everything)
    _, _, runs = switched_runs(plan, data)
    calibration = calibration_of(plan, data)
    expected = finish(plan.without(dict.fromkeys(in_float, "test")), calibration, "minmax").proto
    for got, feed in zip(runs.outputs(in_float), data):
        if len(in_float) == 5:
            np.testing.assert_allclose(got[0], reference(proto, feed)["y"], rtol=0, atol=2e-5)
        np.testing.assert_allclose(got[0], reference(expected, feed)["y"], rtol=0, atol=2e-5)


def fragile():
    """y = (x w1) w2 with weights of one huge column each: per tensor, the other columns vanish in `bad`."""
    rng = np.random.default_rng(0)
    good, bad = (rng.standard_normal((16, 16)).astype(np.float32) for _ in range(2))
    bad[:, 0] *= 3000
    scale = np.ones((1, 16), np.float32)
    scale[0, 0] = 1 / 3000
    node = helper.make_node
    return model(
        [
            node("MatMul", ["x", "good"], ["a"], "good"),
            node("MatMul", ["a", "bad"], ["b"], "bad"),
            node("Mul", ["b", "scale"], ["c"], "scaled"),
            node("MatMul", ["c", "good2"], ["y"], "good2"),
        ],
        {"x": (8, 16)},
        {"y": (8, 16)},
        {"good": good, "bad": bad, "good2": good.T.copy(), "scale": scale},
    )


def test_max_drop_names_the_layer_responsible_and_keeps_it_in_float():
    proto, data = fragile(), normal_feeds(fragile(), 8)
    # The importer folds the scale into the weight; here the stage sees it as it is.
    scheme = Scheme(per_channel=False, overrides=(parse_override("op:*=int8"),)).for_target(TARGET)
    plan = make_plan(proto, "fragile", scheme, TARGET)
    made, _, runs = switched_runs(plan, data)
    found = analyse(runs, made.plan.placement, "sqnr", 0.01)
    assert found.before < 0.5
    assert found.in_float == ("bad",)
    assert found.after > 0.99
    assert found.noise["bad"] > 0.9
    result = finish(plan, calibration_of(plan, data), "minmax", measured=found)
    assert sqnr(proto, result.proto, data) > 20
    assert any(name == "bad" and "max_drop" in reason for name, _, reason in result.report.kept)
    assert result.report.accuracy["layers in float"] == ["bad"]
    relaxed = analyse(runs, made.plan.placement, "sqnr", None)
    assert relaxed.in_float == ()


def test_metrics():
    a = [[np.array([[0.1, 0.9], [0.8, 0.2]])]]
    b = [[np.array([[0.2, 0.8], [0.4, 0.6]])]]
    assert top1(a, a) == cosine(a, a) == signal(a, a) == 1
    assert top1(a, b) == 0.5
    assert 0 < cosine(a, b) < 1
    assert signal([[np.ones(4)]], [[np.zeros(4)]]) == 0
    faint = [[np.array([1e-6, 0.0])], [np.array([1.0, 2.0])]]
    assert cosine(faint, [[np.array([0.0, 1e-6])], [np.array([1.0, 2.0])]]) > 0.999
    assert cosine([[np.zeros(3)]], [[np.zeros(3)]]) == 1
    assert cosine([[np.ones(3)]], [[np.full(3, np.nan)]]) == 0
    assert metric_of("auto", a)[0] == "top1"
    steps = np.eye(4)[[[0, 2, 2, 0, 3], [1, 1, 0, 1, 0]]]  # reads "2 3" and "1 1"
    same = np.eye(4)[[[2, 0, 0, 3, 3], [1, 0, 0, 1, 1]]]
    other = np.eye(4)[[[2, 0, 0, 3, 3], [1, 1, 1, 1, 1]]]
    assert ctc([[steps]], [[same]]) == 1
    assert ctc([[steps]], [[other]]) == 0.5
    assert metric_of("auto", [[np.array([1.5, -2])]])[0] == "cosine"
    assert metric_of(lambda x, y: 0.25, a)[1](a, b) == 0.25
    with pytest.raises(ConfigError, match="top1"):
        metric_of("accuracy", a)


def test_flags_are_in_layer_order():
    plan = plan_of(convnet())
    names = [la.name for la in switchable(plan.placement)]
    flags = flags_for(plan.placement, {names[1]})
    assert flags.tolist() == [k != 1 for k in range(len(names))]
    assert FLAGS not in plan.graph.producer


def test_a_metric_of_the_users_own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def half(expected, got):\n    return 0.5\n\ndef text(expected, got):\n    return 'x'\n")
    a = [[np.ones((1, 2))]]
    config = QuantizeConfig(metric=f"{file}:half")
    assert metric_of(config.metric, a)[0] == "half"
    assert metric_of(config.metric, a)[1](a, a) == 0.5
    with pytest.raises(ConfigError, match="must return a number"):
        metric_of(load_metric(f"{file}:text"), a)[1](a, a)
    with pytest.raises(ConfigError, match="no function 'none'"):
        QuantizeConfig(metric=f"{file}:none")
    with pytest.raises(ConfigError, match="is no Python file"):
        QuantizeConfig(metric="missing.py:half")
    file.write_text("import no_such_module_here")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        QuantizeConfig(metric=f"{file}:half")


def test_the_search_ends_with_few_layers():
    """Nine of twelve layers make the noise: found between the growing sets of 8 and 10."""

    class Runs:
        def outputs(self, in_float, samples=None):
            noise = sum(0.1 if k < 9 else 1e-4 for k, n in enumerate(NAMES) if n not in set(in_float))
            return [[np.array([1.0, noise])]]

        def layer_sqnr(self):
            return {}

    layers = tuple(Layer(k, n, "Conv", (0,)) for k, n in enumerate(NAMES))
    found = analyse(Runs(), Placement(layers, (), ()), lambda e, g: 1 - float(g[0][0][1]), 0.1)
    assert found.in_float == tuple(NAMES[:9])
    assert found.after >= 0.9


def test_rare_decisions_are_judged_by_greater_noise():
    """Margins of 1 to 50 times the noise: none changes, three would at four times the noise."""
    expected = [[np.array([0.0, k])] for k in range(1, 51)]
    got = [[e[0] + np.array([0.99, 0])] for e in expected]
    assert top1(expected, got) == 1
    assert careful(top1, expected, got) == pytest.approx(1 - 3 / 50 / 4)
    assert careful(top1, expected, expected) == 1
    assert careful(cosine, expected, got) == cosine(expected, got)


def test_samples_are_limited_by_the_memory_of_their_outputs():
    runs = SwitchedRuns(lambda f: {"y": np.zeros(100)}, [{}] * 20, Placement((), (), ()), ["y"], {})
    runs.limit(800 * 7)
    assert len(runs.outputs(())) == 7
    runs.limit(1)
    assert len(runs.outputs(())) == RANKING_SAMPLES


NAMES = [f"layer{k}" for k in range(12)]
