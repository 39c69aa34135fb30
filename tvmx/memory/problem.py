"""The data of a planning problem: buffers with lifespans and sizes, and the plan that places them.

Nothing here knows TVM: the compiler and the runtime both build `Problem`s and hand them to `plan`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from tvmx.errors import PlanError

VIEW = "view"
INPLACE = "inplace"
# Keeps every sum of sizes inside int64, for the compiled core as well as for numpy.
MAX_BYTES = 1 << 60
MAX_TIME = 1 << 60


@dataclass(frozen=True)
class Buffer:
    """A value that needs bytes in the arena while it is alive.

    `lifespan` is half-open, [first use, last use + 1), in instructions; `size` is in bytes.
    `offset` pins the buffer to that byte of the arena.

    `alias_of` names a buffer whose storage this one shares, `alias_offset` bytes into it:

    - `alias="view"`: both hold the same value. A view that starts after its parent reads it
      (reshape, slice of the outermost axis); one that starts before its parent is a *slot* that
      is written first and becomes a part of the parent (a concat written in place).
    - `alias="inplace"`: two different values; the one that starts later overwrites the earlier one,
      which must have its last use in that very instruction.

    Buffers that share are placed as one block, alive from the first start to the last end.
    """

    id: str
    lifespan: tuple[int, int]
    size: int
    alignment: int = 64
    offset: int | None = None
    alias_of: str | None = None
    alias_offset: int = 0
    alias: str = VIEW

    def __post_init__(self) -> None:
        start, end = self.lifespan
        if start >= end:
            raise PlanError(f"buffer {self.id!r}: lifespan [{start}, {end}) is empty; give (first use, last use + 1)")
        if start < -MAX_TIME or end > MAX_TIME:
            raise PlanError(f"buffer {self.id!r}: lifespan [{start}, {end}) is not within ±2**60 instructions")
        if not 0 <= self.size <= MAX_BYTES:
            raise PlanError(f"buffer {self.id!r}: size {self.size} is not in [0, 2**60] bytes")
        if not 1 <= self.alignment <= MAX_BYTES:
            raise PlanError(f"buffer {self.id!r}: alignment {self.alignment} must be at least 1 byte")
        if self.offset is not None:
            if not 0 <= self.offset <= MAX_BYTES:
                raise PlanError(f"buffer {self.id!r}: pinned offset {self.offset} is out of range")
            if self.offset % self.alignment:
                raise PlanError(
                    f"buffer {self.id!r}: pinned offset {self.offset} is not a multiple of its "
                    f"alignment {self.alignment}"
                )
        if self.alias not in (VIEW, INPLACE):
            raise PlanError(f"buffer {self.id!r}: alias {self.alias!r} is not 'view' or 'inplace'")
        if self.alias_offset < 0 or (self.alias_of is None and self.alias_offset):
            raise PlanError(f"buffer {self.id!r}: alias_offset {self.alias_offset} needs alias_of and must be >= 0")

    @property
    def start(self) -> int:
        return self.lifespan[0]

    @property
    def end(self) -> int:
        return self.lifespan[1]


@dataclass(frozen=True)
class Problem:
    """Buffers to place in one arena. Raises PlanError for ids used twice and for broken aliases."""

    buffers: tuple[Buffer, ...]
    _index: dict[str, int] = field(init=False, repr=False, compare=False, hash=False)

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        object.__setattr__(self, "buffers", tuple(buffers))
        index = {b.id: i for i, b in enumerate(self.buffers)}
        object.__setattr__(self, "_index", index)
        if len(index) != len(self.buffers):
            seen: set[str] = set()
            twice = next(b.id for b in self.buffers if b.id in seen or seen.add(b.id))  # type: ignore[func-returns-value]
            raise PlanError(f"buffer id {twice!r} is used twice; ids must be unique")
        for b in self.buffers:
            if b.alias_of is not None:
                self._check_alias(b)

    def _check_alias(self, b: Buffer) -> None:
        assert b.alias_of is not None
        if b.alias_of not in self._index:
            raise PlanError(f"buffer {b.id!r}: alias_of {b.alias_of!r} is not a buffer of the problem")
        parent = self[b.alias_of]
        if b.alias == VIEW and b.alias_offset + b.size > parent.size:
            raise PlanError(
                f"buffer {b.id!r}: view [{b.alias_offset}, {b.alias_offset + b.size}) does not fit"
                f" in the {parent.size} bytes of {parent.id!r}"
            )
        if b.alias_offset % b.alignment:
            raise PlanError(
                f"buffer {b.id!r}: alias_offset {b.alias_offset} is not a multiple of its alignment"
                f" {b.alignment}; copy instead of sharing, or lower the alignment if its readers"
                " allow"
            )
        hop: Buffer = parent
        for _ in range(len(self.buffers)):
            if hop.alias_of is None:
                return
            hop = self[hop.alias_of] if hop.alias_of in self._index else b
            if hop is b:
                break
        raise PlanError(f"buffer {b.id!r}: its aliases form a cycle or end at an unknown buffer")

    def __getitem__(self, id: str) -> Buffer:
        return self.buffers[self._index[id]]

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self.buffers)

    def __len__(self) -> int:
        return len(self.buffers)

    @property
    def unshared_bytes(self) -> int:
        """Bytes needed when every value has storage of its own (views are no values)."""
        return sum(
            -(-b.size // b.alignment) * b.alignment
            for b in self.buffers
            if b.alias_of is None or b.alias != VIEW or b.start < self[b.alias_of].start
        )

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str]) -> Problem:
        """Read the MiniMalloc format, `id,lower,upper,size[,alignment…]`, `upper` exclusive."""
        from tvmx.memory.csv_format import read_csv  # pathlib and csv: not for the runtime

        return cls(read_csv(path))

    def to_csv(self, path: str | os.PathLike[str], solution: Solution | None = None) -> None:
        """Write the format of `from_csv`, with only the columns that some buffer needs.

        With a `solution` the column `offset` holds its offsets: read back, every buffer is pinned to the plan.
        Raises PlanError when the solution is none of this problem.
        """
        from tvmx.memory.csv_format import write_csv

        buffers = self.buffers
        if solution is not None:
            if set(solution.offsets) != set(self._index):
                raise PlanError("this solution is not of this problem: it places other buffers")
            buffers = tuple(replace(b, offset=solution.offsets[b.id]) for b in buffers)
        write_csv(buffers, path)


@dataclass(frozen=True)
class Solution:
    """A validated plan. `offsets` maps every buffer id to its byte in the arena of `height` bytes.

    `lower_bound` is what no plan can go under; `truncated` says that a search ended by its budget
    before it reached the bound, the capacity or a proof; `engine` ("c" or "python") says which ran.
    """

    offsets: dict[str, int]
    height: int
    lower_bound: int
    planner: str
    seconds: float = 0.0
    truncated: bool = False
    engine: str = "python"
    steps: int = 0
