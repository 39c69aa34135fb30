"""The whole stage on small models: valid ONNX, close to float, and the failures others have had."""

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.onnx_models import convnet, model, reference
from tests.quantize.helpers import calibration_of, constants, normal_feeds, ops, plan_of, quantized, sqnr
from tvmx.errors import ConfigError
from tvmx.quantize import OBSERVERS, Scheme, finish, load_calibration, parse_override


@pytest.mark.parametrize("observer", OBSERVERS)
def test_a_small_network_stays_close(observer):
    proto = convnet()
    data = normal_feeds(proto, 16)
    result = quantized(proto, data, observer)
    onnx.checker.check_model(result.proto, full_check=True)
    assert sqnr(proto, result.proto, data) > 35
    kinds = ops(result.proto)
    assert kinds.count("QuantizeLinear") == 6
    weights = constants(result.proto)
    assert {str(w.dtype) for w in weights.values() if w.ndim >= 2 and w.size > 10} == {"int8"}


def test_every_observer_in_one_pass():
    report = quantized(convnet(), observer="entropy", compare_all=True).report
    assert set(report.observers) == set(OBSERVERS)
    assert report.observers["mse"] > report.observers["ema"]


def test_calibration_goes_through_a_file(tmp_path):
    proto = convnet()
    plan = plan_of(proto)
    calibration = calibration_of(plan, normal_feeds(proto))
    calibration.save(tmp_path / "r.json")
    again = load_calibration(tmp_path / "r.json")
    for observer in OBSERVERS:
        a, b = (finish(plan, c, observer).proto.SerializeToString() for c in (calibration, again))
        assert a == b
    (tmp_path / "bad.json").write_text('{"format": "x"}')
    with pytest.raises(ConfigError, match="not a calibration file"):
        load_calibration(tmp_path / "bad.json")


def test_batches_of_any_size_give_the_same_ranges():
    proto = convnet(batch="N")
    rows = np.random.default_rng(0).standard_normal((10, 3, 12, 12)).astype(np.float32)
    plan = plan_of(proto)
    one, many = (calibration_of(plan, data) for data in ([rows], [rows[:4], rows[4:8], rows[8:]]))
    assert {k: s.to_json() for k, s in one.stats.items()} == {k: s.to_json() for k, s in many.stats.items()}
    assert one.samples == 10


def shared_weight():
    node = helper.make_node
    return model(
        [
            node("MatMul", ["x", "w"], ["a"], "first"),
            node("Relu", ["a"], ["r"]),
            node("MatMul", ["r", "w"], ["b"], "second"),
        ],
        {"x": (4, 8)},
        {"b": (4, 8)},
        {"w": np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)},
    )


@pytest.mark.parametrize("in_float", [(), ("first",), ("second",)])
def test_a_shared_weight_is_quantised_once_for_all_its_users(in_float):
    overrides = tuple(parse_override(f"{name}=float") for name in in_float)
    result = quantized(shared_weight(), scheme=Scheme(prefer="size", overrides=overrides)).proto
    assert [str(c.dtype) for c in constants(result).values() if c.ndim == 2] == ["int8"]
    assert len({n.input[1] for n in result.graph.node if n.op_type == "MatMul"}) == 1


def test_depthwise_with_a_near_zero_channel():
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((4, 1, 3, 3)).astype(np.float32)
    weight[1] *= 1e-12
    weight[2] = 0
    proto = model(
        [helper.make_node("Conv", ["x", "w", "b"], ["y"], group=4, pads=[1, 1, 1, 1])],
        {"x": (1, 4, 8, 8)},
        {"y": (1, 4, 8, 8)},
        {"w": weight, "b": np.array([0.1, 2.0, -3.0, 0.0], np.float32)},
    )
    data = normal_feeds(proto)
    result = quantized(proto, data).proto
    assert sqnr(proto, result, data) > 30
    y = reference(result, data[0])["y"]
    np.testing.assert_allclose(y[0, 1], 2.0, atol=1e-3)
    np.testing.assert_allclose(y[0, 2], -3.0, atol=1e-3)


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("outputs", [False, True])
def test_the_last_layer_is_calibrated(observer, outputs):
    """Entropy calibration elsewhere fails with a KeyError or too few bins on a model's output."""
    proto = model(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"])],
        {"x": (64, 6)},
        {"y": (64, 2)},
        {"w": np.eye(6, 2, dtype=np.float32), "b": np.zeros(2, np.float32)},
    )
    data = normal_feeds(proto, 3)
    result = quantized(proto, data, observer, Scheme(prefer="size", quantize_outputs=outputs))
    assert ops(result.proto).count("QuantizeLinear") == 1 + outputs
    assert [o.name for o in result.proto.graph.output] == ["y"]
    assert sqnr(proto, result.proto, data) > 15


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "always 0"), (2.5, "always 2.5"), (np.nan, "never finite"), (np.inf, "never finite")]
)
def test_degenerate_tensors_warn_by_name_and_work(value, text):
    proto = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        {"x": (2, 4)},
        {"y": (2, 4)},
        {"w": np.eye(4, dtype=np.float32)},
    )
    result = quantized(proto, [{"x": np.full((2, 4), value, np.float32)}])
    assert any(text in w and "'x'" in w for w in result.report.warnings)
    scales = [c for n, c in constants(result.proto).items() if n.endswith("_scale")]
    assert all(np.isfinite(s).all() and (s > 0).all() for s in scales)
    assert np.isfinite(reference(result.proto, {"x": np.ones((2, 4), np.float32)})["y"]).all()


def test_pictures_that_are_not_normalised_are_noticed():
    proto = convnet()
    data = [{"x": np.random.default_rng(k).uniform(0, 255, (1, 3, 12, 12)).astype(np.float32)} for k in range(20)]
    assert any("normalised" in w for w in quantized(proto, data).report.warnings)
    assert not quantized(proto, normal_feeds(proto, 20)).report.warnings


def test_few_samples_are_noticed():
    assert any("3 samples" in w for w in quantized(convnet(), normal_feeds(convnet(), 3)).report.warnings)


def test_saturated_activations_are_noticed():
    node = helper.make_node
    proto = model(
        [node("MatMul", ["x", "w"], ["a"]), node("Sigmoid", ["a"], ["s"]), node("MatMul", ["s", "w"], ["y"])],
        {"x": (4, 8)},
        {"y": (4, 8)},
        {"w": np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)},
    )
    data = normal_feeds(proto, 20)
    assert not quantized(proto, data).report.warnings
    far = [{"x": 1000 * feed["x"]} for feed in data]
    assert any("Sigmoid" in w and "ends" in w for w in quantized(proto, far).report.warnings)
