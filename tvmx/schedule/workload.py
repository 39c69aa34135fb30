"""What a schedule rule may know of a PrimFunc before it schedules it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

OP_ANNOTATION = "tvmx.op"
"""Block annotation that a legalization puts on its anchor: `te.compute(..., attrs={OP_ANNOTATION: "conv2d"})`."""


@dataclass(frozen=True)
class Block:
    """One leaf block: iteration extents (0 where symbolic) and dtypes."""

    name: str
    op: str | None  # value of the `tvmx.op` annotation
    spatial: tuple[int, ...]
    reduction: tuple[int, ...]
    reads: tuple[str, ...]  # dtypes of the buffers read
    write: str  # dtype of the buffer written
    annotations: dict[str, Any]

    @property
    def iterations(self) -> int:
        return math.prod((*self.spatial, *self.reduction))


@dataclass(frozen=True)
class Workload:
    """The leaf blocks of an unscheduled PrimFunc in program order, and its anchor.

    The anchor is the block with a `tvmx.op` annotation, else the reduction with the most iterations, else None.
    """

    func: Any  # tvm.tirx.PrimFunc
    blocks: tuple[Block, ...]

    @property
    def anchor(self) -> Block | None:
        annotated = [b for b in self.blocks if b.op]
        if annotated:
            return max(annotated, key=lambda b: b.iterations)
        reductions = [b for b in self.blocks if b.reduction]
        return max(reductions, key=lambda b: b.iterations) if reductions else None

    @property
    def op(self) -> str | None:
        """The anchor's `tvmx.op`, or None."""
        return self.anchor.op if self.anchor else None

    @property
    def is_static(self) -> bool:
        return all(0 not in (*b.spatial, *b.reduction) for b in self.blocks)

    @classmethod
    def of(cls, func: Any) -> Workload:
        """Analyse a PrimFunc whose blocks have not been scheduled yet."""
        import tvm
        from tvm.s_tir import SBlock

        from tvmx.schedule.tir import walk

        blocks: list[Block] = []

        def visit(block: Any) -> None:
            if block.name_hint == "root" or not block.iter_vars:
                return
            extents: dict[bool, list[int]] = {False: [], True: []}
            for var in block.iter_vars:
                extent = var.dom.extent
                value = int(extent) if isinstance(extent, (int, tvm.tirx.IntImm)) else 0
                extents[int(var.iter_type) == 2].append(value)
            notes = {k: v for k, v in block.annotations.items()}
            op = notes.get(OP_ANNOTATION)
            blocks.append(
                Block(
                    name=block.name_hint,
                    op=str(op) if op is not None else None,
                    spatial=tuple(extents[False]),
                    reduction=tuple(extents[True]),
                    reads=tuple(str(r.source.dtype) for r in block.reads),
                    write=str(block.writes[0].source.dtype) if block.writes else "",
                    annotations=notes,
                )
            )

        walk(func, SBlock, visit)
        return cls(func, tuple(blocks))
