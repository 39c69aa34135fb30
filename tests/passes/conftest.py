"""Helpers of the pass tests: every module they build or get is checked for well-formedness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

from tvmx.target import Target, resolve


@pytest.fixture(scope="session")
def target() -> Target:
    return resolve("native", threads=1)


@pytest.fixture(autouse=True)
def well_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the result of every pass that a test runs."""
    plain = tvm.transform.Pass.__call__

    def checked(step: Any, mod: Any) -> Any:
        result = plain(step, mod)
        relax.analysis.well_formed(result)
        return result

    monkeypatch.setattr(tvm.transform.Pass, "__call__", checked)


def evaluate(mod: Any, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run `main` by TVM's own lowering on the Relax VM."""
    executable = tvm.compile(relax.transform.LegalizeOps()(mod), tvm.target.Target("llvm"))
    result = relax.VirtualMachine(executable, tvm.cpu())["main"](*(tvm.runtime.tensor(a) for a in inputs))
    return [t.numpy() for t in ([result] if hasattr(result, "numpy") else result)]


def random_inputs(mod: Any, dims: dict[str, int] | None = None, seed: int = 0) -> list[np.ndarray]:
    """One array per parameter of `main`; `dims` gives symbolic dims a value."""
    rng = np.random.default_rng(seed)
    arrays = []
    for param in mod["main"].params:
        shape = [int(d) if isinstance(d, tvm.tirx.IntImm) else (dims or {})[d.name] for d in param.ty.shape.values]
        dtype = str(param.ty.dtype)
        if dtype.startswith("float"):
            arrays.append(rng.standard_normal(shape).astype(dtype))
        else:
            arrays.append(rng.integers(0, 3, shape).astype(dtype))
    return arrays


def assert_same_numbers(
    before: Any, after: Any, inputs: Sequence[np.ndarray] | None = None, rtol: float = 2e-5, run: Any = evaluate
) -> None:
    """Both programs give the same outputs to a few float32 roundings of the output's range."""
    arrays = random_inputs(before) if inputs is None else inputs
    for a, b in zip(run(after, arrays), evaluate(before, arrays), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(
            a, b, rtol=0, atol=rtol * max(1.0, float(np.abs(b.astype("float64")).max(initial=0)))
        )


def assert_equal(found: Any, expected: Any) -> None:
    """Structurally equal after both went through CanonicalizeBindings."""
    clean = relax.transform.CanonicalizeBindings()
    a, b = clean(found), clean(expected)
    if not tvm_ffi.structural_equal(a, b, map_free_vars=True):
        tvm.ir.assert_structural_equal(a, b, map_free_vars=True)


Body = Callable[..., Any]


def program(shapes: Sequence[Sequence[Any]], body: Body, dtype: str = "float32") -> Any:
    """A module whose `main` takes tensors of `shapes` and returns `body(*params)`; a str is a symbolic dim.

    `body` binds what it uses twice with `emit`.
    """
    builder = relax.BlockBuilder()
    _BUILDERS.append(builder)
    dims: dict[str, Any] = {}

    def dim(d: Any) -> Any:
        return dims.setdefault(d, tvm.tirx.Var(d, "int64")) if isinstance(d, str) else d

    params = [relax.Var(f"x{i}", relax.TensorType([dim(d) for d in s], dtype)) for i, s in enumerate(shapes)]
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(builder.normalize(body(*params)))
        builder.emit_func_output(result)
    _BUILDERS.pop()
    return builder.get()


_BUILDERS: list[Any] = []


def emit(expr: Any) -> Any:
    """Bind an expression in the program being built; the variable."""
    return _BUILDERS[-1].emit(_BUILDERS[-1].normalize(expr))


def operators(mod: Any) -> list[str]:
    """The operators of `main` in program order, without "relax."."""
    from tvmx.passes.rewrite import op_name

    return [op_name(b.value) for block in mod["main"].body.blocks for b in block.bindings if op_name(b.value)]
