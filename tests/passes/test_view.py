"""Axis arithmetic against numpy: a view's data, read through its axes, is the logical tensor."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvmx.passes.view import follow, logical_of, merge_groups, permutation, physical_shape, reshape_axes

SHAPES = st.lists(st.sampled_from([1, 1, 2, 3, 4]), min_size=1, max_size=5)


def read(stored: np.ndarray, shape: tuple[int, ...], axes: tuple[int | None, ...]) -> np.ndarray:
    """The logical tensor behind a stored one."""
    used = [a for a in axes if a is not None]
    spare = [a for a in range(stored.ndim) if a not in used]
    moved = stored.transpose(*used, *spare)
    return moved.reshape(shape)


def views(draw: st.DrawFn) -> tuple[np.ndarray, tuple[int, ...], tuple[int | None, ...]]:
    shape = tuple(draw(SHAPES))
    order = draw(st.permutations(range(len(shape))))
    dropped = {i for i in range(len(shape)) if shape[i] == 1 and draw(st.booleans())}
    layout = [i for i in order if i not in dropped]
    axes = tuple(layout.index(i) if i in layout else None for i in range(len(shape)))
    logical = np.arange(math.prod(shape)).reshape(shape)
    stored = logical.transpose([*layout, *dropped]).reshape([shape[i] for i in layout])
    return stored, shape, axes


VIEWS = st.composite(views)()


@given(VIEWS)
def test_physical_shape_is_the_stored_one(view: tuple) -> None:
    stored, shape, axes = view
    assert physical_shape(shape, axes, stored.ndim) == stored.shape


@given(VIEWS, st.data())
@settings(max_examples=300)
def test_reshape_without_moving_data(view: tuple, data: st.DataObject) -> None:
    stored, shape, axes = view
    target = tuple(data.draw(st.sampled_from(factorings(math.prod(shape)))))
    found = reshape_axes(shape, axes, stored.ndim, target)
    if found is None:
        return
    new_axes, new_stored = found
    used = [a for a in new_axes if a is not None]
    assert len(set(used)) == len(used)
    np.testing.assert_array_equal(
        read(stored.reshape(new_stored), target, new_axes), read(stored, shape, axes).reshape(target)
    )


def factorings(n: int) -> list[list[int]]:
    """Shapes with n elements: a few splits of its prime factors, with unit dims."""
    primes, rest = [], n
    for p in (2, 3):
        while rest % p == 0:
            primes.append(p)
            rest //= p
    half = len(primes) // 2
    split = [math.prod(primes[:half]), math.prod(primes[half:])]
    return [[n], primes or [1], split, [1, *split], [split[0], 1, split[1]], [*split, 1, 1], [*split[::-1], 1]]


def test_merging_neighbours_in_storage_is_allowed_and_others_not() -> None:
    nchw, as_nhwc = (2, 3, 4, 5), (0, 3, 1, 2)
    assert reshape_axes(nchw, as_nhwc, 4, (2, 3, 20)) == ((0, 2, 1), (2, 20, 3))
    assert reshape_axes(nchw, as_nhwc, 4, (2, 60)) is None


def test_merge_groups_refuses_empty_tensors() -> None:
    assert merge_groups((0, 3), (3, 0)) is None
    assert merge_groups((2, 3, 4), (6, 2, 2)) == [([0, 1], [0]), ([2], [1, 2])]


def test_symbolic_dims_match_by_proof() -> None:
    from tvm import tirx

    n, w = tirx.Var("n", "int64"), tirx.Var("w", "int64")
    assert merge_groups((n, 8, w), (n, 8 * w)) == [([0], [0]), ([1, 2], [1])]
    assert reshape_axes((n, 8, 1, w), (0, 3, 1, 2), 4, (n, 8, w)) == ((0, 3, 2), (n, 1, w, 8))


@given(VIEWS, st.data())
def test_permutation_reorders_storage(view: tuple, data: st.DataObject) -> None:
    stored, shape, axes = view
    held = logical_of(axes, stored.ndim)
    want = tuple(data.draw(st.permutations(held)))
    order = permutation(shape, held, want)
    assert order is not None
    moved = stored.transpose(order)
    assert moved.shape == tuple(1 if w is None else shape[w] for w in want)
    new_axes = tuple(want.index(i) if i in want else None for i in range(len(shape)))
    np.testing.assert_array_equal(read(moved, shape, new_axes), read(stored, shape, axes))


@pytest.mark.parametrize(
    ("rank", "expected"), [(4, (0, 2, 3, 1)), (3, (None, 1, 2, 0)), (1, (None, None, 0, None)), (0, (None,) * 4)]
)
def test_broadcast_operands_follow(rank: int, expected: tuple) -> None:
    assert follow((0, 3, 1, 2), 4, rank) == expected
