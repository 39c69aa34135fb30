"""What is special about a model, on the emulated GPU: copies, views, indices, several entries, an If, a bundle."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.cuda.fake_gpu import FakeGpu, needs_gpu_tools
from tvmx.errors import DeviceError, InputError
from tvmx.executor import cuda_schedule
from tvmx.executor.bundle import write_bundle
from tvmx.executor.streams import plan_streams
from tvmx.report.device_code import read_cubins
from tvmx.runtime import CudaExecutor
from tvmx.schedule import registry

pytestmark = needs_gpu_tools


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGpu]:
    with pytest.MonkeyPatch.context() as patch:
        yield FakeGpu(tmp_path_factory.mktemp("gpu"), patch)


@pytest.fixture(autouse=True)
def nothing_left(gpu: FakeGpu) -> Iterator[None]:
    yield
    gc.collect()
    assert gpu.live == [0] * 6


def model(nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: list[Any]) -> bytes:
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(made.SerializeToString())


def info(name: str, kind: int, *shape: Any) -> Any:
    return helper.make_tensor_value_info(name, kind, list(shape))


F, I, B = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
TABLE = np.random.default_rng(0).standard_normal((5, 4)).astype("f")
LOOKUP = model(
    [
        helper.make_node("Gather", ["table", "i"], ["rows"]),
        helper.make_node("Greater", ["rows", "x"], ["greater"]),
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("Reshape", ["rows", "shape"], ["flat"]),
        helper.make_node("Identity", ["table"], ["constant"]),
    ],
    [info("i", I, "N"), info("x", F, "N", 4)],
    [info("greater", B, "N", 4), info("same", F, "N", 4), info("flat", F, "M"), info("constant", F, 5, 4)],
    [numpy_helper.from_array(TABLE, "table"), numpy_helper.from_array(np.array([-1]), "shape")],
)


@pytest.fixture(scope="module")
def lookup(gpu: FakeGpu) -> Path:
    return gpu.compile(LOOKUP, "lookup", entries={"n2": {"i": (2,), "x": (2, 4)}, "n3": {"i": (3,), "x": (3, 4)}})


def test_entries_copies_and_indices(gpu: FakeGpu, lookup: Path) -> None:
    session = onnxruntime.InferenceSession(LOOKUP)
    with CudaExecutor(lookup, driver=gpu.driver) as ex:
        for n in (2, 3, 2):
            feed = {"i": np.arange(n) + 2, "x": np.full((n, 4), 0.1, "f")}
            for found, wanted in zip(ex(feed).values(), session.run(None, feed)):
                np.testing.assert_array_equal(found, wanted)
                assert found.dtype == wanted.dtype
        with pytest.raises(InputError, match="uses it as an index"):
            ex({"i": np.array([0, 5]), "x": np.zeros((2, 4), "f")})


def test_shared_arrays_are_seen_anew(gpu: FakeGpu, lookup: Path) -> None:
    with CudaExecutor(lookup, driver=gpu.driver, entry="n2") as ex:
        x = np.zeros((2, 4), "f")
        ex.set_input("i", np.array([0, 1]))
        ex.set_input("x", x, copy=False)
        for value in (1, 2):
            x[:] = value
            ex.run()
            assert (ex.get_output("same") == value).all()
            assert (ex.debug_run()["greater"] == (TABLE[:2] > value)).all()


def test_bundle_runs_alone(gpu: FakeGpu, lookup: Path, tmp_path: Path) -> None:
    bundle = write_bundle(lookup, tmp_path / "bundle")
    assert not bundle.cpp
    assert (tmp_path / "bundle/include/tvmx_cuda.h").exists()
    assert "NVIDIA driver" in (tmp_path / "bundle/README.md").read_text()
    command = [sys.executable, "-I", str(tmp_path / "bundle/python/run_model.py")]
    done = subprocess.run(command, capture_output=True, text=True, env={"TVMX_CUDA_DRIVER": "/nowhere.so"})
    assert "needs an NVIDIA driver" in done.stderr
    folder = {"TVMX_CUDA_DRIVER": str(gpu.driver), "TVMX_FAKE_KERNELS": str(gpu.folder)}
    done = subprocess.run(command, capture_output=True, text=True, env=folder)
    assert done.returncode == 0, done.stderr
    assert "same: float32[2, 4]" in done.stdout


def test_machine_code_is_read_back(lookup: Path) -> None:
    cubins = read_cubins(lookup)
    assert cubins
    assert all(data.startswith(b"\x7fELF") for data in cubins.values())


def test_an_if_is_decided_on_the_device(gpu: FakeGpu) -> None:
    def branch(name: str, op: str) -> Any:
        return helper.make_graph([helper.make_node(op, ["x"], [name])], name, [], [info(name, F, 3)])

    condition = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["c"]),
        helper.make_node("If", ["c"], ["y"], then_branch=branch("p", "Neg"), else_branch=branch("q", "Abs")),
    ]
    path = gpu.compile(
        model(condition, [info("x", F, 3)], [info("y", F, 3)], [numpy_helper.from_array(np.float32(0), "zero")]), "if"
    )
    with CudaExecutor(path, driver=gpu.driver) as ex:
        for x in (np.array([1, 2, 3], "f"), np.array([-1, -2, -3], "f")):
            np.testing.assert_array_equal(ex({"x": x})["y"], -x)


def test_parts_are_computed_where_they_belong(gpu: FakeGpu) -> None:
    """Slices are views, a concatenation's parts lie in its result, whichever streams they come from."""
    nodes = [
        helper.make_node("Split", ["x"], ["a", "b"], axis=0),
        helper.make_node("Exp", ["a"], ["p"]),
        helper.make_node("Softmax", ["b"], ["q"], axis=1),
        helper.make_node("Concat", ["q", "p"], ["c"], axis=0),
        helper.make_node("Softmax", ["c"], ["y"], axis=1),
    ]
    proto = model(nodes, [info("x", F, 4, 64)], [info("y", F, 4, 64)], [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_schedule, "plan_streams", functools.partial(plan_streams, event_s=0.0))
        path = gpu.compile(proto, "parts")
    x = np.random.default_rng(0).standard_normal((4, 64)).astype("f")
    wanted = onnxruntime.InferenceSession(proto).run(None, {"x": x})[0]
    with CudaExecutor(path, driver=gpu.driver) as ex:
        assert not any("concat" in n.op or "split" in n.op for n in ex.manifest.entries["main"].nodes)
        for order in ("forward", "backward"):
            gpu.order(order)
            np.testing.assert_allclose(ex({"x": x})["y"], wanted, rtol=1e-5)
        tensors = ex.debug_run({"x": x})
        joined = np.concatenate([np.exp(x[2:]) / np.exp(x[2:]).sum(1, keepdims=True), np.exp(x[:2])])
        assert any(a.shape == (4, 64) and np.allclose(a, joined, rtol=1e-5) for a in tensors.values())


def test_wgmma_goes_the_whole_way(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of sm_90a code runs where there is Hopper and its shared memory, and nowhere else."""
    rules = [replace(r, priority=1) if r.name == "cuda.wgmma" else r for r in registry._RULES]
    monkeypatch.setattr(registry, "_RULES", rules)
    rng = np.random.default_rng(0)
    x, weight = rng.integers(-2, 3, (128, 320)).astype("f"), rng.integers(-2, 3, (320, 256)).astype("f")
    constants = [numpy_helper.from_array(weight, "w")]
    product = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], [info("x", F, 128, 320)], [info("y", F, 128, 256)], constants
    )
    path = gpu.compile(product, "wgmma", target="cuda-sm90", precision="fp16")
    assert gpu.report["rules"]["cuda.wgmma"] == 1
    monkeypatch.setenv("TVMX_FAKE_SM", "90")
    with pytest.raises(DeviceError, match=r"bytes of shared memory a block; device 0 \(Fake GPU\) has 166912: compile"):
        CudaExecutor(path, driver=gpu.driver)
    monkeypatch.setenv("TVMX_FAKE_SHARED", str(227 << 10))
    with CudaExecutor(path, driver=gpu.driver) as ex:
        np.testing.assert_array_equal(ex({"x": x})["y"], x @ weight)
    monkeypatch.setenv("TVMX_FAKE_SM", "100")
    with pytest.raises(DeviceError, match=r"compute capability 9\.0"):
        CudaExecutor(path, driver=gpu.driver)
