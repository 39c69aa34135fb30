"""Convolutions and matrix products of 16- and 8-bit operands to Tensor Core GEMMs (`gemm_te`), for CUDA targets.

What no case here claims (float32, depthwise, symbolic shapes, other layouts) keeps TVM's own lowering, which the
SIMT schedules take.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tvmx.passes.legalize import gemm_te
from tvmx.passes.legalize.conv import OPAQUE, constant_of, emit, static_shape
from tvmx.passes.legalize.conv_te import Window
from tvmx.passes.legalize.conversions import dequantize, quantize
from tvmx.passes.legalize.gemm_model import Problem, choose
from tvmx.passes.legalize.gemm_te import Gemm, is_int
from tvmx.passes.legalize.integer import through_padding
from tvmx.passes.legalize.matmul import Operand, operand
from tvmx.target import Gpu, Target

TYPICAL_ROWS = 512  # that tiles are chosen for where the number of rows is not known
MIN_GROUP = 8  # channels of a group below which fragments would be mostly padding


def early_legalizers(target: Target) -> dict[str, Callable[[Any, Any], Any]]:
    """By operator; they look through what defines an operand (padding, a transpose), None for what is no product."""
    if target.gpu is None:
        return {}
    gpu = target.gpu
    return {
        "relax.nn.conv2d": lambda bb, call: conv2d(bb, call, gpu),
        "relax.matmul": lambda bb, call: matmul(bb, call, gpu),
        "relax.quantize": quantize,
        "relax.dequantize": dequantize,
    }


def element_type(call: Any, gpu: Gpu) -> tuple[str, str] | None:
    """(dtype of the fragments, dtype of the accumulator), None where no Tensor Core takes these operands."""
    x, w = (str(a.ty.dtype) for a in call.args[:2])
    if x == w and (x == "float16" or (x == "bfloat16" and gpu.has_mma)):
        return x, "float32"
    if x in ("int8", "uint8") and w in ("int8", "uint8") and str(call.ty.dtype) in ("int32", "float32"):
        return "int8", "int32"
    return None


def conv2d(bb: Any, call: Any, gpu: Gpu) -> Any:
    """R.nn.conv2d over NHWC × HWIO as an implicit GEMM; None where it is not one."""
    attrs = call.attrs
    x, weight = call.args
    types = element_type(call, gpu)
    if types is None or (attrs.data_layout, attrs.kernel_layout, str(attrs.out_layout)) != ("NHWC", "HWIO", "NHWC"):
        return None
    pads: tuple[int, ...] = tuple(int(p) for p in attrs.padding)
    fill = 0
    if types[0] == "int8" or not any(pads):
        x, pads, fill = through_padding(bb, x, pads)
    shape, filters = tuple(int(d) if hasattr(d, "value") else d for d in x.ty.shape), static_shape(weight)
    if filters is None or 0 in filters or any(is_int(d, 0) for d in shape):
        return None
    if not all(isinstance(d, int) for d in shape[1:]):
        return None  # images of unknown size: the SIMT schedules'
    kh, kw, depth, out = filters
    groups = int(attrs.groups)
    mine = out // groups
    if groups > 1 and min(depth, mine) < MIN_GROUP:
        return None
    window = Window((kh, kw), _pair(attrs.strides), pads, _pair(attrs.dilation))  # type: ignore[arg-type]
    oh, ow = window.output(*shape[1:3])
    dtype = str(call.ty.dtype)
    fixed = isinstance(shape[0], int)
    if groups > 1 and not fixed:
        return None
    images = shape[0] if fixed else -(-TYPICAL_ROWS // (oh * ow))
    size = Problem(groups, images * oh * ow, mine, kh * kw * depth, types[0], _bytes(dtype))
    vector = gemm_te.vector_of(depth, element=size.bytes)
    constant = constant_of(bb, weight)
    matrix = None if constant is None else _columns(constant, groups)

    def rows(tensor: Any, p: Gemm) -> gemm_te.Access:
        return gemm_te.window_rows(tensor, window, groups, p.padded[0], vector)

    def columns(tensor: Any, p: Gemm) -> gemm_te.Access:
        def access(g: Any, k: Any, n: Any) -> tuple[list[Any], Any]:
            tap, channel = k // depth, k % depth
            return _inside((k, p.k, p.padded[2]), (n, p.n, p.padded[1])), tensor[
                tap // kw, tap % kw, channel, g * mine + n if groups > 1 else n
            ]

        return access

    return _emit(
        bb, call, size, gpu, types, (x, vector, rows, fill), (weight, matrix, columns, mine), (shape[0], oh, ow, out),
        "conv2d_1x1" if (kh, kw) == (1, 1) else "conv2d", groups > 1,
        rows_of_c=None if fixed else _product((shape[0], oh * ow)),
    )  # fmt: skip


def matmul(bb: Any, call: Any, gpu: Gpu) -> Any:
    """R.matmul of static shapes; None where it is no Tensor Core product."""
    types = element_type(call, gpu)
    a, b = (operand(bb, arg) for arg in call.args)
    if types is None or a is None or b is None:
        return None
    shape = tuple(int(d) if hasattr(d, "value") else d for d in call.ty.shape)
    k, n = a.columns, b.columns
    if len(shape) < 2 or not all(isinstance(d, int) for d in (k, *b.shape)) or any(is_int(d, 0) for d in shape):
        return None
    fixed = all(isinstance(d, int) for d in (*shape, *a.shape))
    together = math.prod(b.batch) == 1 and (not a.transposed or (fixed and math.prod(a.batch) == 1))
    if not fixed and not (together and _leads(shape[:-1]) and _leads(a.shape[:-1])):
        return None  # the SIMT schedules'
    groups = 1 if together else math.prod(shape[:-2])
    m = _product(shape[:-1]) if together else shape[-2]
    size = Problem(groups, m if fixed else TYPICAL_ROWS, n, k, types[0], _bytes(str(call.ty.dtype)))
    constant = constant_of(bb, b.value) if together else None
    matrix = None
    if constant is not None:
        flat = constant.reshape(constant.shape[-2:])
        matrix = (flat if b.transposed else flat.T)[None]
    vector_a = 1 if a.transposed else gemm_te.vector_of(k, element=size.bytes)
    batch = shape[:-2]

    def rows(tensor: Any, p: Gemm) -> gemm_te.Access:
        element = _rows_of(a, tensor, shape) if together else a.access(tensor, batch)

        def access(g: Any, i: Any, j: Any) -> tuple[list[Any], Any]:
            return _inside((i, m, p.padded[0])), element(g, i, j)

        return access

    def columns(tensor: Any, p: Gemm) -> gemm_te.Access:
        element = b.access(tensor, (1,) * len(b.batch) if together else batch)

        def access(g: Any, i: Any, j: Any) -> tuple[list[Any], Any]:
            row, column = (j, i) if b.transposed else (i, j)
            return _inside((row, k, p.padded[2]), (column, n, p.padded[1])), element(g, row, column)

        return access

    contiguous = k if b.transposed else n
    return _emit(
        bb, call, size, gpu, types, (a.value, vector_a, rows, 0), (b.value, matrix, columns, contiguous), shape,
        "matmul" if groups == 1 else "batch_matmul", False, b.transposed, None if fixed else m,
    )  # fmt: skip


def _emit(
    bb: Any,
    call: Any,
    size: Problem,
    gpu: Gpu,
    types: tuple[str, str],
    left: tuple[Any, int, Callable[[Any, Gemm], gemm_te.Access], int],
    right: tuple[Any, np.ndarray | None, Callable[[Any, Gemm], gemm_te.Access], int],
    shape: tuple[int, ...],
    name: str,
    grouped: bool,
    transposed: bool = False,
    rows_of_c: Any = None,
) -> Any:
    """`left` is (tensor, vector, access, fill), `right` (tensor, constant [g, n, k], access, contiguous extent).

    `rows_of_c` is m where that is symbolic; `size` then holds a typical one.
    """
    from tvm import relax

    dtype, accumulate = types
    x, vector_a, rows, fill = left
    weight, matrix, columns, contiguous = right
    packed = matrix is not None
    x_dtype, w_dtype, out = str(x.ty.dtype), str(weight.ty.dtype), str(call.ty.dtype)
    if w_dtype == "uint8" and dtype == "int8":
        return None  # the qdq phase shifts weights to int8
    shift = 128 if x_dtype == "uint8" else 0
    if shift and not packed:
        return None
    tile = choose(size, gpu, may_split=size.groups == 1 and packed and rows_of_c is None)
    chunk = -(-size.k // tile.splits)
    chunk = -(-chunk // tile.tk) * tile.tk if tile.splits > 1 else chunk
    vector_b = 16 // size.bytes if packed else gemm_te.vector_of(contiguous, element=size.bytes)
    p = Gemm(
        size.groups * tile.splits,
        size.m if rows_of_c is None else rows_of_c,
        size.n,
        chunk,
        tile,
        accumulate,
        vector_a,
        vector_b,
        grouped,
        packed or transposed,
    )
    operands = [x, weight]
    if matrix is not None:
        operands[1] = relax.const(pack(matrix, p, tile.splits))
        if shift:
            sums = shift * matrix.astype(np.int64).sum(-1).reshape(-1)
            operands.append(relax.const(sums.astype(np.int32)))

    def load(tensor: Any) -> gemm_te.Access:
        part = dataclasses.replace(p, k=size.k)
        element = rows(tensor, part)

        def access(g: Any, i: Any, j: Any) -> tuple[list[Any], Any]:
            k = j if tile.splits == 1 else j + g * chunk
            group = g if tile.splits == 1 else 0
            conditions, value = element(group, i, k)
            if p.padded[2] * tile.splits != size.k:
                conditions = [*conditions, k // vector_a < size.k // vector_a]
            return conditions, value

        return access

    def product(a: Any, b: Any) -> Any:
        access_b = gemm_te.packed(b) if packed else columns(b, p)
        shared = size.groups == 1 and tile.splits == 1
        return gemm_te.product(load(a), access_b, dtype, shared, p, fill, shift)

    def corrected(value: Any, correction: Any, index: tuple[Any, ...]) -> Any:
        column = index[-2] * size.n + index[-1] if grouped else index[-1]
        return value if correction is None else value + correction[column].astype(value.ty.dtype)

    if grouped:  # an axis of its own, so that the schedule sees it; taking it away again is a view
        final, shape = shape, (*shape[:-1], size.groups, size.n)
    suffix = "_int8" if dtype == "int8" else ""
    if tile.splits == 1:

        def whole(a: Any, b: Any, correction: Any = None) -> Any:
            return gemm_te.unpack(product(a, b), shape, p, out, lambda v, *i: corrected(v, correction, i))

        made = emit(bb, whole, f"{name}{suffix}_tensor_core", *operands)
        return relax.op.reshape(bb.emit(made), final) if grouped else made

    def part(a: Any, b: Any) -> Any:
        return gemm_te.unpack(product(a, b), (tile.splits, size.m, size.n), p, accumulate)

    parts = bb.emit(
        bb.call_te(part, *operands[:2], primfunc_name_hint=f"{name}{suffix}_part_tensor_core",
                   primfunc_attrs={"op_pattern": OPAQUE})
    )  # fmt: skip

    def total(t: Any, correction: Any = None) -> Any:
        return gemm_te.sum_parts(t, shape, out, lambda v, *i: corrected(v, correction, i))

    return emit(bb, total, f"{name}{suffix}_sum", parts, *operands[2:])


def pack(matrix: np.ndarray, p: Gemm, splits: int) -> np.ndarray:
    """[g, n, k] → [g · splits, padded n, padded k of a part], zeros past the ends."""
    _, n, k = p.padded
    groups, mine, depth = matrix.shape
    out = np.zeros((groups * splits, n, k), matrix.dtype)
    for s in range(splits):
        piece = matrix[:, :, s * p.k : min(depth, (s + 1) * p.k)]
        out[s::splits, :mine, : piece.shape[2]] = piece
    return out


def _columns(weight: np.ndarray, groups: int) -> np.ndarray:
    """HWIO → [g, n, k]"""
    kh, kw, depth, out = weight.shape
    return np.ascontiguousarray(weight.reshape(kh * kw * depth, groups, out // groups).transpose(1, 2, 0))


def _inside(*axes: tuple[Any, int, int]) -> list[Any]:
    """Conditions index < extent of the axes (index, extent, padded extent) that are padded."""
    return [
        index < extent
        for index, extent, padded in axes
        if not (isinstance(extent, int) and isinstance(padded, int)) or padded != extent
    ]


def _rows_of(a: Operand, tensor: Any, shape: tuple[int, ...]) -> Callable[[Any, Any, Any], Any]:
    """Element (_, flat row, column) of a left operand whose batch and rows are one axis."""
    inner = shape[-2]

    def element(_: Any, m: Any, k: Any) -> Any:
        index: list[Any] = []
        single = all(is_int(d, 1) for d in a.batch)
        rest, row = (0, m) if single else (m // inner, m % inner)
        for extent in reversed(a.batch):
            index.append(0 if is_int(extent, 1) else rest % extent)
            rest = rest // extent
        pair = (k, row) if a.transposed else (row, k)
        return tensor[tuple([*reversed(index), *pair])]

    return element


def _leads(dims: Sequence[Any]) -> bool:
    """Is the only symbolic dim the first one that is not 1? Then rows need no division by it."""
    wide = [d for d in dims if not is_int(d, 1)]
    return bool(wide) and all(isinstance(d, int) for d in wide[1:])


def _product(dims: Sequence[Any]) -> Any:
    """Of ints and expressions."""
    total: Any = 1
    for d in dims:
        total = d if is_int(total, 1) else total if is_int(d, 1) else total * d
    return total


def _bytes(dtype: str) -> int:
    return int("".join(c for c in dtype if c.isdigit())) // 8


def _pair(values: Any) -> tuple[int, int]:
    first, second = (int(v) for v in values)
    return first, second
