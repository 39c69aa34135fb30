"""AMX tiles: int32 sums of a block of rows by one or two tiles of 16 columns, the whole reduction in one call.

    C[R, 16·t] += A[R, K] · B[K/4, 16·t, 4]        R rows in tiles of `rows`, K in steps of 64, t ≤ 2

B is packed as for VPDPBUSD (`pack_filters`): 16 groups of four rows are a tile of B as it lies there. Tiles 0 to 3 hold
sums, 4 and 5 rows of A, 6 and 7 columns of B. Each call configures the tiles of its thread and releases them, so that
no thread of a pool carries tile state from one kernel to the next. What K leaves beyond whole tiles goes through a
second configuration with narrower ones: nothing past a row's end is read.
"""

from __future__ import annotations

from typing import Any

STEP = 64  # bytes of K in a tile
TILES = {"amx": "tdpbusd", "amx_signed": "tdpbssd"}
DATA = {"amx": "uint8", "amx_signed": "int8"}

_DESCRIPTION = """
@T.prim_func(s_tir=True)
def main(a: T.handle, b: T.handle, c: T.handle) -> None:
    A = T.match_buffer(a, ({block}, {depth}), "{data}", offset_factor=1, strides=["sa", 1])
    B = T.match_buffer(b, ({steps}, {panel}, 4), "int8", offset_factor=1)
    C = T.match_buffer(c, ({block}, {panel}), "int32", offset_factor=1, strides=["sc", 1], scope="local")
    with T.sblock("root"):
        T.reads(C[0:{block}, 0:{panel}], A[0:{block}, 0:{depth}], B[0:{steps}, 0:{panel}, 0:4])
        T.writes(C[0:{block}, 0:{panel}])
        for m, j, k, i in T.grid({block}, {panel}, {steps}, 4):
            with T.sblock("update"):
                vm, vj, vk, vi = T.axis.remap("SSRR", [m, j, k, i])
                C[vm, vj] = C[vm, vj] + T.cast(A[vm, vk * 4 + vi], "int32") * T.cast(B[vk, vj, vi], "int32")
"""

_IMPLEMENTATION = """
@T.prim_func(s_tir=True)
def main(a: T.handle, b: T.handle, c: T.handle) -> None:
    A = T.match_buffer(a, ({block}, {depth}), "{data}", offset_factor=1, strides=["sa", 1])
    B = T.match_buffer(b, ({steps}, {panel}, 4), "int8", offset_factor=1)
    C = T.match_buffer(c, ({block}, {panel}), "int32", offset_factor=1, strides=["sc", 1], scope="local")
    with T.sblock("root"):
        T.reads(C[0:{block}, 0:{panel}], A[0:{block}, 0:{depth}], B[0:{steps}, 0:{panel}, 0:4])
        T.writes(C[0:{block}, 0:{panel}])
        T.evaluate(T.call_extern("int32", "{name}", T.address_of(C[0, 0]), T.address_of(C[{second}, 0]),
            T.address_of(A[0, 0]), T.address_of(A[{second}, 0]), T.address_of(B[0, 0, 0])))
"""

_DECLARATIONS = """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tileloadd64(i8, ptr, i64)
declare void @llvm.x86.tilestored64(i8, ptr, i64)
declare void @llvm.x86.{product}(i8, i8, i8)
"""


def name_of(unit: str, rows: int, block: int, panel: int, depth: int) -> str:
    """The registered name, and that of the function which the kernel imports."""
    return f"tvmx_{unit}_{rows}_{block}x{panel}x{depth}"


def install(unit: str, rows: int, block: int, panel: int, depth: int) -> str:
    """Register the intrinsic of these sizes (idempotent); returns its name."""
    from tvm.s_tir import TensorIntrin
    from tvm.script import from_source

    from tvmx.compat import fast_stack

    name = name_of(unit, rows, block, panel, depth)
    if TensorIntrin.get(name, allow_missing=True) is None:
        terms: dict[str, Any] = {
            "name": name,
            "data": DATA[unit],
            "block": block,
            "panel": panel,
            "depth": depth,
            "steps": depth // 4,
            "second": min(1, block - 1),
        }
        with fast_stack():
            description = from_source(_DESCRIPTION.format(**terms))
            TensorIntrin.register(name, description, from_source(_IMPLEMENTATION.format(**terms)))
    return name


def imported_text(unit: str, rows: int, block: int, panel: int, depth: int) -> str:
    """LLVM text of the function."""
    name = name_of(unit, rows, block, panel, depth)
    whole, rest = depth // STEP, depth % STEP
    parts = [(0, whole, STEP)] if whole else []
    parts += [(whole * STEP, 1, rest)] if rest else []
    body, configurations = [], []
    for index, (start, count, width) in enumerate(parts):
        data = "".join(f"\\{v:02X}" for v in configuration(rows, width))
        configurations.append(f'@{name}_{index} = weak_odr hidden constant [64 x i8] c"{data}", align 64')
        body += _part(name, index, start, count, width, rows, block, panel, TILES[unit], index + 1 == len(parts))
    lines = [
        *configurations,
        f"define weak_odr hidden i32 @{name}(ptr %c0, ptr %c1, ptr %a0, ptr %a1, ptr %b0) alwaysinline {{",
        "entry:",
        *_distance("cb", "c"),
        *_distance("ab", "a"),
        "  br label %part0.0",
        *body,
        "end:",
        "  call void @llvm.x86.tilerelease()",
        "  ret i32 0",
        "}",
    ]
    return _DECLARATIONS.format(product=TILES[unit]) + "\n".join(lines) + "\n"


