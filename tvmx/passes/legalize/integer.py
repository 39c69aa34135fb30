"""Integer convolutions and products: 8-bit operands, int32 results, on the target's dot-product unit.

What the qdq phase emits is plain Relax: `conv2d(pad(x, zero point), w, out_dtype="int32")` and
`matmul(a, b, out_dtype="int32")` over int8, uint8 or int16 weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tvmx.passes.legalize import (
    conv_te,
    first_layer,
    integer_amx,
    integer_pool,
    integer_te,
    integer_transpose,
    joined,
    weight_only,
)
from tvmx.passes.legalize import matmul as float_matmul
from tvmx.passes.legalize.conv import OPAQUE, constant_of, emit, static_shape
from tvmx.passes.legalize.conv_model import register_tile
from tvmx.passes.legalize.conv_te import Window
from tvmx.passes.legalize.dot_unit import DotUnit, amx_unit, bf16_unit, unit_of
from tvmx.passes.legalize.integer_model import NARROW_DOT
from tvmx.passes.legalize.integer_te import IntegerProduct
from tvmx.target import Target

BYTES = ("int8", "uint8")
WEIGHTS = ("int8", "int16")
SHORT = "bfloat16"


def legalizers(target: Target, before: Callable[[Any], Any]) -> dict[str, Callable[[Any, Any], Any]]:
    """Integer cases by operator, for `legalize_early`; None for what is none. `before`: see there."""
    if target.kind != "cpu":
        return {}
    return {
        "relax.nn.conv2d": lambda bb, call: _conv2d(bb, call, target, before) if has_unit(call, target) else None,
        "relax.nn.conv2d_transpose": lambda bb, call: integer_transpose.legalize(bb, call, target),
        "relax.matmul": lambda bb, call: (
            _matmul(bb, call, target) if has_unit(call, target) else weight_only.matmul(bb, call, target)
        ),
        "relax.mean": lambda bb, call: integer_pool.mean(bb, call, before),
        "relax.sum": lambda bb, call: integer_pool.total(bb, call, before),
        "relax.nn.avg_pool2d": lambda bb, call: integer_pool.avg_pool2d(bb, call, before),
        "relax.concat": lambda bb, call: joined.concat(bb, call, target),
    }


def is_integer(call: Any) -> bool:
    """Is this a product of integers of at most 16 bits?"""
    return all(str(a.ty.dtype) in (*BYTES, *WEIGHTS) for a in call.args[:2])


def has_unit(call: Any, target: Target) -> bool:
    """Is this a product of small integers, or of two bfloat16 operands on a target with a unit for them?"""
    return is_integer(call) or (is_bf16(call) and bf16_unit(target) is not None)


def is_bf16(call: Any) -> bool:
    return str(call.ty.dtype) == "float32" and all(str(a.ty.dtype) == SHORT for a in call.args[:2])


def _unit(call: Any, target: Target, data: str, weight: str, values: Any = None) -> DotUnit:
    unit = bf16_unit(target) if is_bf16(call) else unit_of(target, data, weight, values)
    assert unit is not None
    return unit


def offset_of(dtype: str, unit: DotUnit) -> int:
    """What is added to data of `dtype` so that it fits the unit's dtype."""
    return {("int8", "uint8"): 128, ("uint8", "int8"): -128}.get((dtype, unit.data), 0)


