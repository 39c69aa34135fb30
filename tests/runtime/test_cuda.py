"""Models for CUDA targets, end to end without a GPU: a fake driver runs their kernels' emulations."""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from tests.cuda.fake_gpu import FakeGpu, needs_gpu_tools
from tvmx import api, cli
from tvmx.cuda import images, nvcc
from tvmx.errors import ArtifactError, CompileError, ConfigError, DeviceError, InputError
from tvmx.executor import cuda_schedule
from tvmx.executor.streams import plan_streams
from tvmx.runtime import CudaExecutor, GraphExecutor, Pipeline, open_executor
from tvmx.runtime.dlpack import CUDA

pytestmark = needs_gpu_tools


def branching() -> bytes:
    """A convolution, two branches of two layers, their product, a classifier; and a view as second output."""
    rng = np.random.default_rng(0)
    weights = {"w1": (16, 3, 3, 3), **{n: (16, 16, 1, 1) for n in ("wa", "wb", "wc", "wd")}, "we": (16, 10)}
    constants = [numpy_helper.from_array((rng.standard_normal(s) * 0.2).astype("f"), n) for n, s in weights.items()]
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c"], pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["s"]),
        *(helper.make_node("Conv", ["s", f"w{n}"], [f"{n}0"]) for n in "ab"),
        *(helper.make_node("Relu", [f"{n}0"], [f"{n}1"]) for n in "ab"),
        helper.make_node("Conv", ["a1", "wc"], ["a2"]),
        helper.make_node("Conv", ["b1", "wd"], ["b2"]),
        helper.make_node("Mul", ["a2", "b2"], ["m"]),
        helper.make_node("GlobalAveragePool", ["m"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("MatMul", ["f", "we"], ["y"]),
    ]
    outputs = [helper.make_tensor_value_info(n, 1, s) for n, s in (("y", [1, 10]), ("f", [1, 16]))]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", 1, [1, 3, 8, 8])], outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


MODEL = branching()
X = np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype("f")


def expected(x: np.ndarray = X) -> list[Any]:
    return list(onnxruntime.InferenceSession(MODEL).run(None, {"x": x}))


def check(outputs: dict[str, Any], x: np.ndarray = X) -> None:
    for found, wanted in zip(outputs.values(), expected(x)):
        np.testing.assert_allclose(found, wanted, rtol=2e-2, atol=2e-3)


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGpu]:
    with pytest.MonkeyPatch.context() as patch:
        yield FakeGpu(tmp_path_factory.mktemp("gpu"), patch)