def _distance(name: str, matrix: str) -> list[str]:
    """Bytes from one row to the next, from their addresses: an index's type is not known before it is narrowed."""
    first, second = (f"  %{matrix}{k}i = ptrtoint ptr %{matrix}{k} to i64" for k in (0, 1))
    return [first, second, f"  %{name} = sub i64 %{matrix}1i, %{matrix}0i"]


def configuration(rows: int, width: int) -> bytes:
    """LDTILECFG's 64 bytes: palette 1; sums rows × 16 int32, A rows × `width` bytes, B width/4 × 64 bytes."""
    shapes = [(rows, 64)] * 4 + [(rows, width)] * 2 + [(width // 4, 64)] * 2
    columns = b"".join(c.to_bytes(2, "little") for _, c in shapes)
    return bytes([1, 0]) + bytes(14) + columns + bytes(16) + bytes(r for r, _ in shapes) + bytes(8)


def _part(
    name: str,
    index: int,
    start: int,
    count: int,
    width: int,
    rows: int,
    block: int,
    panel: int,
    product: str,
    last: bool,
) -> list[str]:
    """One configuration: pairs of row tiles, for each of which `count` steps of `width` bytes follow each other."""
    tiles, columns = block // rows, panel // 16
    pairs = [tuple(range(t, min(t + 2, tiles))) for t in range(0, tiles, 2)]
    lines: list[str] = []
    for pair, members in enumerate(pairs):
        here = f"part{index}.{pair}"
        after = f"part{index}.{pair + 1}" if pair + 1 < len(pairs) else f"end{index}"
        lines.append(f"{here}:")
        if pair == 0:
            lines.append(f"  call void @llvm.x86.ldtilecfg(ptr @{name}_{index})")
        sums = []
        for slot, tile in enumerate(members):
            lines += [
                f"  %{here}.ro{slot} = mul i64 %cb, {tile * rows}",
                f"  %{here}.ra{slot} = mul i64 %ab, {tile * rows}",
                f"  %{here}.a{slot} = getelementptr i8, ptr %a0, i64 %{here}.ra{slot}",
            ]
            for column in range(columns):
                at = f"%{here}.c{slot}{column}"
                lines += [
                    f"  {at}o = add i64 %{here}.ro{slot}, {column * 64}",
                    f"  {at} = getelementptr i8, ptr %c0, i64 {at}o",
                    f"  call void @llvm.x86.tileloadd64(i8 {slot * 2 + column}, ptr {at}, i64 %cb)",
                ]
                sums.append((slot * 2 + column, at))
        lines += [
            f"  br label %{here}.loop",
            f"{here}.loop:",
            f"  %{here}.k = phi i64 [ 0, %{here} ], [ %{here}.next, %{here}.loop ]",
            f"  %{here}.m = mul i64 %{here}.k, {width}",
            f"  %{here}.ka = add i64 %{here}.m, {start}",
            f"  %{here}.kb = mul i64 %{here}.ka, {panel}",
        ]
        for slot, _ in enumerate(members):
            at = f"%{here}.x{slot}"
            lines.append(f"  {at} = getelementptr i8, ptr %{here}.a{slot}, i64 %{here}.ka")
            lines.append(f"  call void @llvm.x86.tileloadd64(i8 {4 + slot}, ptr {at}, i64 %ab)")
        for column in range(columns):
            at = f"%{here}.y{column}"
            lines += [
                f"  {at}o = add i64 %{here}.kb, {column * 64}",
                f"  {at} = getelementptr i8, ptr %b0, i64 {at}o",
                f"  call void @llvm.x86.tileloadd64(i8 {6 + column}, ptr {at}, i64 {panel * 4})",
            ]
        for slot, _ in enumerate(members):
            for column in range(columns):
                lines.append(f"  call void @llvm.x86.{product}(i8 {slot * 2 + column}, i8 {4 + slot}, i8 {6 + column})")
        lines += [
            f"  %{here}.next = add i64 %{here}.k, 1",
            f"  %{here}.again = icmp ult i64 %{here}.next, {count}",
            f"  br i1 %{here}.again, label %{here}.loop, label %{here}.store",
            f"{here}.store:",
        ]
        lines += [f"  call void @llvm.x86.tilestored64(i8 {t}, ptr {at}, i64 %cb)" for t, at in sums]
        lines.append(f"  br label %{after}")
    following = "end" if last else f"part{index + 1}.0"
    return [*lines, f"end{index}:", f"  br label %{following}"]
