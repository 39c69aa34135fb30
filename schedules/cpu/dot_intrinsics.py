"""Tensor intrinsics of the dot units: one step adds `depth` products into each of `lanes` int32 sums.

    C[j] += sum A[i] · B[j, i]        A is one group of activations, broadcast; B lies packed by `pack_filters`

LLVM's own names are used, so one text serves zmm, ymm and xmm; the instruction is chosen by width and features.
"""

from __future__ import annotations

from typing import Any

# unit -> (data dtype, weight dtype, depth)
OPERANDS = {
    "vnni": ("uint8", "int8", 4),
    "maddubs": ("uint8", "int8", 4),
    "pair16": ("int16", "int16", 2),
    "pair16_vnni": ("int16", "int16", 2),
    "sdot": ("int8", "int8", 4),
    "bf16": ("bfloat16", "bfloat16", 2),
}
_WIDTHS = {
    "sdot": (4,),
    "pair16": (4, 8, 16),
    "maddubs": (4, 8, 16),
    "vnni": (4, 8, 16),
    "pair16_vnni": (4, 8, 16),
    "bf16": (4, 8, 16),
}

_DESCRIPTION = """
@T.prim_func(s_tir=True)
def main(a: T.handle, b: T.handle, c: T.handle) -> None:
    A = T.match_buffer(a, ({depth},), "{data}", offset_factor=1)
    B = T.match_buffer(b, ({lanes}, {depth}), "{weight}", offset_factor=1)
    C = T.match_buffer(c, ({lanes},), "{sums}", offset_factor=1, scope="local")
    with T.sblock("root"):
        T.reads(C[0:{lanes}], A[0:{depth}], B[0:{lanes}, 0:{depth}])
        T.writes(C[0:{lanes}])
        for j in T.serial(0, {lanes}):
            for i in T.serial(0, {depth}):
                with T.sblock("update"):
                    vj, vi = T.axis.remap("SR", [j, i])
                    C[vj] = C[vj] + T.cast(A[vi], "{sums}") * T.cast(B[vj, vi], "{sums}")
"""

_IMPLEMENTATION = """
@T.prim_func(s_tir=True)
def main(a: T.handle, b: T.handle, c: T.handle) -> None:
    A = T.match_buffer(a, ({depth},), "{data}", offset_factor=1)
    B = T.match_buffer(b, ({lanes}, {depth}), "{weight}", offset_factor=1)
    C = T.match_buffer(c, ({lanes},), "{sums}", offset_factor=1, scope="local")
    with T.sblock("root"):
        T.reads(C[0:{lanes}], A[0:{depth}], B[0:{lanes}, 0:{depth}])
        T.writes(C[0:{lanes}])
        C[T.ramp(T.int32(0), 1, {lanes})] = {body}
"""

_WEIGHTS = 'B.vload([0, 0], dtype="{weight}x{elements}")'
_DATA = (
    'T.reinterpret(T.broadcast(T.reinterpret(A.vload([0], "{data}x{depth}"), dtype="int32"), {lanes}),'
    ' dtype="{as_type}x{elements}")'
)
_SUMS = 'C.vload([0], "{sums}x{lanes}")'

# TVM widens values of bfloat16 to float32 wherever they appear, arguments of an LLVM intrinsic included: the step is a
# function that reads its operands itself.
_BF16_TEXT = """
declare <{lanes} x float> @llvm.x86.avx512bf16.dpbf16ps.{bits}(<{lanes} x float>, <{pairs} x bfloat>, <{pairs} x bfloat>)
define weak_odr hidden <{lanes} x float> @tvmx_dpbf16_{lanes}(<{lanes} x float> %c, ptr %a, i32 %i, ptr %b, i32 %j) alwaysinline {{
  %p = getelementptr bfloat, ptr %a, i32 %i
  %q = getelementptr bfloat, ptr %b, i32 %j
  %one = load i32, ptr %p, align 2
  %low = insertelement <{lanes} x i32> poison, i32 %one, i64 0
  %all = shufflevector <{lanes} x i32> %low, <{lanes} x i32> poison, <{lanes} x i32> zeroinitializer
  %x = bitcast <{lanes} x i32> %all to <{pairs} x bfloat>
  %y = load <{pairs} x bfloat>, ptr %q, align 2
  %r = call <{lanes} x float> @llvm.x86.avx512bf16.dpbf16ps.{bits}(<{lanes} x float> %c, <{pairs} x bfloat> %x, <{pairs} x bfloat> %y)
  ret <{lanes} x float> %r
}}
"""  # noqa: E501