@pytest.fixture(scope="module")
def library(gpu: FakeGpu) -> Path:
    """Compiled with free events, so that kernels as small as these are spread over streams at all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_schedule, "plan_streams", functools.partial(plan_streams, event_s=0.0))
        return gpu.compile(MODEL, precision="fp16")


@pytest.fixture(autouse=True)
def fresh(gpu: FakeGpu, request: pytest.FixtureRequest) -> Iterator[None]:
    gpu.library.fake_revive()
    gpu.order("forward")
    yield
    gc.collect()
    assert gpu.live == [0] * 6, "memory, modules, streams, events, graphs, contexts that were not given back"


def test_build_report(gpu: FakeGpu, library: Path) -> None:
    report = gpu.report
    assert report["executor"] == "cuda"
    assert report["streams"]["main"] == 2
    assert report["spilled_bytes"] == 0
    assert report["tensor_core_share"] > 0.9
    needed = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    assert "libcuda" not in needed


@pytest.mark.parametrize("order", ["forward", "backward", "3", "4", "5"])
@pytest.mark.parametrize("graph", [False, True])
def test_outputs_are_onnx_runtimes_in_any_order(gpu: FakeGpu, library: Path, graph: bool, order: str) -> None:
    gpu.order(order)
    with CudaExecutor(library, driver=gpu.driver, graph=graph) as ex:
        check(ex({"x": X}))
        check(ex({"x": 2 * X}), 2 * X)
        assert gpu.calls("cuGraphLaunch") == (2 if graph else 0)
        assert gpu.calls("cuStreamBeginCapture_v2") == int(graph)
        assert gpu.calls("cuEventRecord") > 0


def test_executor_chosen_by_the_file(gpu: FakeGpu, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactError, match="CudaExecutor"):
        GraphExecutor(library)
    with pytest.raises(ConfigError, match="threads=2"):
        open_executor(library, threads=2)
    monkeypatch.setenv("TVMX_CUDA_DRIVER", str(gpu.driver))
    with open_executor(library) as ex:
        assert isinstance(ex, CudaExecutor)
        assert (ex.device.name, ex.device.sm, ex.device.from_ptx) == ("Fake GPU", 80, False)
        check(ex({"x": X}))


def test_without_a_driver(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=r"built for cuda-sm80 and needs an NVIDIA driver.*compile it for a CPU"):
        CudaExecutor(library, driver="/nowhere/libcuda.so.1")
    monkeypatch.setenv("TVMX_CUDA_DRIVER", "/nowhere/libcuda.so.1")
    with pytest.raises(DeviceError, match="/nowhere/libcuda"):
        CudaExecutor(library)


def test_an_unfit_device_is_named(gpu: FakeGpu, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setenv(monkeypatch, "TVMX_FAKE_SM", "75")
    with pytest.raises(
        DeviceError, match=r"needs a GPU of compute capability 8\.0 or higher; device 0 \(Fake GPU\) has 7\.5"
    ):
        CudaExecutor(library, driver=gpu.driver)
    setenv(monkeypatch, "TVMX_FAKE_SM", "80")
    with pytest.raises(DeviceError, match="no CUDA device 3: the driver finds 1"):
        CudaExecutor(library, driver=gpu.driver, device=3)
    setenv(monkeypatch, "TVMX_FAKE_DEVICES", "0")
    with pytest.raises(DeviceError, match="nvidia-smi"):
        CudaExecutor(library, driver=gpu.driver)


def test_a_newer_device_gets_the_ptx(gpu: FakeGpu, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setenv(monkeypatch, "TVMX_FAKE_SM", "90")
    with CudaExecutor(library, driver=gpu.driver) as ex:
        assert ex.device.from_ptx
        check(ex({"x": X}))
    setenv(monkeypatch, "TVMX_FAKE_SM", "86")
    with CudaExecutor(library, driver=gpu.driver) as ex:
        assert not ex.device.from_ptx, "machine code for 8.0 runs on 8.6"


def test_asynchronous_runs(gpu: FakeGpu, library: Path) -> None:
    with CudaExecutor(library, driver=gpu.driver) as ex:
        ex.set_input("x", X)
        launched = gpu.calls("cuStreamSynchronize")
        ex.run(stream=0)  # the default stream of other libraries
        first = ex.get_device_output("y")
        assert gpu.calls("cuStreamSynchronize") == launched, "run(stream) returns at once"
        np.testing.assert_allclose(first.numpy(), expected()[0], rtol=2e-2, atol=2e-3)
        y = X.copy()
        ex.set_input("x", y)
        y[:] = 7  # the executor has its own copy
        ex.run(stream=0)
        ex.set_input("x", 3 * X)  # while the run before may not have begun
        ex.run(stream=ex.device.stream)  # another stream: waits for the run before, the arena is one
        ex.synchronize()
        check({"y": ex.get_output("y"), "f": ex.get_output(1)}, 3 * X)
        with pytest.raises(InputError, match="no CUDA stream"):
            ex.run(stream="main")


def test_device_tensors_are_used_where_they_lie(gpu: FakeGpu, library: Path) -> None:
    """An output of one model is the input of the next, on the device."""
    with CudaExecutor(library, driver=gpu.driver) as ex, CudaExecutor(library, driver=gpu.driver) as other:
        ex({"x": X})
        memory = Tensor(ex, X)
        copies = gpu.calls("cuMemcpyHtoDAsync_v2")
        other.set_input("x", memory)
        other.run()
        assert gpu.calls("cuMemcpyHtoDAsync_v2") == copies
        assert gpu.calls("cuMemcpyDtoDAsync_v2") == 0
        check({"y": other.get_output(0)})
        other.set_input("x", Tensor(ex, X, offset=4))
        other.run()
        assert gpu.calls("cuMemcpyDtoDAsync_v2") == 1, "kernels need aligned data"
        check({"y": other.get_output(0)})
        with pytest.raises(InputError, match="not contiguous"):
            other.set_input("x", Tensor(ex, X, transposed=True))
        with pytest.raises(InputError, match="expected float32"):
            other.set_input("x", ex.get_device_output("y"))
        with pytest.raises(InputError, match="lies on device 1"):
            other.set_input("x", Elsewhere())
        del memory
    gc.collect()


def test_outputs_outlive_their_executor(gpu: FakeGpu, library: Path) -> None:
    ex = CudaExecutor(library, driver=gpu.driver)
    ex({"x": X})
    output = ex.get_device_output("y")
    assert output.__dlpack_device__() == (CUDA, 0)
    assert output.__cuda_array_interface__["data"] == (output.address, False)
    capsule = output.__dlpack__(stream=-1)
    ex.close()
    np.testing.assert_allclose(output.numpy(), expected()[0], rtol=2e-2, atol=2e-3)
    del output, ex
    gc.collect()
    assert gpu.live[0] > 0, "the capsule keeps the memory"
    del capsule


def test_profile_and_debug(gpu: FakeGpu, library: Path) -> None:
    with CudaExecutor(library, driver=gpu.driver) as ex:
        ex.set_input("x", X)
        profile = ex.profile(runs=2)
        assert len(profile.kernels) == len(ex.manifest.entries["main"].nodes)
        assert all(k.seconds > 0 for k in profile.kernels)
        assert "this machine" not in str(profile)
        tensors = ex.debug_run({"x": X})
        np.testing.assert_allclose(tensors["y"], expected()[0], rtol=2e-2, atol=2e-3)
        assert len(tensors) >= len(profile.kernels)
        check(ex({"x": X}))


def test_a_lost_context_is_told_once_and_for_all(gpu: FakeGpu, library: Path) -> None:
    ex = CudaExecutor(library, driver=gpu.driver)
    ex.set_input("x", X)
    gpu.fail("cuStreamSynchronize", 700)
    with pytest.raises(DeviceError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS \(700\); the device's context is lost"):
        ex.run()
    with pytest.raises(DeviceError, match=r"earlier error \(700\)"):
        ex.run()
    ex.close()
    del ex
    gpu.library.fake_revive()
    gpu.library.fake_forget()


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("cuMemAlloc_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY.*smaller batch"),
        ("cuModuleLoadData", 209, "NO_BINARY_FOR_GPU.*compile the model for this GPU"),
        ("cuStreamCreate", 1, "cuStreamCreate: CUDA_ERROR_INVALID_VALUE"),
        ("cuInit", 100, "CUDA_ERROR_NO_DEVICE.*nvidia-smi"),
    ],
)
def test_failures_while_opening(gpu: FakeGpu, library: Path, name: str, code: int, reason: str) -> None:
    for nth in (1, 2):
        gpu.fail(name, code, nth)
        if nth == 1 or name != "cuInit":
            with pytest.raises(DeviceError, match=reason):
                CudaExecutor(library, driver=gpu.driver)
        gc.collect()
        assert gpu.live == [0] * 6
        gpu.library.fake_revive()


@pytest.mark.parametrize(
    "name", ["cuLaunchKernel", "cuEventRecord", "cuGraphInstantiateWithFlags", "cuStreamWaitEvent"]
)
def test_failures_while_running(gpu: FakeGpu, library: Path, name: str) -> None:
    with CudaExecutor(library, driver=gpu.driver) as ex:
        gpu.fail(name, 1, 1)
        with pytest.raises(DeviceError, match="INVALID_VALUE"):
            ex({"x": X})
        check(ex({"x": X}))


@pytest.mark.parametrize("event", [True, False])
def test_the_fake_device_punishes_a_missing_event(gpu: FakeGpu, event: bool) -> None:
    """What the tests above rest on: streams without an event between them may run in the unkind order."""
    driver = gpu.library
    gpu.order("backward")
    first, second, mark = (ctypes.c_void_p() for _ in range(3))
    memory = ctypes.c_uint64()
    for stream in (second, first):  # "backward" begins with the oldest
        driver.cuStreamCreate(ctypes.byref(stream), 1)
    driver.cuEventCreate(ctypes.byref(mark), 2)
    driver.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(4))
    given, found = np.array([7], np.int32), np.zeros(1, np.int32)
    size = ctypes.c_size_t(4)
    driver.cuMemcpyHtoDAsync_v2(memory, ctypes.c_void_p(given.ctypes.data), size, first)
    if event:
        driver.cuEventRecord(mark, first)
        driver.cuStreamWaitEvent(second, mark, 0)
    driver.cuMemcpyDtoHAsync_v2(ctypes.c_void_p(found.ctypes.data), memory, size, second)
    assert found[0] == 0, "nothing happens before somebody waits"
    driver.cuStreamSynchronize(second)
    assert (found[0] == 7) == event
    for stream in (first, second):
        driver.cuStreamDestroy_v2(stream)
    driver.cuEventDestroy_v2(mark)
    driver.cuMemFree_v2(memory)


def test_input_errors(gpu: FakeGpu, library: Path) -> None:
    with CudaExecutor(library, driver=gpu.driver) as ex:
        with pytest.raises(InputError, match="not set"):
            ex.run()
        with pytest.raises(InputError, match="no output yet"):
            ex.get_output(0)
        with pytest.raises(InputError, match="wrong dtype"):
            ex({"x": X.astype("float64")})
        with pytest.raises(InputError, match="unknown 'z'"):
            ex({"z": X})
        check(ex({"x": np.asfortranarray(X)}))
    with pytest.raises(InputError, match="closed"):
        ex.run()


def test_pipeline(gpu: FakeGpu, library: Path) -> None:
    with CudaExecutor(library, driver=gpu.driver) as ex:
        pipeline = Pipeline(ex, prepare=lambda k: {"x": k * X}, finish=lambda k, outputs: (k, outputs["y"]))
        with pipeline:
            for k, y in pipeline([1, 2, 3]):
                np.testing.assert_allclose(y, expected(k * X)[0], rtol=2e-2, atol=2e-3)


def test_command_line(
    gpu: FakeGpu, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TVMX_CUDA_DRIVER", str(gpu.driver))
    np.save(tmp_path / "x.npy", X)
    assert cli.main(["run", str(library), "--input", f"x={tmp_path / 'x.npy'}", "-o", str(tmp_path / "y.npz")]) == 0
    check(dict(np.load(tmp_path / "y.npz")))
    assert cli.main(["bench", str(library), "--repeat", "2"]) == 0
    assert cli.main(["run", str(library), "--threads", "2"]) == 1
    capsys.readouterr()
    assert cli.main(["inspect", str(library), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["device"]["arch"] == "sm_80"
    assert facts["tensor_core_share"] > 0.9
    assert cli.main(["inspect", str(library), "--timeline", str(tmp_path / "t.svg")]) == 0
    assert "<svg" in (tmp_path / "t.svg").read_text()


def test_the_runtime_needs_no_compiler(gpu: FakeGpu, library: Path) -> None:
    code = (
        "import sys, numpy as np\n"
        "from tvmx.runtime import CudaExecutor\n"
        f"ex = CudaExecutor({str(library)!r}, driver={str(gpu.driver)!r})\n"
        "ex({'x': np.zeros((1, 3, 8, 8), 'f')})\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('tvm', 'onnx', 'tvm_ffi', 'torch')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_cannot_be_built_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompileError, match="needs fixed shapes"):
        api.compile(MODEL_OF_ANY_BATCH, tmp_path / "m.so", target="cuda-sm80", shapes={"x": ("N", 4)})
    for module in (images, nvcc):  # as on a machine that has no CUDA compiler
        monkeypatch.setattr(module, "nvcc", lambda: None)
        monkeypatch.setattr(module, "nvrtc", lambda: None)
    with pytest.raises(CompileError, match="no CUDA compiler"):
        api.compile(MODEL_OF_ANY_BATCH, tmp_path / "m.so", target="cuda-sm80", shapes={"x": (2, 4)})
    assert not list(tmp_path.iterdir())


def setenv(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """For the fake driver, too: os.environ reaches C's getenv."""
    monkeypatch.setenv(name, value)


