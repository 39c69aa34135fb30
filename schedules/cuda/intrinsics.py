"""Tensor intrinsics of the GEMM schedule: TVM's own where they exist, its factories' for the missing variants."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

SHARED = "shared.dyn"


@dataclass(frozen=True)
class Intrinsics:
    """Names of one family's intrinsics, the fragment scopes, and k of one matrix instruction."""

    load_a: str
    load_b: str
    compute: str
    init: str
    store: str
    scope_a: str
    scope_b: str
    scope_c: str
    step: int

    @property
    def is_mma(self) -> bool:
        return self.scope_c == "warp"


_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "int32": "i32", "int8": "i8"}


def mma(dtype: str, accumulate: str, transposed: bool) -> Intrinsics:
    """mma.sync m16n8k16 (16-bit) or m16n8k32 (int8) with ldmatrix; 16 × 16 of C at a time."""
    from tvmx.compat import load_tensor_intrinsics

    load_tensor_intrinsics()
    from tvm.s_tir import TensorIntrin
    from tvm.s_tir.tensor_intrin import cuda

    step = 32 if dtype == "int8" else 16
    kind, out = _SHORT[dtype], _SHORT[accumulate]
    names = Intrinsics(
        load_a=f"tvmx_ldmatrix_{kind}_a",
        load_b=f"tvmx_ldmatrix_{kind}_b{'_trans' if transposed else ''}",
        compute=f"tvmx_mma_{kind}_{out}{'_trans' if transposed else ''}",
        init=f"mma_fill_16x16_{out}",
        store=f"tvmx_mma_store_{out}",
        scope_a="warp",
        scope_b="warp",
        scope_c="warp",
        step=step,
    )
    made = "float16" if dtype == "bfloat16" else dtype
    makers = {
        names.load_a: lambda: cuda.get_ldmatrix_intrin(step, made, "A", False, SHARED),
        names.load_b: lambda: cuda.get_ldmatrix_intrin(step, made, "B", transposed, SHARED),
        names.compute: lambda: cuda.get_mma_intrin(step, made, made, accumulate, False, transposed),
        names.store: lambda: cuda.get_mma_store_intrin(accumulate, 8, SHARED, False),
    }
    for name, make in makers.items():
        if TensorIntrin.get(name, True) is None:
            pair = make()
            TensorIntrin.register(name, *(map(_in_bfloat16, pair) if dtype == "bfloat16" else pair))
    return names


def _in_bfloat16(func: Any) -> Any:
    """An intrinsic of 16-bit floats for bfloat16, which TVM's factories do not know: same layouts, another type.

    The text of a call has no dtype, and by that TVM tells the transposed ldmatrix of 16 bits from that of 8.
    """
    import tvm

    text = func.script().replace("float16", "bfloat16").replace('"fp16"', '"bf16"')
    text = re.sub(r"(T\.ptx_legacy\.ldmatrix\(.*)\)", r'\1, dtype="float16")', text)
    return tvm.script.from_source(text)


def wmma(dtype: str, accumulate: str, transposed: bool) -> Intrinsics:
    """wmma 16 × 16 × 16, for GPUs before mma.sync.m16n8k16 and as the fallback."""
    from tvmx.compat import load_tensor_intrinsics

    load_tensor_intrinsics()
    from tvm.s_tir.tensor_intrin.cuda import get_wmma_intrin_group

    group = get_wmma_intrin_group(SHARED, SHARED, dtype, accumulate, transposed)
    return Intrinsics(
        load_a=group["load_a"],
        load_b=group["load_b"],
        compute=group["compute"],
        init=group["init"],
        store=group["store"],
        scope_a="wmma.matrix_a",
        scope_b="wmma.matrix_b",
        scope_c="wmma.accumulator",
        step=16,
    )


def layouts(names: Intrinsics, dtype: str, transposed: bool) -> tuple[Any, Any, Any]:
    """(A, B, C): (row, column) in a fragment → (lane, register) of ldmatrix and mma; for mma only."""
    from tvm.s_tir.tensor_intrin import cuda

    square = cuda.shared_16x16_to_ldmatrix_32x8_layout
    if dtype != "int8":
        return square, square, square
    wide, tall = cuda.shared_16x32_to_ldmatrix_32x16_layout, cuda.shared_32x16_to_ldmatrix_32x16_layout
    return wide, wide if transposed else tall, square
