"""profile() and debug_run()."""

from __future__ import annotations

import json

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import tvmx
from tests.executor.programs import build, lowered
from tvmx.runtime import GraphExecutor
from tvmx.runtime.profile import KernelProfile, Profile
from tvmx.target import detect_host


def _x(seed=0):
    return np.random.default_rng(seed).standard_normal((32, 64)).astype("float32")


def test_profile_names_kernels_and_rates(library, tmp_path):
    with GraphExecutor(library, threads=2) as ex:
        ex.set_input("x", _x())
        profile = ex.profile(runs=9)
    assert [k.op for k in profile.kernels] == ["matmul+relu", "softmax"]
    matmul = profile.kernels[0]
    assert matmul.flops >= 2 * 32 * 64 * 64
    assert matmul.bytes == 4 * (32 * 64 + 64 * 64 + 32 * 64)
    assert matmul.seconds > 0
    assert matmul.flop_rate == pytest.approx(matmul.flops / matmul.seconds)
    assert profile.peaks["float32"] > 1e8
    assert profile.peak_bandwidth > 1e7
    assert 0 < profile.share_of_peak(matmul) < 3
    assert "matmul+relu" in profile.table()
    data = json.loads(json.dumps(profile.to_json()))
    assert data["threads"] == 2
    assert len(data["kernels"]) == 2
    profile.save_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert events[1]["ts"] == pytest.approx(events[0]["dur"])


def test_profile_leaves_runs_as_they_were(library):
    with GraphExecutor(library) as ex:
        want = ex({"x": _x()})["y"]
        ex.profile(runs=3)
        np.testing.assert_array_equal(ex.get_output("y"), want, err_msg="of the profiled runs themselves")
        np.testing.assert_array_equal(ex({"x": _x()})["y"], want)


@pytest.mark.parametrize("rows", [32, "N"])
def test_debug_run_returns_every_intermediate(tmp_path, rows):
    from tvm import relax

    def body(b, x):
        y = b.emit(relax.op.nn.softmax(x))
        z = b.emit(relax.op.reshape(y, (x.ty.shape.values[0] * 4, 16)))
        w = b.emit(relax.op.nn.softmax(z))
        return b.emit(relax.op.multiply(w, w))

    path = build(lowered([("x", (rows, 64), "float32")], body), ["out"], tmp_path / "m.so").path

    def softmax(v):
        e = np.exp(v - v.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    x = _x()
    with GraphExecutor(path) as ex:
        found = ex.debug_run({"x": x})
        first = softmax(x)
        second = softmax(first.reshape(-1, 16))
        by_shape = {a.shape: a for a in found.values() if a.shape != (128, 16)}
        np.testing.assert_allclose(by_shape[(32, 64)], first, rtol=1e-5)
        np.testing.assert_allclose(found["out"], second * second, rtol=1e-5)
        assert any(np.allclose(a, first.reshape(-1, 16), rtol=1e-5) for a in found.values() if a.shape == (128, 16))
        np.testing.assert_array_equal(ex.debug_run()["out"], ex({"x": x})["out"])


def test_symbolic_memory_statistics_and_trim(tmp_path):
    from tvm import relax

    def body(b, x):
        return b.emit(relax.op.nn.softmax(b.emit(relax.op.nn.softmax(x))))

    path = build(lowered([("x", ("N", 64), "float32")], body), ["y"], tmp_path / "m.so").path
    with GraphExecutor(path) as ex:
        sizes = []
        for n in (8, 64, 8, 60, 9):
            ex({"x": np.ones((n, 64), "float32")})
            sizes.append(ex.arena_bytes)
        assert sizes == sorted(sizes)  # the block never shrinks by itself
        assert ex.arena_lower_bound == 9 * 64 * 4
        stats = ex.memory_stats
        assert stats.entries == 4
        before = ex.arena_bytes
        freed = ex.trim()
        assert freed == before - ex.arena_bytes > 0
        np.testing.assert_allclose(ex({"x": np.ones((9, 64), "float32")})["y"], 1 / 64, rtol=1e-5)


def test_share_of_peak_is_that_of_the_kernels_arithmetic():
    kernels = [KernelProfile(d, d, d, "r", 1e-3, 1, 50, d) for d in ("float32", "int8", "bfloat16")]
    profile = Profile("main", 1, 1, tuple(kernels), 3e-3, {"float32": 1e5, "int8": 4e5}, 1.0, (0.0, 1e-3, 2e-3))
    assert [profile.share_of_peak(k) for k in kernels] == pytest.approx([0.5, 0.125, 0.5])
    assert "0.0 int8" in profile.table()


def test_integer_kernels_are_measured_against_integer_products(tmp_path):
    weights = numpy_helper.from_array(np.ones((64, 32), np.int8), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, [16, 64])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [16, 32])],
        [weights],
    )
    tvmx.compile(helper.make_model(graph), tmp_path / "m.so", threads=1)
    with GraphExecutor(tmp_path / "m.so") as ex:
        ex.set_input("x", np.ones((16, 64), np.uint8))
        profile = ex.profile(runs=3)
    assert [k.arithmetic for k in profile.kernels] == ["int8"]
    if detect_host().has("avx2"):
        assert profile.peaks["int8"] > profile.peaks["float32"]
