"""Where the logical axes of a tensor lie in storage: permutations and unit dims as arithmetic on tuples.

A tensor stored as NHWC whose users think in NCHW has `axes = (0, 3, 1, 2)`: logical axis i is physical axis
`axes[i]`. `None` marks a logical axis of extent 1 that storage does not hold; physical axes that no logical axis
names have extent 1 too. A transpose, squeeze, expand_dims or unit reshape only changes `axes`, never the data.

A dim is an int or, when symbolic, a PrimExpr.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Dim = Any  # int | tvm.tirx.PrimExpr
Dims = tuple[Dim, ...]
Axes = tuple["int | None", ...]


def is_one(dim: Dim) -> bool:
    return isinstance(dim, int) and dim == 1


def same_dim(a: Dim, b: Dim) -> bool:
    """Provably equal."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from tvm.sym import Analyzer

    return bool(Analyzer().can_prove_equal(a, b))


def same_dims(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    return len(a) == len(b) and all(same_dim(x, y) for x, y in zip(a, b))


def identity(rank: int) -> Axes:
    return tuple(range(rank))


def physical_shape(shape: Dims, axes: Axes, rank: int) -> Dims:
    """The stored shape, of `rank` dims, of a tensor with logical `shape` and `axes`."""
    stored: list[Dim] = [1] * rank
    for dim, axis in zip(shape, axes):
        if axis is not None:
            stored[axis] = dim
    return tuple(stored)


def logical_of(axes: Axes, rank: int) -> Axes:
    """The inverse of `axes`: for each physical axis the logical axis it holds, or None."""
    inverse: list[int | None] = [None] * rank
    for logical, axis in enumerate(axes):
        if axis is not None:
            inverse[axis] = logical
    return tuple(inverse)


def storage_order(shape: Dims, want: Sequence[int | None]) -> tuple[int, ...]:
    """The logical axes longer than 1, in the order in which `want` (see `logical_of`) stores them."""
    return tuple(w for w in want if w is not None and not is_one(shape[w]))


def merge_groups(source: Dims, target: Dims) -> list[tuple[list[int], list[int]]] | None:
    """Split a reshape into independent ones: runs of source axes and of target axes with equal products.

    Unit dims belong to no group. (2, 3, 4) → (6, 2, 2) gives [([0, 1], [0]), ([2], [1, 2])]. Where symbolic dims
    cannot be matched, the rest is one group. None if a dim is 0, since then products say nothing.
    """
    left = [i for i, d in enumerate(source) if not is_one(d)]
    right = [i for i, d in enumerate(target) if not is_one(d)]
    if any(isinstance(d, int) and d == 0 for d in (*source, *target)):
        return None
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(left) and j < len(right):
        a, b = source[left[i]], target[right[j]]
        group: tuple[list[int], list[int]] = ([left[i]], [right[j]])
        i, j = i + 1, j + 1
        while not same_dim(a, b):
            grow = _which_to_grow(a, b)
            if grow == "source" and i < len(left):
                a = a * source[left[i]]
                group[0].append(left[i])
                i += 1
            elif grow == "target" and j < len(right):
                b = b * target[right[j]]
                group[1].append(right[j])
                j += 1
            else:
                group[0].extend(left[i:])
                group[1].extend(right[j:])
                i, j = len(left), len(right)
                break
        groups.append(group)
    if i < len(left) or j < len(right):
        if not groups:
            return None
        groups[-1][0].extend(left[i:])
        groups[-1][1].extend(right[j:])
    return groups


def _which_to_grow(a: Dim, b: Dim) -> str | None:
    if isinstance(a, int) and isinstance(b, int):
        return "source" if a < b else "target"
    from tvm import tirx
    from tvm.sym import Analyzer

    analyzer = Analyzer()

    def divides(x: Dim, y: Dim) -> bool:
        return bool(analyzer.can_prove_equal(tirx.floormod(y, x), 0))

    if divides(a, b):
        return "source"
    return "target" if divides(b, a) else None


def reshape_axes(shape: Dims, axes: Axes, rank: int, target: Dims) -> tuple[Axes, Dims] | None:
    """Reshape without moving data: the new (axes, stored shape), or None where the data would have to move.

    (N, C, H, W) stored as NHWC reshapes to (N, C, H*W) stored as (N, H*W, C): H and W are neighbours in storage.
    """
    groups = merge_groups(shape, target)
    if groups is None:
        return None
    order = storage_order(shape, logical_of(axes, rank))
    place = {logical: position for position, logical in enumerate(order)}
    starts = []
    for sources, _ in groups:
        first = place[sources[0]]
        if [place[s] for s in sources] != list(range(first, first + len(sources))):
            return None
        starts.append(first)
    stored_groups = [groups[k][1] for k in sorted(range(len(groups)), key=lambda k: starts[k])]
    stored = [t for group in stored_groups for t in group]
    if all(len(s) == len(t) == 1 for s, t in groups):
        return _rename_axes(shape, axes, rank, target, groups)
    if stored == sorted(stored):
        return identity(len(target)), target
    # Leading unit dims stay in storage, so that a batch of 1 remains visible to the operators that expect it.
    leading = next(i for i, d in enumerate(target) if not is_one(d))
    layout = [*range(leading), *stored]
    new_axes = tuple(layout.index(t) if t in layout else None for t in range(len(target)))
    return new_axes, tuple(target[t] for t in layout)


def _rename_axes(
    shape: Dims, axes: Axes, rank: int, target: Dims, groups: list[tuple[list[int], list[int]]]
) -> tuple[Axes, Dims]:
    """Only unit dims come or go: storage stays, and unit dims are paired up in order as far as they last."""
    renamed: list[int | None] = [None] * len(target)
    for (source,), (new,) in groups:
        renamed[new] = axes[source]
    spare = [axes[i] for i, d in enumerate(shape) if is_one(d) and axes[i] is not None]
    spare += [a for a in range(rank) if a not in axes]
    for i, dim in enumerate(target):
        if is_one(dim) and spare:
            renamed[i] = spare.pop(0)
    return tuple(renamed), physical_shape(shape, axes, rank)


def permutation(shape: Dims, held: Sequence[int | None], want: Sequence[int | None]) -> tuple[int, ...] | None:
    """The `permute_dims` axes that turn storage `held` into storage `want`, or None if their ranks differ.

    Both list, per physical axis, a logical axis or None (extent 1). Unit axes are interchangeable.
    """
    if len(held) != len(want):
        return None
    long_axes = {w: k for k, w in enumerate(held) if w is not None and not is_one(shape[w])}
    units = [k for k, w in enumerate(held) if w is None or is_one(shape[w])]
    result = [long_axes[w] if w is not None and not is_one(shape[w]) else units.pop(0) for w in want]
    return tuple(result)


def follow(axes: Axes, rank: int, operand_rank: int) -> Axes:
    """How an operand that broadcasts (numpy rules) against a tensor with `axes` must be stored to match it."""
    offset = len(axes) - operand_rank
    return tuple(None if w is None or w < offset else w - offset for w in logical_of(axes, rank))


def covers(shape: Dims, axes: Axes) -> bool:
    """True if every logical axis that `axes` leaves out of storage has extent 1 in `shape`."""
    return all(a is not None or is_one(d) for d, a in zip(shape, axes))


DimMap = Callable[[Dim], Dim]
