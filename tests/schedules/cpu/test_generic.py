"""The catch-all on chains of every kind; no kernel is refused, whatever the shape and the instruction set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.schedules.cpu.relax_case import RUNNABLE, check, no_refusals

RNG = np.random.default_rng(0)


def rand(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def op() -> Any:
    from tvm import relax

    return relax.op


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def layer_norm(x: np.ndarray, g: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * g + b


Case = tuple[Callable[..., Any], Callable[..., Any], list[np.ndarray]]

CASES: dict[str, Callable[[], Case]] = {
    "relu": lambda: (lambda x: op().nn.relu(x), lambda x: np.maximum(x, 0), [rand(3, 7, 11)]),
    "bias": lambda: (lambda x, b: op().add(x, b), lambda x, b: x + b, [rand(2, 9, 21), rand(21)]),
    "bias3": lambda: (lambda x, b: op().add(x, b), lambda x, b: x + b, [rand(5, 9, 3), rand(3)]),
    "silu": lambda: (
        lambda x: op().multiply(x, op().sigmoid(x)), lambda x: x / (1 + np.exp(-x)), [rand(5, 65)]
    ),
    "scalar": lambda: (lambda x: op().exp(x), np.exp, [rand()]),
    "mean nhwc": lambda: (lambda x: op().mean(x, [1, 2]), lambda x: x.mean((1, 2)), [rand(2, 6, 5, 24)]),
    "mean nchw": lambda: (lambda x: op().mean(x, [2, 3]), lambda x: x.mean((2, 3)), [rand(2, 24, 8, 8)]),
    "max": lambda: (lambda x: op().max(x, [1]), lambda x: x.max(1), [rand(5, 77, 13)]),
    "min keep": lambda: (lambda x: op().min(x, [-1], keepdims=True), lambda x: x.min(-1, keepdims=True), [rand(5, 64)]),
    "sum all": lambda: (lambda x: op().sum(x), lambda x: x.sum(), [rand(4, 8, 9)]),
    "variance": lambda: (lambda x: op().variance(x, [-1]), lambda x: x.var(-1), [rand(6, 96)]),
    "argmax": lambda: (lambda x: op().argmax(x, -1), lambda x: x.argmax(-1), [rand(4, 130)]),
    "transpose": lambda: (lambda x: op().permute_dims(x, [0, 2, 1]), lambda x: x.transpose(0, 2, 1), [rand(2, 33, 40)]),
    "heads": lambda: (
        lambda x: op().permute_dims(x, [0, 2, 1, 3]), lambda x: x.transpose(0, 2, 1, 3), [rand(1, 16, 3, 8)]
    ),
    "concat last": lambda: (
        lambda x, y: op().concat([x, y], -1), lambda x, y: np.concatenate([x, y], -1), [rand(3, 4, 20), rand(3, 4, 37)]
    ),
    "concat first": lambda: (
        lambda x, y: op().concat([x, y], 0), lambda x, y: np.concatenate([x, y]), [rand(3, 20), rand(2, 20)]
    ),
    "where": lambda: (
        lambda x, y: op().where(op().greater(x, y), x, y), np.maximum, [rand(33, 35), rand(33, 35)]
    ),
    "compare": lambda: (lambda x, y: op().greater(x, y), lambda x, y: x > y, [rand(3, 64), rand(3, 64)]),
    "slice": lambda: (
        lambda x: op().strided_slice(x, [1, 2], [1, 3], [7, 10]), lambda x: x[:, 1:7, 3:10], [rand(1, 8, 12, 16)]
    ),
    "pad": lambda: (
        lambda x: op().nn.pad(x, [0, 0, 1, 2, 3, 1]), lambda x: np.pad(x, [(0, 0), (1, 2), (3, 1)]), [rand(2, 8, 17)]
    ),
    "take": lambda: (
        lambda x, i: op().take(x, i, 0), lambda x, i: x[i], [rand(50, 24), RNG.integers(0, 50, (2, 7))]
    ),
    "cumsum": lambda: (lambda x: op().cumsum(x, -1), lambda x: np.cumsum(x, -1), [rand(3, 40)]),
    "int64": lambda: (lambda x, y: op().add(x, y), lambda x, y: x + y, [RNG.integers(0, 9, 7), RNG.integers(0, 9, 7)]),
    "split": lambda: (
        lambda x: (lambda parts: op().add(parts[0], parts[1]))(op().split(x, 2, -1)),
        lambda x: x[:, :19] + x[:, 19:],
        [rand(5, 38)],
    ),
    "broadcast": lambda: (
        lambda x: op().broadcast_to(x, (4, 5, 19)), lambda x: np.broadcast_to(x, (4, 5, 19)), [rand(5, 1)]
    ),
    "instance norm": lambda: (
        lambda x: op().divide(op().subtract(x, op().mean(x, [2, 3], True)), op().sqrt(op().variance(x, [2, 3], True))),
        lambda x: (x - x.mean((2, 3), keepdims=True)) / x.std((2, 3), keepdims=True),
        [rand(2, 6, 8, 10)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_numpy(name: str, target: str, caplog: Any) -> None:
    function, reference, inputs = CASES[name]()
    check(function, reference, inputs, target)
    assert no_refusals(caplog)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("length", [1, 5, 16, 37, 64, 197, 600])
def test_rows_of_any_length(length: int, target: str, caplog: Any) -> None:
    x, g, b = rand(3, 5, length), rand(length), rand(length)
    check(lambda a: op().nn.softmax(a, -1), lambda a: softmax(a, -1), [x], target, tolerance=1e-6)
    check(lambda a: op().nn.log_softmax(a, -1), lambda a: np.log(softmax(a, -1)), [x], target, tolerance=2e-6)
    if length > 1:
        check(lambda a, c, d: op().nn.layer_norm(a, c, d, axes=[-1]), layer_norm, [x, g, b], target)
    assert no_refusals(caplog)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("groups", [None, 1, 3])
def test_channel_norm_with_channels_last(groups: int | None, target: str, caplog: Any) -> None:
    """Far from zero a mean of squares less a squared mean has no correct digit left."""
    x, g, b = rand(2, 5, 7, 12) + 300, rand(12), rand(12)
    attrs = {"channel_axis": 3, "axes": [1, 2]}

    def reference(x: np.ndarray, g: np.ndarray, b: np.ndarray) -> np.ndarray:
        split = x.reshape(2, 5, 7, groups or 12, -1)
        axes = (1, 2, 4)
        normal = (split - split.mean(axes, keepdims=True)) / np.sqrt(split.var(axes, keepdims=True) + 1e-5)
        return normal.reshape(x.shape) * g + b

    def norm(x: Any, g: Any, b: Any) -> Any:
        if groups is None:
            return op().nn.instance_norm(x, g, b, **attrs)
        return op().nn.group_norm(x, g, b, num_groups=groups, **attrs)

    check(norm, reference, [x, g, b], target, tolerance=2e-4)
    assert no_refusals(caplog)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_softmax_over_any_axis(axis: int) -> None:
    check(lambda a: op().nn.softmax(a, axis), lambda a: softmax(a, axis), [rand(6, 7, 40)], tolerance=1e-6)


def test_softmax_of_masked_rows() -> None:
    x = rand(4, 40)
    x[:, 30:] = -np.inf
    check(lambda a: op().nn.softmax(a, -1), lambda a: softmax(a, -1), [x], tolerance=1e-6)


def test_symbolic_shapes(caplog: Any) -> None:
    x, b = rand(3, 29), rand(29)
    shapes = [("n", "k"), ("k",)]
    check(lambda a, c: op().nn.relu(op().add(a, c)), lambda a, c: np.maximum(a + c, 0), [x, b], shapes=shapes)
    check(lambda a: op().nn.softmax(a, -1), lambda a: softmax(a, -1), [x], shapes=[("n", "k")], tolerance=1e-6)
    check(lambda a: op().mean(a, [-1]), lambda a: a.mean(-1), [x], shapes=[("n", "k")])
    assert no_refusals(caplog)


def test_expensive_producer_is_not_recomputed() -> None:
    """exp is read by the sum and by the division: a kernel that inlined it would hold it twice."""
    from tvm import tirx

    from tests.schedules.cpu.relax_case import lowered
    from tvmx.target import resolve

    mod, _ = lowered(lambda x: op().nn.softmax(x, 1), [(4, 20, 32)], ["float32"], resolve("native", 1))
    kernels = [f for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)]
    assert len(kernels) == 1
    assert kernels[0].script().count("T.exp(") == 1
