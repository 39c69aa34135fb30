"""Build, load and run small programs; numbers against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.executor.programs import build, entry_program, lowered
from tvmx.executor import build_artifact
from tvmx.runtime import GraphExecutor
from tvmx.target import resolve


def _mlp(weights):
    from tvm import relax

    def body(b, x):
        y = b.emit(relax.op.nn.relu(b.emit(relax.op.matmul(x, relax.const(weights)))))
        z = b.emit(relax.op.reshape(y, (x.ty.shape.values[0] * 2, 16)))
        return [b.emit(relax.op.nn.softmax(z)), z]

    return body


def _mlp_numpy(x, weights):
    z = np.maximum(x @ weights, 0).reshape(-1, 16)
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True), z


@pytest.fixture(scope="module")
def weights():
    return np.random.default_rng(0).standard_normal((24, 32)).astype("float32")


@pytest.mark.parametrize("scheduled", [False, True])
def test_static_program_matches_numpy(tmp_path, weights, scheduled):
    result = build(
        lowered([("x", (6, 24), "float32")], _mlp(weights)), ["p", "z"], tmp_path / "m.so", scheduled=scheduled
    )
    assert result.plan.height >= result.plan.lower_bound
    x = np.random.default_rng(1).standard_normal((6, 24)).astype("float32")
    with GraphExecutor(result.path, threads=2) as ex:
        out = ex({"x": x})
        assert list(out) == ["p", "z"]
        for got, want in zip(out.values(), _mlp_numpy(x, weights)):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_symbolic_program_follows_its_shapes(tmp_path, weights):
    result = build(lowered([("x", ("N", 24), "float32")], _mlp(weights)), ["p", "z"], tmp_path / "m.so")
    with GraphExecutor(result.path) as ex:
        for n in (3, 3, 17, 1, 40):
            x = np.random.default_rng(n).standard_normal((n, 24)).astype("float32")
            for got, want in zip(ex({"x": x}).values(), _mlp_numpy(x, weights)):
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_entries_share_parameters(tmp_path, weights):
    target = resolve("native", 2)
    programs = [
        entry_program(lowered([("x", (n, 24), "float32")], _mlp(weights)), ["p", "z"], target, entry=f"b{n}")
        for n in (1, 8)
    ]
    result = build_artifact(programs, target, tmp_path / "m.so")
    assert result.report["parameter_bytes"] == weights.nbytes
    with GraphExecutor(result.path) as ex:
        for n in (8, 1, 8):
            x = np.random.default_rng(n).standard_normal((n, 24)).astype("float32")
            np.testing.assert_allclose(ex({"x": x})["z"], _mlp_numpy(x, weights)[1], rtol=1e-5, atol=1e-6)
            assert ex.entry == f"b{n}"


def test_in_place_chain_uses_one_buffer(tmp_path):
    from tvm import relax

    def body(b, x):
        y = b.emit(relax.op.nn.softmax(x))
        for _ in range(3):
            y = b.emit(relax.op.nn.softmax(b.emit(relax.op.nn.relu(y))))
        return y

    result = build(lowered([("x", (32, 64), "float32")], body), ["y"], tmp_path / "m.so", scheduled=True)
    x = np.random.default_rng(0).standard_normal((32, 64)).astype("float32")
    want = x
    for _ in range(4):
        e = np.exp(want - want.max(-1, keepdims=True))
        want = e / e.sum(-1, keepdims=True)
    with GraphExecutor(result.path) as ex:
        np.testing.assert_allclose(ex({"x": x})["y"], want, rtol=1e-5)
