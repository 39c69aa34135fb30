"""Matrix products: every operand form, sizes that tiles do not divide, symbolic rows, epilogues; by instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.schedules.cpu.relax_case import RUNNABLE, check, lowered, no_refusals
from tvmx.target import resolve

RNG = np.random.default_rng(0)


def rand(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def matmul(a: Any, b: Any) -> Any:
    from tvm import relax

    return relax.op.matmul(a, b)


def swapped(x: Any) -> Any:
    from tvm import relax

    rank = len(x.ty.shape)
    return relax.op.permute_dims(x, [*range(rank - 2), rank - 1, rank - 2])


def swap(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(-1, -2)


def constant(w: np.ndarray) -> Any:
    from tvm import relax

    return relax.const(w)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 100, 130), (7, 33, 65), (24, 96, 64), (37, 40, 48), (16, 70, 512), (3, 1, 5)]
)
def test_constant_weight_with_bias_and_gelu(target: str, rows: int, n: int, k: int, caplog: Any) -> None:
    from tvm import relax

    w, b = rand(k, n) / np.float32(np.sqrt(k)), rand(n)
    rules = check(
        lambda x: relax.op.nn.relu(relax.op.add(matmul(x, constant(w)), constant(b))),
        lambda x: np.maximum(x @ w + b, 0),
        [rand(2, rows, k)],
        target,
    )
    assert list(rules.values()) == ["cpu.matmul"]
    assert no_refusals(caplog)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 3, 20, 17), (2, 3, 17, 33)),
        ((2, 1, 16, 33), (3, 33, 70)),
        ((65, 33), (33, 70)),
        ((12, 64, 32), (12, 32, 64)),
        ((64,), (64, 30)),
        ((30, 64), (64,)),
        ((2, 64), (64, 70)),
        ((1, 5, 1), (1, 1, 6)),
    ],
)
def test_dynamic_operands(a: tuple[int, ...], b: tuple[int, ...], caplog: Any) -> None:
    check(matmul, lambda x, y: x @ y, [rand(*a), rand(*b)])
    assert no_refusals(caplog)


@pytest.mark.parametrize("target", RUNNABLE)
def test_transposed_operands(target: str, caplog: Any) -> None:
    q, k = rand(1, 3, 40, 24), rand(1, 3, 50, 24)
    check(lambda a, b: matmul(a, swapped(b)), lambda a, b: a @ swap(b), [q, k], target)
    check(lambda a, b: matmul(swapped(a), b), lambda a, b: swap(a) @ b, [rand(24, 30), rand(24, 16)], target)
    assert no_refusals(caplog)


@pytest.mark.parametrize("groups", [1, 2, 3, 6, 9])
def test_packing_with_few_or_many_groups(groups: int, caplog: Any) -> None:
    """Two threads: few groups pack all of B first, many pack their own."""
    a, b = rand(groups, 70, 60), rand(groups, 60, 78)
    rules = check(matmul, np.matmul, [a, b])
    assert "cpu.matmul" in rules.values()
    rules = check(lambda x, y: matmul(x, swapped(y)), lambda x, y: x @ swap(y), [a, rand(groups, 78, 60)])
    assert "cpu.matmul" in rules.values()
    assert no_refusals(caplog)


@pytest.mark.parametrize("rows", [1, 6, 31])
def test_symbolic_rows(rows: int, caplog: Any) -> None:
    w = rand(64, 48)
    check(lambda x: matmul(x, constant(w)), lambda x: x @ w, [rand(1, rows, 64)], shapes=[(1, "m", 64)])
    check(lambda x: matmul(x, constant(w)), lambda x: x @ w, [rand(2, rows, 64)], shapes=[("b", "m", 64)])
    inputs = [rand(2, 2, rows, 16), rand(2, 2, rows, 16)]
    shape = ("b", 2, "m", 16)
    check(lambda a, b: matmul(a, swapped(b)), lambda a, b: a @ swap(b), inputs, shapes=[shape, shape])
    assert no_refusals(caplog)


def test_weight_is_packed_at_compile_time() -> None:
    from tvm import tirx

    w = rand(64, 48)
    mod, _ = lowered(lambda x: matmul(x, constant(w)), [(8, 64)], ["float32"], resolve("native", 1))
    kernels = [g.name_hint for g, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)]
    assert kernels == ["matmul"]


@pytest.mark.parametrize("target", ["aarch64-neon", "x86_64-avx2"])
def test_other_targets_build(target: str) -> None:
    from tvmx.schedule.build import build_module

    w = rand(64, 48)
    where = resolve(target, 2)
    mod, rules = lowered(lambda x: matmul(x, constant(w)), [(8, 64)], ["float32"], where)
    assert list(rules.values()) == ["cpu.matmul"]
    assembly = build_module(mod, where.tvm()).mod.imports[0].inspect_source("asm")
    assert "fmla" in assembly if target.startswith("aarch64") else "vfmadd231ps" in assembly


def test_non_float32_keeps_the_plain_lowering() -> None:
    a, b = RNG.integers(-5, 5, (6, 9)), RNG.integers(-5, 5, (9, 4))
    rules = check(matmul, lambda x, y: x @ y, [a, b], tolerance=0)
    assert list(rules.values()) == ["cpu.generic"]
