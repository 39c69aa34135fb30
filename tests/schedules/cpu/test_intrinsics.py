"""Vector exp, sigmoid, tanh, erf, log: accuracy, limits, and that no libm call is left."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from tests.schedules.cpu.relax_case import RUNNABLE
from tvmx.target import resolve

ERF = np.vectorize(math.erf)
REFERENCE = {"exp": np.exp, "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "tanh": np.tanh, "erf": ERF, "log": np.log}
TOLERANCE = {"exp": 2e-7, "sigmoid": 4e-7, "tanh": 6e-7, "erf": 1e-6, "log": 2e-7}
LIMITS = {
    "exp": [math.nan, math.inf, 0.0],
    "sigmoid": [math.nan, 1.0, 0.0],
    "tanh": [math.nan, 1.0, -1.0],
    "erf": [math.nan, 1.0, -1.0],
    "log": [math.nan, math.inf, math.nan],
}


def evaluate(name: str, x: np.ndarray, target: str) -> tuple[np.ndarray, str]:
    """(result of the vectorised intrinsic, assembly)"""
    import tvm
    from tvm import te, tirx
    from tvm.s_tir import Schedule

    from tvmx.schedule.build import build_module

    where, dtype = resolve(target, 1), str(x.dtype)
    a = te.placeholder(x.shape, dtype, name="a")
    b = te.compute(x.shape, lambda i: getattr(tirx, name)(a[i]), name="b")
    sch = Schedule(tvm.IRModule({"main": te.create_prim_func([a, b])}))
    _, inner = sch.split(sch.get_loops("b")[0], [None, where.lanes(dtype)])
    sch.vectorize(inner)
    built: Any = build_module(sch.mod, where.tvm())
    out = tvm.runtime.tensor(np.zeros_like(x))
    built["main"](tvm.runtime.tensor(x), out)
    return out.numpy(), built.mod.inspect_source("asm")


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("name", REFERENCE)
def test_float32(name: str, target: str) -> None:
    x = np.concatenate([np.linspace(-86, 88.7, 4096), np.linspace(-4, 4, 4080)]).astype(np.float32)
    x = np.abs(x) + np.float32(1e-30) if name == "log" else x
    special = np.array([np.nan, np.inf, -np.inf, *[0.5] * 13], np.float32)
    got, assembly = evaluate(name, np.concatenate([x, special]), target)
    want = REFERENCE[name](x.astype(np.float64))
    error = np.abs(got[: len(x)] - want) / np.maximum(np.abs(want), 1e-30 if name != "log" else 1)
    assert error.max() < TOLERANCE[name]
    np.testing.assert_allclose(got[len(x) : len(x) + 3], LIMITS[name], rtol=TOLERANCE[name])
    assert not re.findall(rf"\b{name}f?@", assembly), "calls libm"


@pytest.mark.parametrize("name", REFERENCE)
def test_float64_keeps_libm_accuracy(name: str) -> None:
    x = np.linspace(0.01, 5, 64)
    np.testing.assert_allclose(evaluate(name, x, "native")[0], REFERENCE[name](x), rtol=1e-14)


@pytest.mark.parametrize("name", REFERENCE)
def test_float16_computes_in_float32(name: str) -> None:
    x = np.linspace(0.01, 5, 64).astype(np.float16)
    want = REFERENCE[name](x.astype(np.float64))
    np.testing.assert_allclose(evaluate(name, x, "native")[0].astype(np.float64), want, rtol=1e-3, atol=1e-3)
