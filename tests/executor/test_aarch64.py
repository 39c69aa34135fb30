"""Models compiled for aarch64 run under qemu-user: the float and int8 schedules of every family, by C code alone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

import tvmx
from tests.onnx_models import assert_close, convnet, model, reference
from tests.run_model import run_model
from tvmx.executor.bundle import write_bundle

HARNESS = Path(__file__).parent / "harness.c"
PRESETS = ["aarch64-neon", "aarch64-dotprod"]  # they differ in 8-bit products alone
node = helper.make_node


@pytest.fixture
def run(tmp_path):
    """run(proto, inputs, preset) → outputs of the model, compiled for `preset` and run by qemu."""
    gcc, qemu = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if gcc is None or qemu is None:
        pytest.skip("needs gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user")

    def run(proto, inputs, preset):
        path = tvmx.compile(proto, tmp_path / "arm.so", target=preset, threads=2).path
        include = write_bundle(path, tmp_path / "bundle").folder / "include"
        imported = tvmx.import_onnx(proto)
        for info in imported.inputs:
            inputs[info.name].tofile(tmp_path / f"{info.name}.bin")
        command = [gcc, "-O1", f"-I{include}", str(HARNESS), "-o", "run", str(path), "-Wl,-rpath,."]
        subprocess.run(command, cwd=tmp_path, check=True)
        files = [f"{info.name}.bin" for info in imported.inputs]
        command = [qemu, "-L", "/usr/aarch64-linux-gnu", "-cpu", "max", "./run", *files]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=240)
        return {
            info.name: np.fromfile(tmp_path / f"output_{i}.bin", info.dtype).reshape(info.shape)
            for i, info in enumerate(imported.outputs)
        }

    return run


def rand(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def families():
    """One output a family, all from one picture and one matrix."""
    image = [
        ("Conv", ["x", "w1"], {}, "pointwise", rand(24, 16, 1, 1)),
        ("Conv", ["x", "w3"], {"pads": [1] * 4}, "window", rand(20, 16, 3, 3)),
        ("Conv", ["x", "ws"], {"pads": [1] * 4, "strides": [2, 2]}, "strided", rand(20, 16, 3, 3)),
        ("Conv", ["x", "wd"], {"pads": [1] * 4, "group": 16}, "depthwise", rand(16, 1, 3, 3)),
        ("Conv", ["x", "wg"], {"group": 4, "dilations": [2, 2]}, "grouped", rand(24, 4, 3, 3)),
        ("ConvTranspose", ["x", "wt"], {"strides": [2, 2]}, "transposed", rand(16, 8, 2, 2)),
        ("MaxPool", ["x"], {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}, "largest", None),
        ("AveragePool", ["x"], {"kernel_shape": [3, 3], "pads": [1] * 4}, "average", None),
        ("GlobalAveragePool", ["x"], {}, "mean", None),
    ]
    rows = [
        ("MatMul", ["a", "wm"], {}, "product", rand(40, 36)),
        ("Softmax", ["a"], {}, "softmax", None),
        ("Gelu", ["a"], {}, "gelu", None),
        ("Erf", ["a"], {}, "erf", None),
        ("Sigmoid", ["a"], {}, "sigmoid", None),
        ("LayerNormalization", ["a", "scale"], {}, "norm", rand(40)),
        ("Transpose", ["a"], {"perm": [1, 0]}, "turned", None),
        ("ReduceMax", ["a"], {"keepdims": 0}, "max", None),
        ("CumSum", ["a", "axis"], {}, "cumsum", np.array(1)),
        ("Gather", ["a", "index"], {}, "gather", np.array([5, 0, 12])),
    ]
    nodes, weights = [], {}
    for op, inputs, attrs, out, weight in (*image, *rows):
        nodes.append(node(op, inputs, [out], **attrs))
        if weight is not None:
            weights[inputs[1]] = weight
    ranks = {out: 4 if inputs[0] == "x" else 2 for _, inputs, _, out, _ in (*image, *rows)} | {"max": 0}
    outputs = {n.output[0]: [f"{n.output[0]}{i}" for i in range(ranks[n.output[0]])] for n in nodes}
    return model(nodes, {"x": (1, 16, 15, 13), "a": (13, 40)}, outputs, weights, opset=20)


def quantised():
    """A convolution and a product in 8 bits: QDQ with per-channel weights, and MatMulInteger on run-time codes."""
    rng = np.random.default_rng(3)
    weights = {
        "s": np.float32(0.03), "z": np.uint8(120), "t": np.float32(0.11), "u": np.uint8(7),
        "w": rng.integers(-127, 128, (24, 16, 3, 3), dtype=np.int8), "ws": (rng.random(24) / 50).astype(np.float32),
        "wz": np.zeros(24, np.int8),
        "m": rng.integers(-127, 128, (24, 20), dtype=np.int8), "ms": np.float32(0.01), "mz": np.int8(0),
        "axes": np.array([2, 3]),
    }  # fmt: skip
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=0),
        node("Conv", ["xd", "wd"], ["c"], pads=[1] * 4),
        node("Relu", ["c"], ["r"]),
        node("QuantizeLinear", ["r", "t", "u"], ["codes"]),
        node("DequantizeLinear", ["codes", "t", "u"], ["rd"]),
        node("ReduceMean", ["rd", "axes"], ["mean"], keepdims=0),
        node("DynamicQuantizeLinear", ["mean"], ["q", "qs", "qz"]),
        node("MatMulInteger", ["q", "m", "qz", "mz"], ["sums"]),
    ]
    outputs = {"codes": ((1, 24, 15, 13), TensorProto.UINT8), "sums": ((1, 20), TensorProto.INT32)}
    return model(nodes, {"x": (1, 16, 15, 13)}, outputs, weights, opset=20)


def test_float_families(run):
    proto, inputs = families(), {"x": rand(1, 16, 15, 13), "a": rand(13, 40)}
    assert_close(run(proto, inputs, "aarch64-neon"), reference(proto, inputs))


@pytest.mark.parametrize("preset", PRESETS)
def test_integers_are_those_of_this_machine(run, preset, tmp_path):
    proto, inputs = quantised(), {"x": rand(1, 16, 15, 13)}
    got, here, want = run(proto, inputs, preset), run_model(proto, inputs, tmp_path), reference(proto, inputs)
    for name in want:
        np.testing.assert_array_equal(got[name], here[name])
    # A float of the requantisation may lie one bit to the other side of a tie.
    assert np.abs(got["codes"].astype(int) - want["codes"].astype(int)).max() <= 1


def test_small_network(run):
    proto, x = convnet(), rand(1, 3, 12, 12)
    assert_close(run(proto, {"x": x}, "aarch64-neon"), reference(proto, {"x": x}))