def _conv2d(bb: Any, call: Any, target: Target, before: Callable[[Any], Any]) -> Any:
    """R.nn.conv2d over NHWC × HWIO with constant weights; None for another form."""
    from tvm import relax

    attrs = call.attrs
    x, weight = call.args
    if (attrs.data_layout, attrs.kernel_layout, str(attrs.out_layout)) != ("NHWC", "HWIO", "NHWC"):
        return None
    filters = constant_of(bb, weight)
    pads = tuple(int(p) for p in attrs.padding)
    x, pads, fill = through_padding(bb, x, pads)
    shape = static_shape(x)
    if filters is None or shape is None or str(filters.dtype) not in (*WEIGHTS, SHORT):
        return None
    kh, kw, mine, out = filters.shape
    groups = int(attrs.groups)
    window = Window((kh, kw), _pair(attrs.strides), pads, _pair(attrs.dilation))  # type: ignore[arg-type]
    if groups > 1 and mine == 1 and out == groups:
        return None if is_bf16(call) else _depthwise(bb, call, x, filters, window, fill)
    if is_bf16(call) and (kh, kw) != (1, 1):
        return None
    data = str(x.ty.dtype)
    unit = _unit(call, target, data, str(filters.dtype), filters)
    offset = offset_of(data, unit)
    ow = window.output(*shape[1:3])[1]
    count = integer_te.steps(mine, unit)
    if window.is_pointwise and groups == 1:
        return _pointwise(bb, x, filters[0, 0], unit, offset, target)
    flat = channels_of(x) == 1 and kw > 1 and window.dilation[1] == 1
    taps = filters.reshape(kh, 1, kw, out) if flat else filters
    steps = kh * integer_te.steps(kw, unit) if flat else kh * kw * count
    tile = register_tile(ow, out // groups, steps, target, narrow=NARROW_DOT)
    panels = integer_te.pack_filters(taps.astype(unit.weight), tile.panel, unit, groups)
    packed = relax.const(integer_te.one_panel(panels, out))
    size = None
    if groups == 1 and not offset and unit.depth == first_layer.CHANNELS:
        needed = integer_te.padded_size((shape[1], shape[2]), window, tile.rows)
        ready = first_layer.quantized_image(bb, x, before, window.pads, needed, fill, target)
        if ready is not None:
            x, size = ready, (shape[1], shape[2])
    args = [x, packed]
    if offset:
        args.append(relax.const(correction_of(filters, offset, tile.panel, groups)))

    def compute(a: Any, w: Any, c: Any = None) -> Any:
        return integer_te.conv(
            a, w, out, window, unit, tile.rows, offset, fill, c, groups, size=size, flat=flat, panel=tile.panel
        )

    return emit(bb, compute, f"conv2d_{suffix(unit)}", *args)


def channels_of(x: Any) -> int:
    """Of an NHWC tensor."""
    return int(x.ty.shape[-1])


def suffix(unit: DotUnit) -> str:
    """What the kernel's name ends with."""
    return "int8" if unit.sums == "int32" else "bf16"


def through_padding(bb: Any, x: Any, pads: tuple[int, ...]) -> tuple[Any, tuple[int, ...], int]:
    """Look through a constant pad of the two spatial axes: (input, all pads, fill value)."""
    from tvm import relax
    from tvm.ir import Call

    bound = bb.lookup_binding(x) if isinstance(x, relax.Var) else x
    if any(pads) or not isinstance(bound, Call) or getattr(bound.op, "name", "") != "relax.nn.pad":
        return x, pads, 0
    widths = [int(v) for v in bound.attrs.pad_width]
    value = float(bound.attrs.pad_value)
    if bound.attrs.pad_mode != "constant" or any(widths[:2]) or any(widths[6:]) or not value.is_integer():
        return x, pads, 0
    return bound.args[0], (widths[2], widths[4], widths[3], widths[5]), int(value)


def correction_of(filters: np.ndarray, offset: int, panel: int, groups: int) -> np.ndarray:
    """-offset · (sum of each channel's weights), in the order of the packed panels."""
    sums = -offset * filters.astype(np.int64).sum((0, 1, 2))
    mine = len(sums) // groups
    wide = np.zeros((groups, math.ceil(mine / panel) * panel), np.int32)
    wide[:, :mine] = sums.reshape(groups, mine)
    return wide.reshape(-1)


def _pointwise(bb: Any, x: Any, matrix: np.ndarray, unit: DotUnit, offset: int, target: Target) -> Any:
    from tvm import relax

    n, h, w, depth = static_shape(x)  # type: ignore[misc]
    out = matrix.shape[1]
    tiles = amx_unit(target, str(x.ty.dtype), str(matrix.dtype), n * h * w, depth)
    if tiles is not None:
        return integer_amx.product(bb, x, matrix, (n, h, w, out), tiles)
    p = _plan(1, n * h * w, out, depth, unit, target)
    args = [x, relax.const(_panels(matrix, p))]
    if offset:
        args.append(relax.const(correction_of(matrix[None, None], offset, p.panel, 1)))

    def compute(a: Any, b: Any, c: Any = None) -> Any:
        from tvm import te

        def element(g: Any, m: Any, k: Any) -> Any:
            return a[m // (h * w), m % (h * w) // w, m % w, k]

        def finish(sums: Any) -> Any:
            def value(b_: Any, i: Any, j: Any, o: Any) -> Any:
                found = sums[0, (b_ * h + i) * w + j, o]
                return found if c is None else found + c[o]

            return te.compute((n, h, w, out), value, name="unpack")

        left = integer_te.rows_of(element, str(a.dtype), p, offset)
        return integer_te.product(left, b, p, finish)

    return emit(bb, compute, f"conv2d_1x1_{suffix(unit)}", *args)


def _depthwise(bb: Any, call: Any, x: Any, filters: np.ndarray, window: Window, fill: int) -> Any:
    """One channel at a time there is nothing to dot: floats hold these sums exactly, and multiply as fast as int16."""
    from tvm import relax, te

    kh, kw, _, out = filters.shape
    weight = relax.const(filters.reshape(kh, kw, out))
    dtype = str(call.ty.dtype)

    def compute(a: Any, b: Any) -> Any:
        sums = conv_te.depthwise(a, b, window, fill=fill)
        return sums if dtype == "float32" else te.compute(sums.shape, lambda *i: sums(*i).astype(dtype), name="sums")

    return emit(bb, compute, "depthwise_conv2d_int8", x, weight)


def _plan(groups: int, m: int, n: int, k: int, unit: DotUnit, target: Target) -> IntegerProduct:
    tile = register_tile(m, n, integer_te.steps(k, unit), target, narrow=NARROW_DOT)
    return IntegerProduct(groups, m, n, k, tile.rows, tile.panel, unit)


def _panels(matrix: np.ndarray, p: IntegerProduct) -> np.ndarray:
    """[k, n] → [1, P, steps, nb, depth], a single panel cut"""
    packed = integer_te.pack_filters(matrix[None, None].astype(p.unit.weight), p.panel, p.unit)
    panels = integer_te.one_panel(np.ascontiguousarray(packed[:, 0, 0]), p.n)
    return panels if panels.ndim == 2 else panels[None]


def _matmul(bb: Any, call: Any, target: Target) -> Any:
    """R.matmul of 8-bit operands, static shapes; None for another form."""
    from tvm import relax

    a, b = (float_matmul.operand(bb, arg) for arg in call.args)
    out_shape = static_shape(call)
    if a is None or b is None or out_shape is None or 0 in out_shape:
        return None
    if not is_bf16(call) and str(call.ty.dtype) != "int32":
        return None
    data, weight = (str(o.value.ty.dtype) for o in (a, b))
    n, k = b.columns, a.columns
    constant = constant_of(bb, b.value)
    if constant is not None and math.prod(b.batch) == 1:
        matrix = constant.reshape(constant.shape[-2:])
        matrix = matrix.T if b.transposed else matrix
        if matrix.dtype == np.uint8:
            matrix = matrix.astype(np.int16)
            weight = "int16"
        unit = _unit(call, target, data, weight, matrix)
        plain = not a.transposed or math.prod(a.batch) == 1
        if not plain:
            return None
        rows = math.prod(out_shape[:-1])
        tiles = None if a.transposed else amx_unit(target, data, str(matrix.dtype), rows, k)
        if tiles is not None:
            return integer_amx.product(bb, a.value, matrix, out_shape, tiles)
        p = _plan(1, rows, n, k, unit, target)
        offset = offset_of(data, unit)
        args = [a.value, relax.const(_panels(matrix, p))]
        if offset:
            args.append(relax.const(correction_of(matrix[None, None], offset, p.panel, 1)))

        def shared(x: Any, w: Any, c: Any = None) -> Any:
            rows = integer_te.rows_of(_flat_rows(a, x, out_shape), data, p, offset)
            return integer_te.product(rows, w, p, _output(out_shape, c, lambda *i: (0, _flat(i, out_shape))))

        return emit(bb, shared, f"matmul_{suffix(unit)}", *args)
    if is_bf16(call):
        return _computed_bf16(bb, a, b, out_shape, target)
    return _computed(bb, a, b, out_shape, target)


def _computed_bf16(bb: Any, a: Any, b: Any, out_shape: tuple[int, ...], target: Target) -> Any:
    """Both operands computed, in bfloat16; the right one is packed in the kernel."""
    from tvm import te

    unit = bf16_unit(target)
    assert unit is not None
    groups = math.prod(out_shape[:-2])
    p = _plan(groups, out_shape[-2], b.columns, a.columns, unit, target)

    def compute(x: Any, y: Any) -> Any:
        rows = integer_te.rows_of(a.access(x, out_shape[:-2]), SHORT, p, 0)
        panels = integer_te.panels_of(b.access(y, out_shape[:-2]), p, 0, groups)

        def value(sums: Any, i: tuple[Any, ...]) -> Any:
            g, m = _grouped(i, out_shape)
            return sums[g, m, i[-1]]

        return integer_te.product(
            rows, panels, p, lambda sums: te.compute(out_shape, lambda *i: value(sums, i), name="unpack")
        )

    return emit(bb, compute, "batch_matmul_bf16", a.value, b.value)


def _computed(bb: Any, a: Any, b: Any, out_shape: tuple[int, ...], target: Target) -> Any:
    """Both operands computed: (codes - zero) each, the zero points corrected by sums over rows and columns.

    sum (a - za)(b - zb) = sum ab - za · sum_k b - zb · sum_k a + K·za·zb
    """
    from tvm import te, tirx

    (a, za), (b, zb) = (codes_of(bb, o) for o in (a, b))
    data, weight = (str(o.value.ty.dtype) for o in (a, b))
    if data not in BYTES or weight not in BYTES:
        return None
    groups, n, k = math.prod(out_shape[:-2]), b.columns, a.columns
    unit = unit_of(target, data, "int8")
    add_a, add_b = offset_of(data, unit), -128 if (weight, unit.weight) == ("uint8", "int8") else 0
    za, zb = za + add_a, zb + add_b
    p = _plan(groups, out_shape[-2], n, k, unit, target)

    # Sums are of the codes as they are; what the unit adds to each is counted in.
    by_column = _sums(bb, b, rows=True) if za else None
    by_row = _sums(bb, a, rows=False) if zb else None
    constant = k * za * zb - za * k * add_b - zb * k * add_a
    extra = [s for s in (by_column, by_row) if s is not None]

    def compute(x: Any, y: Any, *sums_of: Any) -> Any:
        rows = integer_te.rows_of(a.access(x, out_shape[:-2]), data, p, add_a)
        panels = integer_te.panels_of(b.access(y, out_shape[:-2]), p, add_b, groups)

        def finish(sums: Any) -> Any:
            def value(*i: Any) -> Any:
                g, m = _grouped(i, out_shape)
                found = sums[g, m, i[-1]]
                if za:
                    found = found - _batch_access(b, sums_of[0], i, i[-1]) * tirx.const(za, "int32")
                if zb:
                    found = found - _batch_access(a, sums_of[-1], i, m) * tirx.const(zb, "int32")
                return found + tirx.const(constant, "int32") if constant else found

            return te.compute(out_shape, value, name="unpack")

        return integer_te.product(rows, panels, p, finish)

    return emit(bb, compute, "batch_matmul_int8", a.value, b.value, *extra)


def _sums(bb: Any, operand: Any, rows: bool) -> Any:
    """A kernel of its own: int32 sums of an operand's codes over its rows or its columns, [..., other axis]."""
    from tvm import te

    shape = operand.shape
    summed, kept = (-1, -2) if rows == operand.transposed else (-2, -1)

    def compute(x: Any) -> Any:
        k = te.reduce_axis((0, shape[summed]), "k")

        def value(*i: Any) -> Any:
            pair = (k, i[-1]) if summed == -2 else (i[-1], k)
            return te.sum(x[tuple([*i[:-1], *pair])].astype("int32"), [k])

        return te.compute((*shape[:-2], shape[kept]), value, name="sums")

    return bb.emit(bb.call_te(compute, operand.value, primfunc_name_hint="sums", primfunc_attrs={"op_pattern": OPAQUE}))


def _batch_access(operand: Any, sums: Any, index: tuple[Any, ...], last: Any) -> Any:
    """The element of `sums` for an output position, its batch broadcast."""
    batch = index[:-2][len(index) - 2 - len(operand.batch) :]
    return sums[tuple([*(0 if d == 1 else i for i, d in zip(batch, operand.batch)), last])]


def codes_of(bb: Any, operand: Any) -> tuple[Any, int]:
    """(the operand's 8-bit codes, zero point) where it is int16(codes) - zero, as the qdq phase writes it."""
    import dataclasses

    from tvm import relax
    from tvm.ir import Call

    def bound(value: Any) -> Any:
        return bb.lookup_binding(value) if isinstance(value, relax.Var) else value

    value, zero = operand.value, 0
    call = bound(value)
    if isinstance(call, Call) and getattr(call.op, "name", "") == "relax.subtract":
        constant = constant_of(bb, call.args[1])
        if constant is None or constant.size != 1:
            return operand, 0
        zero, value = int(constant.reshape(())), call.args[0]
        call = bound(value)
    if isinstance(call, Call) and getattr(call.op, "name", "") == "relax.astype":
        if str(call.ty.dtype) == "int16" and str(call.args[0].ty.dtype) in BYTES:
            return dataclasses.replace(operand, value=call.args[0]), zero
    return operand, 0


def _flat_rows(a: Any, tensor: Any, out_shape: tuple[int, ...]) -> integer_te.Access:
    """Element (_, flat row, column) of a left operand whose batch and rows are one axis."""
    inner = out_shape[-2] if len(out_shape) > 1 else 1

    def element(g: Any, m: Any, k: Any) -> Any:
        index: list[Any] = []
        single = all(d == 1 for d in a.batch)
        rest, row = (0, m) if single else (m // inner, m % inner)
        for extent in reversed(a.batch):
            index.append(0 if extent == 1 else rest % extent)
            rest = rest // extent
        pair = (k, row) if a.transposed else (row, k)
        return tensor[tuple([*reversed(index), *pair])]

    return element


def _flat(index: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
    flat: Any = 0
    for i, extent in zip(index[:-1], shape[:-1]):
        flat = i if isinstance(flat, int) and flat == 0 else flat * extent + i
    return flat


def _grouped(index: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Any, Any]:
    flat: Any = 0
    for i, extent in zip(index[:-2], shape[:-2]):
        if extent != 1:
            flat = i if isinstance(flat, int) and flat == 0 else flat * extent + i
    return flat, index[-2]


def _output(shape: tuple[int, ...], correction: Any, where: Callable[..., tuple[Any, Any]]) -> Callable[[Any], Any]:
    """The last block: sums at (group, row) into the output's own shape."""
    from tvm import te

    def finish(sums: Any) -> Any:
        def value(*i: Any) -> Any:
            found = sums[tuple([*where(*i), i[-1]])]
            return found if correction is None else found + correction[i[-1]]

        return te.compute(shape, value, name="unpack")

    return finish


def _pair(values: Any) -> tuple[int, int]:
    first, second = (int(v) for v in values)
    return first, second
