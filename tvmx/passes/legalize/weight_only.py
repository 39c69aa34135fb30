"""Products of float activations and 8- or 4-bit weights, dequantised panel by panel inside the kernel.

The qdq phase leaves `matmul(x, reshape((float(codes) - zero) · scale))`. Codes are packed into panels as they are, two
to a byte where 4 bits hold them; scales lie beside them, one row a group.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tvmx.passes.legalize import matmul as float_matmul
from tvmx.passes.legalize.conv import constant_of, emit, static_shape
from tvmx.passes.legalize.conv_model import register_tile
from tvmx.schedule.workload import OP_ANNOTATION
from tvmx.target import Target


def matmul(bb: Any, call: Any, target: Target) -> Any:
    """R.matmul whose right operand has the canonical weight-only form; None for another."""
    from tvm import relax, te, tirx

    from tvmx.passes.legalize.integer import _flat, _flat_rows

    found = _weights(bb, call.args[1])
    out_shape, a = static_shape(call), float_matmul.operand(bb, call.args[0])
    if found is None or out_shape is None or 0 in out_shape or a is None or (a.transposed and len(out_shape) > 2):
        return None
    codes, zero, scale = found
    groups, group, n = codes.shape
    k, rows = a.columns, math.prod(out_shape[:-1])
    tile = register_tile(rows, n, k, target)
    panels = math.ceil(n / tile.panel)
    tiles = math.ceil(rows / tile.rows)
    low = int(codes.min(initial=0))
    halves = int(codes.max(initial=0)) - low <= 15
    flat = codes.reshape(groups * group, n)[:k]
    if halves:
        nibbles = (np.pad(flat.astype(np.int16), ((0, k % 2), (0, 0)), constant_values=low) - low).astype(np.uint8)
        packed = _panels(nibbles[0::2] | (nibbles[1::2] << 4), tile.panel)
        zero = zero - low
    else:
        packed = _panels(flat, tile.panel)
    parameters = [_panels(scale[:, 0], tile.panel)]
    if zero.any():
        parameters.append(_panels(zero[:, 0], tile.panel))

    def compute(x: Any, w: Any, s: Any, z: Any = None) -> Any:
        element = _flat_rows(a, x, out_shape)

        def weight(q: Any, i: Any, j: Any) -> Any:
            code = (w[q, i // 2, j] >> (i % 2 * 4).astype("uint8")) & tirx.const(15, "uint8") if halves else w[q, i, j]
            value = code.astype("int32").astype("float32")
            at = (q, i // group if groups > 1 else 0, j)
            return (value if z is None else value - z[at]) * s[at]

        b = te.compute((panels, k, tile.panel), weight, name="unpack_b")
        r = te.reduce_axis((0, k), "k")
        clamped = tiles * tile.rows != rows
        sums = te.compute(
            (1, tiles * tile.rows, panels * tile.panel),
            lambda g, m, j: te.sum(
                element(0, tirx.min(m, rows - 1) if clamped else m, r) * b[j // tile.panel, r, j % tile.panel], [r]
            ),
            name="matmul",
            attrs={OP_ANNOTATION: "weight_only", "tvmx.tile": [tile.rows, tile.panel]},
        )
        return te.compute(out_shape, lambda *i: sums[0, _flat(i, out_shape), i[-1]], name="unpack")

    constants = [relax.const(np.ascontiguousarray(p)) for p in (packed, *parameters)]
    return emit(bb, compute, "matmul_w4" if halves else "matmul_w8", a.value, *constants)


def _panels(matrix: np.ndarray, width: int) -> np.ndarray:
    """[rows, n] → [panels, rows, width], zeros past n."""
    rows, n = matrix.shape
    count = math.ceil(n / width)
    wide = np.zeros((rows, count * width), matrix.dtype)
    wide[:, :n] = matrix
    return np.ascontiguousarray(wide.reshape(rows, count, width).transpose(1, 0, 2))


def _weights(bb: Any, value: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """(codes [K/G, G, N], zero [K/G, 1, N], scale [K/G, 1, N]) of the canonical form."""
    from tvm import relax
    from tvm.ir import Call

    def step(expr: Any, name: str) -> Any:
        bound = bb.lookup_binding(expr) if isinstance(expr, relax.Var) else expr
        return bound if isinstance(bound, Call) and getattr(bound.op, "name", "") == f"relax.{name}" else None

    cut = step(value, "strided_slice")  # to K, where the last group is short
    reshape = step(value if cut is None else cut.args[0], "reshape")
    scaled = None if reshape is None else step(reshape.args[0], "multiply")
    centred = None if scaled is None else step(scaled.args[0], "subtract")
    cast = None if centred is None else step(centred.args[0], "astype")
    if cast is None or centred is None or scaled is None:
        return None
    arrays = [constant_of(bb, e) for e in (cast.args[0], centred.args[1], scaled.args[1])]
    if any(a is None for a in arrays) or arrays[0].ndim != 3 or str(arrays[0].dtype) not in ("int8", "uint8"):
        return None
    return arrays[0], arrays[1], arrays[2]
