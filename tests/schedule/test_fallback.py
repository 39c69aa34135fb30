"""Kernels whose schedule only fails when it is built get a plainer one."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from onnx import TensorProto, helper

import tvmx
from tests.onnx_models import assert_close, convnet, model, reference
from tests.run_model import run_model
from tvmx.errors import CompileError
from tvmx.runtime import GraphExecutor
from tvmx.schedule import registry
from tvmx.schedule.registry import Rule


@pytest.fixture
def plant(monkeypatch):
    """Put a rule before all others that TVM's primitives accept and its lowering refuses."""

    def unrollable(sch, target):
        """Thread bindings are for GPUs: lowering for a CPU ends with an error."""
        block = sch.get_child_blocks(sch.get_sblock("root"))[-1]
        sch.bind(sch.get_loops(block)[0], "threadIdx.x")

    importlib.import_module("tvmx_schedules")  # registers the rules

    def put(match=lambda workload: True, name="test.planted", priority=1000):
        rule = Rule(name, unrollable, match, lambda target: True, priority)
        monkeypatch.setattr(registry, "_RULES", [*registry._RULES, rule])

    return put


def convolution(workload):
    return workload.op is not None and workload.op.startswith("conv")


def test_the_catch_all_takes_the_place_of_a_schedule_that_does_not_build(tmp_path, plant, caplog):
    plant(convolution)
    proto, x = convnet(), np.random.default_rng(0).standard_normal((1, 3, 12, 12)).astype(np.float32)
    result = tvmx.compile(proto, tmp_path / "m.so", threads=1)
    warnings = [r.message for r in caplog.records if "cannot be built" in r.message]
    assert len(warnings) == 2
    assert all("kernel fused_conv2d" in w and "test.planted" in w and "cpu.generic takes its place" in w
               for w in warnings)  # fmt: skip
    assert "test.planted" not in result.report["rules"]
    with GraphExecutor(result.path) as executor:
        assert_close(executor({"x": x}), reference(proto, {"x": x}))
        assert all(n.rule != "test.planted" for n in executor.manifest.entries["main"].nodes)


def test_a_catch_all_that_does_not_build_leaves_the_kernel_serial(tmp_path, plant, caplog, monkeypatch):
    monkeypatch.setattr(registry, "_RULES", [r for r in registry._RULES if r.priority >= 0])
    plant(convolution)
    plant(name="test.catch_all", priority=-60)
    proto, x = convnet(), np.random.default_rng(0).standard_normal((1, 3, 12, 12)).astype(np.float32)
    got = run_model(proto, {"x": x}, tmp_path)
    assert "unscheduled takes its place" in caplog.text
    assert_close(got, reference(proto, {"x": x}))


def test_a_kernel_that_runs_in_place_does_so_by_its_plainer_schedule(tmp_path, plant):
    proto = model(
        [helper.make_node(op, [a], [b]) for op, a, b in (("Softmax", "x", "s"), ("Sigmoid", "s", "t"),
                                                         ("Softmax", "t", "y"))],
        {"x": (40, 64)},
        {"y": (40, 64)},
    )  # fmt: skip
    plant()
    x = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)
    assert_close(run_model(proto, {"x": x}, tmp_path), reference(proto, {"x": x}))


def test_a_program_of_the_vm_is_built_again(tmp_path, plant, caplog):
    proto = model(
        [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("NonZero", ["r"], ["y"])],
        {"x": (4, 5)},
        {"y": ((2, "n"), TensorProto.INT64)},
    )
    plant()
    x = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    got = run_model(proto, {"x": x}, tmp_path)["y"]
    np.testing.assert_array_equal(got, np.stack(np.nonzero(np.maximum(x, 0))))
    assert "cannot be built" in caplog.text


def test_a_kernel_that_nothing_can_build_is_an_error_that_names_it(tmp_path, monkeypatch):
    from tvmx.executor import kernels
    from tvmx.schedule import fallback

    def fail(*_):
        raise RuntimeError("LLVM says no")

    monkeypatch.setattr(kernels, "build_objects", fail)
    monkeypatch.setattr(fallback, "build_module", fail)
    with pytest.raises(CompileError, match=r"kernel .* does not compile: LLVM says no"):
        tvmx.compile(convnet(), tmp_path / "m.so", threads=1)
    assert not (tmp_path / "m.so").exists()
