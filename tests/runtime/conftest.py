"""One small library for the tests of the runtime."""

from __future__ import annotations

import numpy as np
import pytest

from tests.executor.programs import build, lowered


@pytest.fixture(scope="session")
def weights():
    return np.random.default_rng(0).standard_normal((64, 64)).astype("float32")


@pytest.fixture(scope="session")
def library(tmp_path_factory, weights):
    """`y = softmax(relu(x @ w))` for x of 32×64, scheduled for two threads."""
    from tvm import relax

    def body(b, x):
        return b.emit(relax.op.nn.softmax(b.emit(relax.op.nn.relu(b.emit(relax.op.matmul(x, relax.const(weights)))))))

    path = tmp_path_factory.mktemp("library") / "m.so"
    return build(lowered([("x", (32, 64), "float32")], body), ["y"], path, scheduled=True).path


@pytest.fixture(scope="session")
def reference(weights):
    def run(x):
        z = np.maximum(x @ weights, 0)
        e = np.exp(z - z.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    return run
