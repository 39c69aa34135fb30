"""Steps that every convolution schedule takes: find the anchor, inline around it, finish the last block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvmx.passes.legalize.conv_te import STAGE_ANNOTATION
from tvmx.schedule.workload import OP_ANNOTATION
from tvmx.target import Target


@dataclass(frozen=True)
class Stage:
    """The blocks of a fused convolution, after inlining: what fills the anchor's input, the anchor, the last block."""

    before: Any | None
    anchor: Any
    last: Any


def stages(sch: Any, op: str) -> Stage:
    """Find the anchor by its operator (or that with a suffix); inline elementwise blocks but the ones beside it.

    Raises ValueError when the function has another form (several outputs, say).
    """
    root = sch.get_sblock("root")
    blocks = sch.get_child_blocks(root)
    anchor = next(b for b in blocks if str(sch.get(b).annotations.get(OP_ANNOTATION, "")).startswith(op))
    upstream = _upstream(sch, anchor)
    after = [b for b in blocks if not any(sch.get(b).same_as(sch.get(p)) for p in (*upstream, anchor))]
    before = [b for b in upstream if not _is_stage(sch, b)]
    for block in before[:-1]:
        sch.compute_inline(block)
    sinks = [b for b in after if not sch.get_consumers(b)]
    if len(sinks) != 1:
        raise ValueError(f"a convolution with {len(sinks)} output blocks")
    for block in after:
        if not _is_stage(sch, block) and not sch.get(block).same_as(sch.get(sinks[0])):
            sch.compute_inline(block)
    return Stage(before[-1] if before else None, anchor, sinks[0])


def marked(sch: Any) -> dict[str, Any]:
    """The blocks that the legalization made stages of the algorithm, by their names there."""
    blocks = [b for b in sch.get_child_blocks(sch.get_sblock("root")) if _is_stage(sch, b)]
    return {str(sch.get(b).annotations[STAGE_ANNOTATION]): b for b in blocks}


def _is_stage(sch: Any, block: Any) -> bool:
    """Whether the legalization made the block a stage of the algorithm, which is never inlined."""
    return STAGE_ANNOTATION in sch.get(block).annotations


def _upstream(sch: Any, block: Any) -> list[Any]:
    """All producers of a block, in program order, nearest last."""
    found: list[Any] = []
    for producer in sch.get_producers(block):
        for each in (*_upstream(sch, producer), producer):
            if not any(sch.get(each).same_as(sch.get(f)) for f in found):
                found.append(each)
    return found


def extent(sch: Any, loop: Any) -> int:
    return int(sch.get(loop).extent)


def perfect(sch: Any, loop: Any, factors: list[int], innermost: int = 64) -> list[Any]:
    """Split `loop` by a sampled perfect tiling whose default is `factors`."""
    decision = [int(f) for f in factors]
    assert math.prod(decision) == extent(sch, loop), (decision, extent(sch, loop))
    tiles = sch.sample_perfect_tile(loop, len(decision), max_innermost_factor=innermost, decision=decision)
    return list(sch.split(loop, tiles))


def finish_last(sch: Any, last: Any, depth: int, lanes: int) -> None:
    """Vectorise the channels of the last block and unroll its other loops below `depth` outer ones."""
    loops = sch.get_loops(last)[depth:]
    channels = loops[-1]
    count = extent(sch, channels)
    step = math.gcd(count, lanes)
    if count > step:
        outer, inner = sch.split(channels, [None, step])
        sch.unroll(outer)
    else:
        inner = channels
    if step > 1:
        sch.vectorize(inner)
    else:
        sch.unroll(inner)
    for loop in loops[:-1]:
        sch.unroll(loop)


def copy_rows(sch: Any, block: Any, depth: int, target: Target) -> None:
    """Vectorise a padding block over its channels."""
    loops = sch.get_loops(block)[depth:]
    channels = loops[-1]
    count = extent(sch, channels)
    step = math.gcd(count, target.lanes("float32"))
    if step > 1:
        _, inner = sch.split(channels, [None, step])
        sch.vectorize(inner)
