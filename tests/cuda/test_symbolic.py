"""Symbolic dims on CUDA targets: one kernel, emulated at several sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tvmx.cuda.formula import evaluate, formula
from tvmx.cuda.lower import lower_kernel
from tvmx.cuda.symbolic import SymbolicProgram, lower_symbolic
from tvmx.debug.emulate import compiler, run_symbolic
from tvmx.errors import CompileError, InputError
from tvmx.target import PRESETS

needs_emulator = pytest.mark.skipif(compiler() is None, reason="the emulator needs a C++ compiler")
ROWS = (1, 5, 16, 33, 130)


def test_formulas() -> None:
    from tvm import tirx

    m = tirx.Var("m", "int64")
    size = formula(tirx.max((m + 127) // 128 * 5 - 1, tirx.const(2, "int64")))
    assert isinstance(size, str)
    assert [evaluate(size, {"m": v}) for v in (1, 128, 129, 1000)] == [4, 4, 9, 39]
    assert evaluate(7, {}) == 7
    for text in ("m + 1", "__import__('os')", "m.real", "m // 0", "(", "m ** 2"):
        with pytest.raises(CompileError, match="cannot evaluate"):
            evaluate(text, {"m": 3} if text != "m + 1" else {})
    with pytest.raises(CompileError, match="no arithmetic"):
        formula(tirx.call_extern("int64", "f", m))


def program(mod: Any, preset: str, rule: str) -> tuple[SymbolicProgram, list[np.ndarray]]:
    """The module's only kernel, lowered, and its constants."""
    from tvm import relax, tirx

    from tvmx.pipeline import run_phases
    from tvmx.schedule import apply_default

    mod = run_phases(mod, PRESETS[preset])
    (func,) = [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    scheduled = apply_default(func, PRESETS[preset])
    assert scheduled.rule == rule
    calls = [b.value for block in mod["main"].body.blocks for b in block.bindings if hasattr(b.value, "args")]
    (call,) = [c for c in calls if getattr(c.op, "name", "") == "relax.call_tir"]
    constants = [a.value.numpy() for a in call.args[1].fields if not isinstance(a, relax.Var)]
    return lower_symbolic(scheduled.func, PRESETS[preset]), constants


def module(shape: list[Any], dtype: str, build: Any) -> Any:
    """A program of one input; "m" in `shape` is its symbolic dim."""
    from tvm import relax, tirx

    m = tirx.Var("m", "int64")
    x = relax.Var("x", relax.TensorType([m if d == "m" else d for d in shape], dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.nn.relu(builder.emit(build(builder, x))))
        builder.emit_func_output(y)
    return builder.get()


def inputs(shape: list[Any], dtype: str, rows: tuple[int, ...] = ROWS) -> list[np.ndarray]:
    found = []
    for m in rows:
        rng = np.random.default_rng(m)
        size = [m if d == "m" else d for d in shape]
        found.append(rng.integers(-100, 100, size) if dtype == "int8" else rng.integers(-4, 5, size) / 4)
    return [v.astype(dtype) for v in found]


PRODUCTS = {
    "mma": ("cuda-sm80", ["m", 72], "float16", "cuda.mma"),
    "batch": ("cuda-sm90", ["m", 3, 72], "float16", "cuda.mma"),
    "int8": ("cuda-sm86", ["m", 72], "int8", "cuda.mma"),
    "wmma": ("cuda-sm75", [1, "m", 72], "float16", "cuda.wmma"),
}


@needs_emulator
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_any_number_of_rows(name: str) -> None:
    from tvm import relax

    preset, shape, dtype, rule = PRODUCTS[name]
    weight = np.random.default_rng(1).integers(-4, 5, (72, 40)).astype(dtype)
    wide = "int32" if dtype == "int8" else None
    mod = module(shape, dtype, lambda _, x: relax.op.matmul(x, relax.const(weight), out_dtype=wide))
    lowered, constants = program(mod, preset, rule)
    assert lowered.dims == ("m",)
    given = inputs(shape, dtype)
    for x, done in zip(given, run_symbolic(lowered, [[x, *constants] for x in given])):
        expected = np.maximum(x.astype("float64") @ weight.astype("float64"), 0)
        error = np.abs(done.outputs[0].astype("float64") - expected).max()
        assert error <= (0 if dtype == "int8" else 2**-10 * expected.max())
        assert done.conflicts == 0


@needs_emulator
@pytest.mark.parametrize("preset", ["cuda-sm80", "cuda-sm75"])
def test_convolution_of_any_number_of_images(preset: str) -> None:
    from tvm import relax

    from tests.schedules.cuda.products import Convolution

    shape = ["m", 6, 7, 16]
    weight = Convolution((1, 6, 7, 16), 24, (3, 3)).arrays()["w"]
    mod = module(
        shape,
        "float16",
        lambda _, x: relax.op.nn.conv2d(
            x, relax.const(weight), strides=[2, 1], padding=[1, 1, 1, 1], data_layout="NHWC", kernel_layout="HWIO"
        ),
    )
    lowered, constants = program(mod, preset, "cuda.wmma" if preset == "cuda-sm75" else "cuda.mma")
    given = inputs(shape, "float16", (1, 2, 5))
    for x, done in zip(given, run_symbolic(lowered, [[x, *constants] for x in given])):
        padded = np.pad(x.astype("float64"), ((0, 0), (1, 1), (1, 1), (0, 0)))
        expected = sum(
            padded[:, i : i + 5 : 2, j : j + 7] @ weight[i, j].astype("float64") for i in range(3) for j in range(3)
        )
        expected = np.maximum(expected, 0)
        assert np.abs(done.outputs[0].astype("float64") - expected).max() <= 2**-10 * expected.max()


@needs_emulator
def test_simt_kernels_and_dims_that_disagree() -> None:
    from tvm import te

    from tvmx.schedule import apply_default

    n = te.var("n", "int64")
    a, b = te.placeholder((n, 40), "float32", "a"), te.placeholder((n,), "float32", "b")
    axis = te.reduce_axis((0, 40), "axis")
    total = te.compute((n,), lambda i: te.sum(a[i, axis], axis=axis), "total")
    func = te.create_prim_func([a, b, te.compute((n,), lambda i: total[i] + b[i], "sum")])
    scheduled = apply_default(func, PRESETS["cuda-sm80"]).func
    lowered = lower_symbolic(scheduled, PRESETS["cuda-sm80"])
    rng = np.random.default_rng(0)
    given = [
        [rng.integers(-9, 9, (k, 40)).astype("float32"), rng.integers(-9, 9, k).astype("float32")] for k in (1, 33, 300)
    ]
    for (x, y), done in zip(given, run_symbolic(lowered, given)):
        np.testing.assert_array_equal(done.outputs[0], x.sum(1) + y)
    with pytest.raises(InputError, match="'n' is 3 in one tensor and 4 in another"):
        lowered.dims_of([(3, 40), (4,)])
    with pytest.raises(CompileError, match="cannot evaluate"):
        lowered.bind({})
    with pytest.raises(CompileError, match="not known at compile time"):
        lower_kernel(scheduled, PRESETS["cuda-sm80"])
