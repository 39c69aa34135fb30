"""Look-ups in tables of 256 bytes: y[i] = table[code], the table's entries in the order of the codes.

One VPERMI2B looks up 64 codes in 128 entries, so a vector of codes takes two of them and a choice by the highest bit.
"""

from __future__ import annotations

import math
from typing import Any

from tvmx.passes.legalize.conv import OPAQUE
from tvmx.target import Target

LANES = 64
MIN_PARALLEL = 1 << 18  # codes: below this the other threads are not worth waking


def can_look_up(target: Target) -> bool:
    """Has the target a permutation of bytes that looks up a vector of codes at once?"""
    return target.kind == "cpu" and target.arch == "x86_64" and target.vector_bytes == 64 and target.has("avx512vbmi")


def emit_lookup(bb: Any, codes: Any, table: Any, shape: tuple[int, ...], target: Target) -> Any:
    """The call (not yet bound): `codes` of this shape, at least 64 of them, through `table` [256].

    A kernel of its own: in an epilogue every element would be a load.
    """
    from tvm import relax

    count = math.prod(shape)
    assert count >= LANES
    flat = bb.emit(bb.normalize(relax.op.reshape(codes, (count,))))
    parallel = target.threads > 1 and count >= MIN_PARALLEL
    found = bb.emit(
        bb.call_te(
            lambda x, t: _kernel(x, t, count, parallel),
            flat,
            table,
            primfunc_name_hint="lookup_int8",
            primfunc_attrs={"op_pattern": OPAQUE},
        )
    )
    return relax.op.reshape(found, shape)


def _kernel(codes: Any, table: Any, count: int, parallel: bool) -> Any:
    from tvm.script.ir_builder import tirx as T

    from tvmx.frontend.kernels import extern

    signed, values = str(codes.dtype) == "int8", str(table.dtype)

    def body(x: Any, t: Any, y: Any) -> None:
        def vector(start: Any) -> None:
            index = x[T.ramp(start, 1, LANES)]
            low, high = (_permuted(t, half, index, values) for half in (0, 128))
            if signed:  # as bytes, the negative codes, which come first in the table, have the high bit set
                y[T.ramp(start, 1, LANES)] = T.Select(index < T.broadcast(T.int8(0), LANES), low, high)
            else:
                y[T.ramp(start, 1, LANES)] = T.Select(index >= T.broadcast(T.uint8(128), LANES), high, low)

        loop = T.parallel if parallel else T.serial
        with loop(0, count // LANES) as i:
            vector(i * LANES)
        if count % LANES:
            vector(count - LANES)  # the last codes once more

    return extern([codes.shape], [values], [codes, table], body, "lookup")


def _permuted(table: Any, start: int, index: Any, values: str) -> Any:
    """128 entries from `start` on, looked up by the low 7 bits of each byte."""
    from tvm.script.ir_builder import tirx as T

    parts = [table[T.ramp(start + k, 1, LANES)] for k in (0, LANES)]
    name = T.llvm_lookup_intrinsic_id("llvm.x86.avx512.vpermi2var.qi.512")
    return T.call_llvm_pure_intrin(name, parts[0], index, parts[1], dtype=f"{values}x{LANES}")