def name_of(unit: str, lanes: int) -> str:
    """The registered name of a unit's step over `lanes` sums."""
    return f"tvmx_dot_{unit}_{lanes}"


def imported_text(unit: str, lanes: int) -> str | None:
    """LLVM text that a kernel built on the unit imports (`pragma_import_llvm`), if any."""
    if unit != "bf16":
        return None
    return _BF16_TEXT.format(lanes=lanes, pairs=2 * lanes, bits=32 * lanes)


def _sums_of(unit: str) -> str:
    return "float32" if unit == "bf16" else "int32"


def install() -> None:
    """Register all intrinsics (idempotent)."""
    from tvm.s_tir import TensorIntrin

    from tvmx.compat import fast_stack

    with fast_stack():  # the script parser looks at the stack all the time
        for unit, widths in _WIDTHS.items():
            for lanes in widths:
                name = name_of(unit, lanes)
                if TensorIntrin.get(name, allow_missing=True) is None:
                    TensorIntrin.register(name, *_functions(unit, lanes))


def _functions(unit: str, lanes: int) -> tuple[Any, Any]:
    from tvm.script import from_source

    data, weight, depth = OPERANDS[unit]
    terms = {"data": data, "weight": weight, "depth": depth, "lanes": lanes, "sums": _sums_of(unit)}
    body = _body(unit, lanes, {**terms, "elements": lanes * depth})
    return from_source(_DESCRIPTION.format(**terms)), from_source(_IMPLEMENTATION.format(**terms, body=body))


def _call(name: str, dtype: str, *args: str) -> str:
    return f'T.call_llvm_pure_intrin(T.llvm_lookup_intrinsic_id("{name}"), {", ".join(args)}, dtype="{dtype}")'


def _body(unit: str, lanes: int, terms: dict[str, Any]) -> str:
    bits, sums = lanes * 32, _SUMS.format(**terms)
    weights = _WEIGHTS.format(**terms)
    if unit == "bf16":
        operands = ", ".join(f'{m}.data, T.cast({m}.elem_offset, "int32")' for m in "AB")
        return f'T.call_extern("float32x{lanes}", "tvmx_dpbf16_{lanes}", {sums}, {operands})'
    data = _DATA.format(**terms, as_type="int16" if unit.startswith("pair16") else "int8")
    out = f"int32x{lanes}"
    if unit == "vnni":
        return _call(f"llvm.x86.avx512.vpdpbusd.{bits}", out, sums, data, weights)
    if unit == "pair16_vnni":
        return _call(f"llvm.x86.avx512.vpdpwssd.{bits}", out, sums, data, weights)
    if unit == "sdot":
        return _call("llvm.aarch64.neon.sdot.v4i32.v16i8", out, sums, data, weights)
    add = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}[lanes]
    if unit == "pair16":
        return f"{sums} + {_call(add, out, data, weights)}"
    pairs = {
        4: "llvm.x86.ssse3.pmadd.ub.sw.128",
        8: "llvm.x86.avx2.pmadd.ub.sw",
        16: "llvm.x86.avx512.pmaddubs.w.512",
    }[lanes]
    half = f"int16x{lanes * 2}"
    ones = f"T.broadcast(T.int16(1), {lanes * 2})"
    return f"{sums} + {_call(add, out, _call(pairs, half, data, weights), ones)}"
