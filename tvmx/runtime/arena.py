"""What must be placed in the arena, as data that the compiler writes and the runtime reads: sizes may be symbolic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmx.errors import InputError

if TYPE_CHECKING:
    from tvmx.memory import Problem

ALIGNMENT = 64  # kernels are compiled for data at multiples of this


@dataclass(frozen=True)
class ArenaBuffer:
    """A tensor with storage in the arena, alive in the nodes [start, end); `size` in bytes, an expression or an int.

    `over` names the buffer that it overwrites in place at `start`.
    """

    id: str
    start: int
    end: int
    size: int | str
    over: str | None = None


def to_problem(buffers: Sequence[ArenaBuffer], size_of: Callable[[int | str], int]) -> Problem:
    """The planning problem for the sizes that `size_of` gives.

    Two buffers share in place only where these sizes are equal: symbolic ones may be so for some shapes alone.
    """
    from tvmx.memory import INPLACE, VIEW, Buffer, Problem

    sizes = {b.id: size_of(b.size) for b in buffers}

    def buffer(b: ArenaBuffer) -> Buffer:
        over = b.over if b.over is not None and sizes[b.over] == sizes[b.id] else None
        life = (b.start, b.end)
        return Buffer(b.id, life, sizes[b.id], ALIGNMENT, alias_of=over, alias=VIEW if over is None else INPLACE)

    return Problem(buffer(b) for b in buffers)


def aligned_bytes(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Uninitialised bytes that begin at a multiple of ALIGNMENT."""
    try:
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    except (MemoryError, ValueError) as error:
        raise InputError(f"{nbytes} bytes do not fit into memory; use smaller shapes ({error})") from None
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def aligned_array(shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """An uninitialised array whose data begin at a multiple of ALIGNMENT."""
    kind = np.dtype(dtype)
    count = 1
    for d in shape:
        count *= d
    array: np.ndarray[Any, Any] = aligned_bytes(count * kind.itemsize).view(kind).reshape(tuple(shape))
    return array
