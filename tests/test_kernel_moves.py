"""Kernels that only move data are recognised, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.executor.programs import lowered
from tvmx.graph import Moves
from tvmx.kernel_moves import kernel_moves


def moves(body: Any, *inputs: tuple[str, tuple[Any, ...], str]) -> Moves | None:
    """What the only kernel of a program moves."""
    from tvm import tirx

    mod = lowered(list(inputs), body)
    (func,) = [f for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)]
    return kernel_moves(func, len(inputs))


X = ("x", (1, 8, 4), "float32")


@pytest.mark.parametrize(
    ("begin", "end", "axis", "want"),
    [(2, 6, 1, ((0, 8),)), (0, 7, 1, ((0, 0),)), (7, 8, 1, ((0, 28),)), (1, 3, 2, None)],
)
def test_slices(begin: int, end: int, axis: int, want: Any) -> None:
    from tvm import relax

    found = moves(lambda b, x: b.emit(relax.op.strided_slice(x, [axis], [begin], [end])), X)
    assert found == (None if want is None else Moves(slices=want))


def test_one_row_of_an_inner_axis_is_no_run_but_one_of_an_outer_is() -> None:
    from tvm import relax

    x = ("x", (3, 5, 4), "float32")
    assert moves(lambda b, x: b.emit(relax.op.strided_slice(x, [0, 1], [1, 2], [2, 4])), x) == Moves(slices=((0, 28),))
    assert moves(lambda b, x: b.emit(relax.op.strided_slice(x, [1], [2], [3])), x) is None


def test_splits_and_concatenations() -> None:
    from tvm import relax

    found = moves(lambda b, x: list(b.emit(relax.op.split(x, 4, 1))), X)
    assert found == Moves(slices=((0, 0), (0, 8), (0, 16), (0, 24)))
    y = ("y", (1, 2, 4), "float32")
    assert moves(lambda b, x, y: b.emit(relax.op.concat([x, y], 1)), X, y) == Moves(joined=(0, 1))
    z = ("z", (1, 8, 2), "float32")
    assert moves(lambda b, x, z: b.emit(relax.op.concat([x, z], 2)), X, z) is None


@pytest.mark.parametrize("what", ["reverse", "strided", "scaled", "transposed", "cast", "repeated", "padded"])
def test_anything_else_is_none(what: str) -> None:
    from tvm import relax

    op = relax.op
    bodies = {
        "reverse": lambda b, x: b.emit(op.flip(x, 1)),
        "strided": lambda b, x: b.emit(op.strided_slice(x, [1], [0], [8], [2])),
        "scaled": lambda b, x: b.emit(op.negative(b.emit(op.strided_slice(x, [1], [0], [4])))),
        "transposed": lambda b, x: b.emit(op.permute_dims(x, [0, 2, 1])),
        "cast": lambda b, x: b.emit(op.astype(x, "int32")),
        "repeated": lambda b, x: b.emit(op.tile(x, [1, 2, 1])),
        "padded": lambda b, x: b.emit(op.nn.pad(x, [0, 0, 1, 1, 0, 0])),
    }
    assert moves(bodies[what], X) is None
