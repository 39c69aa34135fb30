"""Nodes are run in the order that needs the least memory, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.executor.programs import build, graph_of, lowered
from tvmx.executor.lifetimes import arena_bound
from tvmx.executor.order import reordered
from tvmx.runtime import GraphExecutor

BRANCHES = 4


def branches(builder: Any, x: Any) -> Any:
    """Level by level, as exporters write it: all wide values first, then their reductions."""
    from tvm import relax

    op, emit = relax.op, builder.emit
    wide = [emit(op.nn.softmax(emit(op.multiply(x, relax.const(np.float32(k + 1)))), axis=0)) for k in range(BRANCHES)]
    narrow = [emit(op.sum(w, axis=1)) for w in wide]
    total = narrow[0]
    for value in narrow[1:]:
        total = emit(op.nn.softmax(emit(op.add(total, value))))
    return [total, emit(op.reshape(narrow[1], (8, 8)))]


def reference(x: np.ndarray) -> list[np.ndarray]:
    def softmax(a: np.ndarray, axis: int) -> np.ndarray:
        e = np.exp(a - a.max(axis, keepdims=True))
        return e / e.sum(axis, keepdims=True)

    narrow = [softmax(x * np.float32(k + 1), 0).sum(1) for k in range(BRANCHES)]
    total = narrow[0]
    for value in narrow[1:]:
        total = softmax(total + value, -1)
    return [total, narrow[1].reshape(8, 8)]


def test_branches_one_after_the_other(tmp_path: Any) -> None:
    mod = lowered([("x", (64, 256), "float32")], branches)
    graph = graph_of(mod, ["total", "kept"])
    other = reordered(graph)
    assert arena_bound(other) < 0.6 * arena_bound(graph)
    assert {n.name for n in other.nodes} == {n.name for n in graph.nodes}
    assert reordered(other) is other, "a second search finds something the first did not"
    result = build(mod, ["total", "kept"], tmp_path / "m.so", scheduled=True)
    assert result.plan is not None
    assert result.plan.height < 0.6 * arena_bound(graph)
    x = np.random.default_rng(0).standard_normal((64, 256)).astype("float32")
    with GraphExecutor(result.path, threads=2) as ex:
        for _ in range(2):
            found = ex({"x": x})
            for name, want in zip(("total", "kept"), reference(x)):
                np.testing.assert_allclose(found[name], want, rtol=1e-4, atol=1e-6)
        assert [k.name for k in ex.profile(runs=2).kernels] == [n.name for n in other.nodes]
        tensors = ex.debug_run({"x": x})
    assert set(tensors) == {t.name for t in graph.tensors.values() if t.kind not in ("input", "constant")}
    np.testing.assert_array_equal(tensors["kept"], found["kept"])


def test_a_chain_and_symbolic_sizes_stay() -> None:
    from tvm import relax

    def chain(b: Any, x: Any) -> Any:
        return b.emit(relax.op.nn.softmax(b.emit(relax.op.nn.softmax(x))))

    graph = graph_of(lowered([("x", (4, 16), "float32")], chain), ["y"])
    assert reordered(graph) is graph
    symbolic = graph_of(lowered([("x", ("N", 256), "float32")], branches_of_rows), ["y"])
    assert reordered(symbolic) is symbolic


def branches_of_rows(builder: Any, x: Any) -> Any:
    from tvm import relax

    wide = [builder.emit(relax.op.nn.softmax(x)) for _ in range(2)]
    narrow = [builder.emit(relax.op.sum(w, axis=1)) for w in wide]
    return builder.emit(relax.op.nn.softmax(builder.emit(relax.op.add(*narrow))))