class Tensor:
    """What another library would hand over: an array in the device's memory."""

    def __init__(self, ex: CudaExecutor, array: np.ndarray, offset: int = 0, transposed: bool = False) -> None:
        from tvmx.runtime.device import TO_DEVICE, DeviceArray, DeviceMemory

        memory = DeviceMemory(ex.device, array.nbytes + offset)
        ex.device.copy(memory.address + offset, array.ctypes.data, array.nbytes, TO_DEVICE)
        ex.device.synchronize()
        self.whole = DeviceArray(memory, array.shape, array.dtype, "float32", ex.device.stream)
        self.offset, self.transposed = offset, transposed

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.whole.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        from tvmx.runtime import dlpack

        capsule = self.whole.__dlpack__(stream=stream)
        made = next(reversed(dlpack._exports.values()))
        made.managed.tensor.byte_offset = self.offset
        if self.transposed:
            made.strides[2], made.strides[3] = made.strides[3], made.strides[2]
        return capsule


class Elsewhere:
    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 1


MODEL_OF_ANY_BATCH = bytes(
    helper.make_model(
        helper.make_graph(
            [helper.make_node("Relu", ["x"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", 1, ["N", 4])],
            [helper.make_tensor_value_info("y", 1, ["N", 4])],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    ).SerializeToString()
)
