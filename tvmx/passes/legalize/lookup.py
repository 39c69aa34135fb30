"""Look-ups in tables of 256 bytes: y[i] = table[code], the table's entries in the order of the codes.

With AVX-512 VBMI one VPERMI2B looks up 64 codes in 128 entries: two of them and a choice by the highest bit. Otherwise
PSHUFB looks up in 16 entries and gives 0 for an index with its highest bit set: 16 of them are joined by OR.
"""

from __future__ import annotations

import math
from typing import Any

from tvmx.passes.legalize.conv import OPAQUE
from tvmx.target import Target

MIN_PARALLEL = 1 << 18  # codes: below this the other threads are not worth waking
_SHUFFLES = {16: "llvm.x86.ssse3.pshuf.b.128", 32: "llvm.x86.avx2.pshuf.b", 64: "llvm.x86.avx512.pshuf.b.512"}


def has_permutation(target: Target) -> bool:
    """Has the target a permutation of all bytes of its widest vectors?"""
    return target.kind == "cpu" and target.arch == "x86_64" and target.vector_bytes == 64 and target.has("avx512vbmi")


def shortest_chain(target: Target) -> int | None:
    """How many operators a look-up must replace to be faster than they are in registers; None: it never is."""
    if has_permutation(target):
        return 3
    return 7 if target.kind == "cpu" and target.arch == "x86_64" and target.has("ssse3") else None


def emit_lookup(bb: Any, codes: Any, table: Any, shape: tuple[int, ...], target: Target) -> Any:
    """The call (not yet bound): `codes` of this shape, at least a vector of them, through `table` [256].

    A kernel of its own: in an epilogue every element would be a load.
    """
    from tvm import relax

    count = math.prod(shape)
    lanes = target.vector_bytes
    assert count >= lanes
    flat = bb.emit(bb.normalize(relax.op.reshape(codes, (count,))))
    parallel = target.threads > 1 and count >= MIN_PARALLEL
    found = bb.emit(
        bb.call_te(
            lambda x, t: _kernel(x, t, count, lanes, has_permutation(target), parallel),
            flat,
            table,
            primfunc_name_hint="lookup_int8",
            primfunc_attrs={"op_pattern": OPAQUE},
        )
    )
    return relax.op.reshape(found, shape)


def _kernel(codes: Any, table: Any, count: int, lanes: int, permuted: bool, parallel: bool) -> Any:
    from tvm.script.ir_builder import tirx as T

    from tvmx.frontend.kernels import extern

    def body(x: Any, t: Any, y: Any) -> None:
        def vector(start: Any) -> None:
            find = _by_permutation if permuted else _by_shuffles
            y[T.ramp(start, 1, lanes)] = find(x[T.ramp(start, 1, lanes)], t, str(codes.dtype), str(table.dtype), lanes)

        with (T.parallel if parallel else T.serial)(0, count // lanes) as i:
            vector(i * lanes)
        if count % lanes:
            vector(count - lanes)  # the last codes once more

    return extern([codes.shape], [table.dtype], [codes, table], body, "lookup")


def _by_permutation(index: Any, table: Any, codes: str, values: str, lanes: int) -> Any:
    from tvm.script.ir_builder import tirx as T

    def half(start: int) -> Any:
        """128 entries from `start` on, looked up by the low 7 bits of each byte."""
        parts = [table[T.ramp(start + k, 1, lanes)] for k in (0, lanes)]
        name = T.llvm_lookup_intrinsic_id("llvm.x86.avx512.vpermi2var.qi.512")
        return T.call_llvm_pure_intrin(name, parts[0], index, parts[1], dtype=f"{values}x{lanes}")

    if codes == "int8":  # as bytes, the negative codes, which come first in the table, have the high bit set
        return T.Select(index < T.broadcast(T.int8(0), lanes), half(0), half(128))
    return T.Select(index >= T.broadcast(T.uint8(128), lanes), half(128), half(0))


def _by_shuffles(index: Any, table: Any, codes: str, values: str, lanes: int) -> Any:
    """Less 16·h and plus 112 with saturation, the codes 16·h … 16·h + 15 are 112 … 127 and all others at least 128."""
    from tvm import tirx
    from tvm.script.ir_builder import tirx as T

    code = tirx.reinterpret(f"uint8x{lanes}", index) if codes == "int8" else index
    first = 128 if codes == "int8" else 0
    shuffle, add = (T.llvm_lookup_intrinsic_id(name) for name in (_SHUFFLES[lanes], "llvm.uadd.sat"))
    found: Any = None
    for h in range(16):
        entries = tirx.reinterpret("int32x4", table[T.ramp((16 * h + first) % 256, 1, 16)])
        words = entries if lanes == 16 else tirx.Shuffle([entries] * (lanes // 16), list(range(lanes // 4)))
        part = tirx.reinterpret(f"uint8x{lanes}", words)
        place = code - T.broadcast(T.uint8(16 * h), lanes) if h else code
        place = T.call_llvm_pure_intrin(add, place, T.broadcast(T.uint8(112), lanes), dtype=f"uint8x{lanes}")
        part = T.call_llvm_pure_intrin(shuffle, part, place, dtype=f"uint8x{lanes}")
        found = part if found is None else found | part
    return found if values == "uint8" else tirx.reinterpret(f"{values}x{lanes}", found)
