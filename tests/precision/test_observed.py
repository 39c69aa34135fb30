"""Ranges from calibration keep in float32 what was seen beyond float16."""

from __future__ import annotations

import json

import numpy as np
import pytest
from onnx import helper

import tvmx
from tests.onnx_models import model
from tvmx.cli import main
from tvmx.errors import ConfigError
from tvmx.precision import PrecisionRules
from tvmx.precision.observed import with_observed

node = helper.make_node


def two_products():
    """a = 300 x makes values of about 9e4, b = x / 100 small ones."""
    rng = np.random.default_rng(0)
    nodes = [
        node("MatMul", ["x", "wa"], ["a"], name="big"),
        node("MatMul", ["x", "wb"], ["b"], name="small"),
        node("Add", ["a", "b"], ["y"], name="sum"),
    ]
    weights = {
        "wa": np.full((64, 48), 300, np.float32),
        "wb": (rng.standard_normal((64, 48)) / 100).astype(np.float32),
    }
    return model(nodes, {"x": [4, 64]}, {"y": [4, 48]}, weights)


def test_calibrated_ranges_reach_the_plan(tmp_path, capsys):
    import onnx

    proto = two_products()
    onnx.save(proto, tmp_path / "m.onnx")
    np.savez(tmp_path / "calib.npz", x=np.full((16, 64), 5, np.float32))
    where = [str(tmp_path / "m.onnx"), "--target", "native"]
    calib = ["--calib", str(tmp_path / "calib.npz"), "--every-tensor", "-o", str(tmp_path / "r.json")]
    assert main(["calibrate", *where, *calib]) in (0, None)
    options = [*where, "--precision", "fp16", "--json"]
    capsys.readouterr()
    assert main(["precision", *options]) in (0, None)
    plain = {o["name"]: o for o in json.loads(capsys.readouterr().out)["entries"]}
    assert main(["precision", *options, "--ranges", str(tmp_path / "r.json")]) in (0, None)
    plan = {o["name"]: o for o in json.loads(capsys.readouterr().out)["entries"]}
    assert "observed magnitude" not in plain["big"]["reason"]
    assert plan["big"]["precision"] == "fp32"
    assert "observed magnitude 96000 exceeds float16" in plan["big"]["reason"]
    assert "observed" not in plan["small"]["reason"]


def test_ranges_the_user_gave_win_and_unknown_nodes_are_left_out():
    rules = with_observed(PrecisionRules(ranges={"a": 1.0}), {"a": 7e4, "b": 2.0, "folded": 3.0}, ["a", "b"])
    assert rules.ranges == {"a": 1.0, "b": 2.0}


def test_an_imported_model_has_no_tensor_names():
    with pytest.raises(ConfigError, match="give its path, bytes or ModelProto"):
        tvmx.plan_precision(tvmx.import_onnx(two_products()), "fp16", ranges="r.json")
