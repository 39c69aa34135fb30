"""Slices that are views and concatenations computed in place: random programs against numpy, and one test a rule."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.executor.programs import build, graph_of, lowered
from tvmx.executor.lifetimes import arena_bound, arena_buffers
from tvmx.executor.order import reordered
from tvmx.executor.sharing import shared
from tvmx.graph import COPY, Moves
from tvmx.memory import plan
from tvmx.runtime import GraphExecutor
from tvmx.runtime.arena import to_problem

INPUTS = {"x": ((8, 16), "float32"), "y": ((1, 12, 16), "float32"), "i": ((6, 32), "int32")}


def unfused(inputs: Any, body: Any) -> Any:
    """Every operator its own kernel, so that slices and concatenations stay what they are."""
    import tvm
    from tvm import relax

    t = relax.transform
    steps = [t.LegalizeOps(), t.RewriteDataflowReshape(), t.DeadCodeElimination()]
    return tvm.ir.transform.Sequential(steps)(lowered(inputs, body, passes=False))


@dataclass
class RandomProgram:
    """A program of `steps` random steps, made at once in Relax and as a numpy function."""

    rng: np.random.Generator
    steps: int
    arrays: dict[str, np.ndarray]
    values: list[tuple[Any, np.ndarray]] = field(default_factory=list)
    results: list[np.ndarray] = field(default_factory=list)

    def __call__(self, builder: Any, *params: Any) -> list[Any]:
        from tvm import relax

        self.builder, self.op, self.constant = builder, relax.op, relax.const
        self.values = list(zip(params, self.arrays.values()))
        for _ in range(self.steps):
            make = self.rng.choice(
                [self.unary, self.binary, self.reshape, self.slice, self.split, self.concat, self.concat]
            )
            self.values.extend((builder.emit(e) if not _is_var(e) else e, a) for e, a in make())
        count = int(self.rng.integers(1, 5))
        chosen = [self.values[-1], *(self.pick() for _ in range(count - 1))]
        self.results = [a for _, a in chosen]
        return [e for e, _ in chosen]

    def pick(self) -> tuple[Any, np.ndarray]:
        return self.values[int(self.rng.integers(max(0, len(self.values) - 9), len(self.values)))]

    def like(self, array: np.ndarray, same_rows: bool) -> list[tuple[Any, np.ndarray]]:
        axis = outer(array)

        def fits(b: np.ndarray) -> bool:
            if b.ndim != array.ndim or outer(b) != axis or b.dtype != array.dtype:
                return False
            return b.shape == array.shape if same_rows else b.shape[axis + 1 :] == array.shape[axis + 1 :]

        return [(e, b) for e, b in self.values if fits(b)]

    def unary(self) -> list[tuple[Any, np.ndarray]]:
        expr, a = self.pick()
        which = int(self.rng.integers(3))
        if which == 0:
            return [(self.op.negative(expr), -a)]
        if which == 1:
            return [(self.op.maximum(expr, self.constant(np.array(1, a.dtype))), np.maximum(a, np.array(1, a.dtype)))]
        other = "int32" if a.dtype == np.float32 else "float32"
        return [(self.op.astype(expr, other), a.astype(other))]

    def binary(self) -> list[tuple[Any, np.ndarray]]:
        expr, a = self.pick()
        same = self.like(a, True)
        other, b = same[int(self.rng.integers(len(same)))]
        return [(self.op.maximum(expr, other), np.maximum(a, b))]

    def reshape(self) -> list[tuple[Any, np.ndarray]]:
        expr, a = self.pick()
        shapes = [(a.size // k, k) for k in (8, 16, 16, 32, 32) if a.size % k == 0 and a.size] + [(1, *a.shape)[:3]]
        shape = shapes[int(self.rng.integers(len(shapes)))]
        if np.prod(shape) != a.size:
            return []
        return [(self.op.reshape(expr, shape), a.reshape(shape))]

    def slice(self) -> list[tuple[Any, np.ndarray]]:
        expr, a = self.pick()
        axis = outer(a)
        begin = int(self.rng.integers(a.shape[axis]))
        end = int(self.rng.integers(begin + 1, a.shape[axis] + 1))
        taken = a[(slice(None),) * axis + (slice(begin, end),)]
        return [(self.op.strided_slice(expr, [axis], [begin], [end]), taken)]

    def split(self) -> list[tuple[Any, np.ndarray]]:
        expr, a = self.pick()
        axis = outer(a)
        parts = [k for k in (2, 3, 4) if a.shape[axis] % k == 0]
        if not parts:
            return []
        k = int(self.rng.choice(parts))
        made = self.builder.emit(self.op.split(expr, k, axis))
        from tvm import relax

        return [(relax.TupleGetItem(made, j), p) for j, p in enumerate(np.split(a, k, axis))]

    def concat(self) -> list[tuple[Any, np.ndarray]]:
        expr, a = self.pick()
        fits = self.like(a, False)
        if sum(b.size for _, b in fits) > 1 << 16:
            return []
        more = [fits[int(self.rng.integers(len(fits)))] for _ in range(int(self.rng.integers(1, 4)))]
        if self.rng.random() < 0.2:
            rows = np.arange(a[:1].size if outer(a) == 0 else a[:, :1].size).astype(a.dtype)
            rows = rows.reshape(a[:1].shape if outer(a) == 0 else a[:, :1].shape)
            more.append((self.constant(rows), rows))
        parts = [(expr, a), *more]
        return [(self.op.concat([e for e, _ in parts], outer(a)), np.concatenate([b for _, b in parts], outer(a)))]


def outer(array: np.ndarray) -> int:
    """The first axis longer than 1 (the last where there is none), at most 1."""
    return 1 if array.ndim > 2 and array.shape[0] == 1 else 0


def _is_var(expr: Any) -> bool:
    from tvm import relax

    return isinstance(expr, relax.Var)


def check_random(seed: int, folder: Path) -> int:
    """Build and run one program; how many slices and concatenations it does without."""
    rng = np.random.default_rng(seed)
    arrays = {n: rng.integers(-9, 9, s).astype(t) for n, (s, t) in INPUTS.items()}
    program = RandomProgram(rng, 40, arrays)
    inputs = [(n, s, t) for n, (s, t) in INPUTS.items()]
    mod = (unfused if seed % 4 else lowered)(inputs, program)
    names = [f"out{k}" for k in range(len(program.results))]
    result = build(mod, names, folder / "m.so", scheduled=seed % 2 == 0)
    with GraphExecutor(result.path, threads=1) as ex:
        for _ in range(2):  # a second run finds what the first left behind
            found = ex(arrays)
            for name, want in zip(names, program.results):
                np.testing.assert_array_equal(found[name], want, err_msg=f"seed {seed} {name}")
        tensors = ex.debug_run(arrays)
        for name, want in zip(names, program.results):
            if name in tensors:
                np.testing.assert_array_equal(tensors[name], want)
        left = {n.name for n in ex.manifest.entries["main"].nodes}
        return sum(n.moves is not None and n.name not in left for n in graph_of(mod, names).nodes)


def test_random_programs_equal_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = []
    for seed in range(8):
        # Every other program shares all it can, whatever memory that takes: the more there is to go wrong.
        with monkeypatch.context() as patch:
            if seed % 2:
                patch.setattr("tvmx.executor.sharing.arena_bound", lambda graph: 0)
            saved.append(check_random(seed, tmp_path))
    assert sum(saved) > 20, "hardly anything is shared: the test shows little"


def nodes_of(mod: Any, outputs: list[str]) -> tuple[Any, Any]:
    graph = graph_of(mod, outputs)
    return graph, shared(graph)


def run(mod: Any, outputs: list[str], folder: Path, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    with GraphExecutor(build(mod, outputs, folder / "m.so").path, threads=1) as ex:
        ex(inputs)
        return ex(inputs)


def test_parts_are_computed_in_place(tmp_path: Path) -> None:
    from tvm import relax

    op = relax.op

    def body(b: Any, x: Any) -> Any:
        left, right = b.emit(op.negative(x)), b.emit(op.abs(x))
        return b.emit(op.nn.relu(b.emit(op.concat([left, right], 1))))

    mod = unfused([("x", (1, 4, 16), "float32")], body)
    graph, after = nodes_of(mod, ["y"])
    assert [n.op for n in after.nodes] == ["negative", "abs", "relu"]
    assert arena_bound(after) < arena_bound(graph)
    buffers = arena_buffers(after)
    assert len(buffers) == 1, "three tensors, one storage"
    x = np.random.default_rng(0).standard_normal((1, 4, 16)).astype("float32")
    want = np.maximum(np.concatenate([-x, np.abs(x)], 1), 0)
    np.testing.assert_array_equal(run(mod, ["y"], tmp_path, x=x)["y"], want)


def test_a_result_that_the_model_returns_holds_its_parts(tmp_path: Path) -> None:
    from tvm import relax

    op = relax.op

    def body(b: Any, x: Any) -> Any:
        left = b.emit(op.negative(x))
        return [b.emit(op.concat([left, b.emit(op.abs(left))], 0)), b.emit(op.nn.relu(left))]

    mod = unfused([("x", (4, 16), "float32")], body)
    _, after = nodes_of(mod, ["y", "z"])
    assert len(after.nodes) == 3
    assert arena_buffers(after) == []
    x = np.random.default_rng(0).standard_normal((4, 16)).astype("float32")
    found = run(mod, ["y", "z"], tmp_path, x=x)
    np.testing.assert_array_equal(found["y"], np.concatenate([-x, np.abs(x)]))
    np.testing.assert_array_equal(found["z"], np.maximum(-x, 0))


@pytest.mark.parametrize(
    ("case", "copies"), [("twice", 1), ("input", 1), ("constant", 1), ("unaligned", 1), ("other", 0), ("output", 1)]
)
def test_what_cannot_lie_in_the_result_is_copied(case: str, copies: int, tmp_path: Path) -> None:
    from tvm import relax

    op = relax.op
    x = np.random.default_rng(0).standard_normal((4, 16)).astype("float32")
    constant = np.ones((1, 16), "float32")
    rows = {"unaligned": 10}.get(case, 16)

    def body(b: Any, x: Any) -> Any:
        n, a = b.emit(op.negative(x)), b.emit(op.abs(x))
        parts = {
            "twice": [n, n, a],
            "input": [n, a, x],
            "constant": [n, relax.const(constant), a],
            "unaligned": [n, a],
            "other": [n, a],
            "output": [n, b.emit(op.nn.relu(x))],
        }[case]
        y = b.emit(op.concat(parts, 0))
        if case == "other":
            return [y, b.emit(op.negative(b.emit(op.concat([a, n], 0))))]
        return [y, n] if case == "output" else [y]

    x = x[:, :rows]
    mod = unfused([("x", (4, rows), "float32")], body)
    names = ["y", "z"][: 2 if case in ("other", "output") else 1]
    _, after = nodes_of(mod, names)
    concat = [n for n in after.nodes if n.op == "concatenate"]
    assert sum(n.kernel == COPY for n in after.nodes) == copies
    # Both parts lie in the first result already: the kernel of the second stays, as two copies would save nothing.
    assert len(concat) == (case == "other")
    want = {
        "twice": lambda: [np.concatenate([-x, -x, np.abs(x)])],
        "input": lambda: [np.concatenate([-x, np.abs(x), x])],
        "constant": lambda: [np.concatenate([-x, constant, np.abs(x)])],
        "unaligned": lambda: [np.concatenate([-x, np.abs(x)])],
        "other": lambda: [np.concatenate([-x, np.abs(x)]), -np.concatenate([np.abs(x), -x])],
        "output": lambda: [np.concatenate([-x, np.maximum(x, 0)]), -x],
    }[case]()
    found = run(mod, names, tmp_path, x=x)
    for name, array in zip(names, want):
        np.testing.assert_array_equal(found[name], array)


def test_a_dense_chain_of_results_is_one_storage(tmp_path: Path) -> None:
    """Each result begins with the parts of the one before: all are views of the last, and the input is copied once."""
    from tvm import relax

    op = relax.op

    def body(b: Any, x: Any) -> Any:
        parts = [x]
        for k in range(4):
            joined = parts[0] if k == 0 else b.emit(op.concat(parts, 1))
            parts.append(b.emit(op.multiply(b.emit(op.max(joined, axis=1, keepdims=True)), b.emit(op.negative(x)))))
        return b.emit(op.concat(parts, 1))

    mod = unfused([("x", (1, 16), "float32")], body)
    graph, after = nodes_of(mod, ["y"])
    assert sum(n.op == "concatenate" for n in graph.nodes) == 4
    assert sum(n.op == "concatenate" for n in after.nodes) == 0
    assert sum(n.kernel == COPY for n in after.nodes) == 1
    x = np.random.default_rng(0).standard_normal((1, 16)).astype("float32")
    parts = [x]
    for _ in range(4):
        parts.append(np.concatenate(parts, 1).max(1, keepdims=True) * -x)
    np.testing.assert_array_equal(run(mod, ["y"], tmp_path, x=x)["y"], np.concatenate(parts, 1))


def test_the_slices_of_one_tensor_joined_again_are_that_tensor() -> None:
    from tvm import relax

    op = relax.op

    def body(b: Any, x: Any) -> Any:
        source = b.emit(op.negative(x))
        a, c = (b.emit(op.strided_slice(source, [0], [k], [k + 2])) for k in (0, 2))
        same, swapped = b.emit(op.concat([a, c], 0)), b.emit(op.concat([c, a], 0))
        return [b.emit(op.nn.softmax(same)), b.emit(op.nn.softmax(swapped))]

    _, after = nodes_of(unfused([("x", (4, 64), "float32")], body), ["y", "z"])
    assert [n.op for n in after.nodes] == ["negative", "concatenate", "softmax", "softmax"]


def test_a_slice_keeps_its_source_alive(tmp_path: Path) -> None:
    """The source is dead but for its slice when other values are made."""
    from tvm import relax

    op = relax.op

    def body(b: Any, x: Any) -> Any:
        source = b.emit(op.negative(x))
        part = b.emit(op.strided_slice(source, [0], [2], [4]))
        other = x
        for _ in range(3):
            other = b.emit(op.nn.softmax(other))
        return b.emit(op.maximum(part, b.emit(op.max(other, axis=0, keepdims=True))))

    mod = unfused([("x", (4, 64), "float32")], body)
    graph = graph_of(mod, ["y"])
    view = next(n for n in graph.nodes if n.moves == Moves(slices=((0, 128),)))
    after = shared(graph)
    # The source, twice its slice, would stay beside two values: the kernel stays if that needs more.
    assert arena_bound(after) <= arena_bound(graph)
    assert view.name not in {n.name for n in after.nodes} or arena_bound(after) == arena_bound(graph)
    x = np.random.default_rng(0).standard_normal((4, 64)).astype("float32")

    def softmax(a: np.ndarray) -> np.ndarray:
        e = np.exp(a - a.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    want = np.maximum(-x[2:], softmax(softmax(softmax(x))).max(0, keepdims=True))
    np.testing.assert_allclose(run(mod, ["y"], tmp_path, x=x)["y"], want, rtol=1e-5)


def test_not_outermost_or_strided_is_no_view() -> None:
    from tvm import relax

    op = relax.op

    def body(b: Any, x: Any) -> Any:
        columns = b.emit(op.strided_slice(x, [1], [0], [16]))
        every_other = b.emit(op.strided_slice(x, [0], [0], [4], [2]))
        beside = b.emit(op.concat([columns, columns], 1))
        return [columns, every_other, beside]

    graph = graph_of(unfused([("x", (4, 32), "float32")], body), ["a", "b", "c"])
    assert [n.moves for n in graph.nodes] == [None, None, None]


def test_a_large_source_of_a_small_slice_is_not_kept_where_that_costs_memory() -> None:
    from tvm import relax

    op = relax.op

    def body(b: Any, x: Any) -> Any:
        source = b.emit(op.nn.softmax(x))
        part = b.emit(op.strided_slice(source, [0], [0], [1]))
        wide = b.emit(op.nn.softmax(b.emit(op.nn.softmax(b.emit(op.sin(x))))))
        return b.emit(op.maximum(wide, b.emit(op.negative(part))))

    graph = graph_of(unfused([("x", (16, 64), "float32")], body), ["y"])
    after = shared(graph)
    assert arena_bound(after) <= arena_bound(graph)
    assert len(after.nodes) == len(graph.nodes)


def test_symbolic_rows(tmp_path: Path) -> None:
    """Offsets that only the run tells; rows of 64 bytes keep every part aligned, others are left to the kernel."""
    from tvm import relax

    op = relax.op

    def body(b: Any, x: Any, y: Any) -> Any:
        parts = [b.emit(op.negative(x)), b.emit(op.abs(y)), b.emit(op.nn.relu(x))]
        joined = b.emit(op.concat(parts, 0))
        return [b.emit(op.negative(joined)), joined]

    for columns, kernels in ((16, 4), (10, 5)):
        inputs = [("x", ("N", columns), "float32"), ("y", ("M", columns), "float32")]
        mod = unfused(inputs, body)
        _, after = nodes_of(mod, ["a", "b"])
        assert len(after.nodes) == kernels
        rng = np.random.default_rng(0)
        with GraphExecutor(build(mod, ["a", "b"], tmp_path / f"{columns}.so").path, threads=1) as ex:
            for n, m in ((3, 5), (1, 1), (7, 2), (3, 5), (64, 33)):
                x, y = (rng.standard_normal((k, columns)).astype("float32") for k in (n, m))
                found = ex({"x": x, "y": y})
                want = np.concatenate([-x, np.abs(y), np.maximum(x, 0)])
                np.testing.assert_array_equal(found["b"], want)
                np.testing.assert_array_equal(found["a"], -want)
                np.testing.assert_array_equal(ex.debug_run({"x": x, "y": y})["b"], want)


def test_order_and_sharing_together_are_planned_and_valid() -> None:
    """Random programs through both, planned; `plan` validates."""
    for seed in range(100, 108):
        rng = np.random.default_rng(seed)
        arrays = {n: rng.integers(-9, 9, s).astype(t) for n, (s, t) in INPUTS.items()}
        program = RandomProgram(rng, 40, arrays)
        mod = unfused([(n, s, t) for n, (s, t) in INPUTS.items()], program)
        graph = graph_of(mod, [f"out{k}" for k in range(len(program.results))])
        together = shared(graph)
        found = reordered(together)
        assert arena_bound(found) <= arena_bound(together) <= arena_bound(graph)
        plan(to_problem(arena_buffers(found), int), budget_s=0.0)
