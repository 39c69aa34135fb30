"""Kernels that overwrite an input read it through the output, and keep LLVM's promise that buffers do not overlap."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.executor.programs import build, graph_of, lowered
from tvmx.executor import kernels
from tvmx.executor.in_place import InPlace, kernels_in_place, read_from_outputs
from tvmx.executor.lifetimes import in_place_nodes
from tvmx.runtime import GraphExecutor


def residuals(builder: Any, x: Any) -> Any:
    """Products whose epilogue adds a value that dies there, and one whose added value lives on."""
    from tvm import relax

    weights = np.random.default_rng(7).standard_normal((3, 32, 32)).astype("float32") / 6
    y = builder.emit(relax.op.nn.softmax(x))
    for matrix in weights[:2]:
        product = builder.emit(relax.op.matmul(y, relax.const(matrix)))
        y = builder.emit(relax.op.add(product, builder.emit(relax.op.nn.softmax(y))))
    product = builder.emit(relax.op.matmul(x, relax.const(weights[2])))
    return builder.emit(relax.op.add(product, y))


def reference(x: np.ndarray) -> np.ndarray:
    def softmax(a: np.ndarray) -> np.ndarray:
        e = np.exp(a - a.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    weights = np.random.default_rng(7).standard_normal((3, 32, 32)).astype("float32") / 6
    y = softmax(x)
    for matrix in weights[:2]:
        y = y @ matrix + softmax(y)
    return x @ weights[2] + y


def test_residuals_in_place(tmp_path: Any, monkeypatch: Any) -> None:
    mod = lowered([("x", (12, 32), "float32")], residuals)
    graph = graph_of(mod, ["y"])
    found = kernels_in_place(graph.nodes, in_place_nodes(graph), graph.storage)
    assert found, "no kernel runs in place: the test shows nothing"
    seen: dict[str, bool] = {}
    compiled = kernels.compile_kernels

    def spy(funcs: Any, *rest: Any) -> Any:
        seen.update({name: bool(int(func.attrs["tirx.noalias"])) for name, func in funcs.items()})
        return compiled(funcs, *rest)

    monkeypatch.setattr("tvmx.executor.build.compile_kernels", spy)
    result = build(mod, ["y"], tmp_path / "m.so", scheduled=True)
    assert seen
    assert all(seen.values())
    x = np.random.default_rng(1).standard_normal((12, 32)).astype("float32")
    with GraphExecutor(result.path, threads=2) as ex:
        for _ in range(3):  # a second run finds the arena as the first left it
            np.testing.assert_allclose(ex({"x": x})["y"], reference(x), rtol=1e-4, atol=1e-5)


def test_a_kernel_with_both_kinds_of_call_is_told_apart() -> None:
    from tvmx.graph import Node

    def node(source: str, out: str) -> Node:
        return Node(name=out, kernel="k", inputs=(source,), outputs=(out,), scalars=(), inplace=((0, 0),), op="relu")

    both = [node("a", "b"), node("b", "c")]
    assert kernels_in_place(both, {"b": "a"}, str) == {"k": None}
    assert kernels_in_place(both, {"b": "a", "c": "b"}, str) == {"k": InPlace(1, ((0, 0),))}
    assert kernels_in_place(both, {}, str) == {}


def test_other_types_refuse() -> None:
    """An int32 that overwrites a float32 cannot be read through it."""
    from tvm import relax

    mod = lowered([("x", (8,), "float32")], lambda b, x: b.emit(relax.op.astype(x, "int32")))
    func = next(f for v, f in mod.functions.items() if v.name_hint != "main")
    assert read_from_outputs(func, 1, ((0, 0),)) is None


def test_one_loose_kernel_does_not_loosen_its_neighbours(tmp_path: Any, monkeypatch: Any) -> None:
    """TVM drops `noalias` from every function of a module when one lacks it."""
    import tvm

    from tvmx.target import resolve

    mod = lowered([("x", (12, 32), "float32")], residuals)
    funcs = {
        v.name_hint: f.with_attr("global_symbol", v.name_hint)
        for v, f in mod.functions.items()
        if isinstance(f, tvm.tirx.PrimFunc)
    }
    first = next(iter(funcs))
    funcs[first] = funcs[first].with_attr("tirx.noalias", False)
    built: list[set[str]] = []
    build_objects = kernels.build_objects

    def spy(module: Any, *rest: Any) -> Any:
        built.append({v.name_hint for v in module.functions})
        return build_objects(module, *rest)

    monkeypatch.setattr(kernels, "build_objects", spy)
    kernels.compile_kernels(funcs, resolve("native", 1), tmp_path, 1)
    assert {first} in built
    assert set().union(*built) == set(funcs)
