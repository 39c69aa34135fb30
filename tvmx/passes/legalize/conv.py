"""Convolutions to our own tensor expressions: NHWC activations, weights packed into channel panels.

Weights may be constants in 16 bits. What no case here claims (NCHW leftovers, symbolic shapes, results other than
float32) keeps TVM's own lowering.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tvmx.passes.legalize import conv_te, short, winograd_te
from tvmx.passes.legalize.conv_model import MIN_PARALLEL_MACS, Tile, register_tile, tile_cycles, winograd_plan
from tvmx.passes.legalize.conv_te import Window
from tvmx.target import Target

log = logging.getLogger(__name__)

# TVM's OpPatternKind
OUT_ELEMENTWISE_FUSABLE = 4  # elementwise consumers join
OPAQUE = 8  # a kernel of its own: packing inside the convolution would be done again for every tile


def legalizers(target: Target) -> dict[str, Callable[[Any, Any], Any]]:
    """Legalizations of the convolution family for a CPU target; none for others."""
    if target.kind != "cpu":
        return {}
    return {
        "relax.nn.conv2d": lambda bb, call: conv2d(bb, call, target),
        "relax.nn.conv2d_transpose": lambda bb, call: conv2d_transpose(bb, call, target),
    }


def conv2d(bb: Any, call: Any, target: Target) -> Any:
    """R.nn.conv2d over NHWC × HWIO float32 → pointwise, direct or depthwise kernels on packed weights."""
    attrs = call.attrs
    x, weight = call.args
    shapes = [static_shape(a) for a in (x, weight)]
    if shapes[1] is None:
        return default_legalization(bb, call)
    if (attrs.data_layout, attrs.kernel_layout) != ("NHWC", "HWIO") or str(attrs.out_layout) != "NHWC":
        return default_legalization(bb, call)
    if not short.is_float_product(call):
        return default_legalization(bb, call)
    kh, kw, _, out = shapes[1]
    groups = int(attrs.groups)
    window = Window(
        (kh, kw),
        _pair(attrs.strides),
        tuple(int(p) for p in attrs.padding),  # type: ignore[arg-type]
        _pair(attrs.dilation),
    )
    if shapes[0] is None and groups > 1:
        return default_legalization(bb, call)
    x, weight = short.widened(bb, x), short.weight_of(bb, weight)
    if shapes[0] is None:
        return symbolic_conv2d(bb, call, x, weight, window, target)
    _, height, width, channels = shapes[0]
    ow = window.output(height, width)[1]
    if groups == channels == out and groups > 1:
        flat = transformed(bb, weight, lambda w: _reshape_te(w, (kh, kw, out)), lambda w: w.reshape(kh, kw, out))
        return emit(bb, lambda a, b: conv_te.depthwise(a, b, window), "depthwise_conv2d", x, flat)

    from tvm import relax

    if groups > 1:
        mine = out // groups
        tile = register_tile(ow, mine, kh * kw * channels // groups, target)
        packed = transformed(
            bb,
            weight,
            lambda w: conv_te.pack_panels(w, tile.panel, groups),
            lambda w: pack_array(w, tile.panel, groups),
        )
        columns = math.ceil(ow / tile.rows) * tile.rows
        return emit(bb, lambda a, b: conv_te.grouped(a, b, out, window, columns, groups), "conv2d_grouped", x, packed)
    if window.is_pointwise:
        positions = shapes[0][0] * height * width
        tile = register_tile(positions, out, channels, target)
        packed = transformed(
            bb,
            weight,
            lambda w: _reshape_te(conv_te.pack_panels(w, tile.panel), (-(-out // tile.panel), channels, tile.panel)),
            lambda w: pack_array(w, tile.panel)[:, 0, 0],
        )
        computed = math.ceil(positions / tile.rows) * tile.rows
        return emit(bb, lambda a, b: conv_te.pointwise(a, b, out, computed), "conv2d_1x1", x, packed)
    tile = register_tile(ow, out, kh * kw * channels, target)
    filters = constant_of(bb, weight)
    if (
        filters is not None
        and filters.dtype == np.float32
        and not is_integral(filters)
        and use_winograd(shapes[0], out, window, tile, target)
    ):
        tile = register_tile(math.ceil(ow / winograd_te.TILE), out, channels, target, rounding=False)
        packed = relax.const(winograd_te.weights(filters, tile.panel))
        return emit(bb, lambda a, b: winograd_te.winograd(a, b, out, window), "conv2d_winograd", x, packed)
    packed = transformed(bb, weight, lambda w: conv_te.pack_panels(w, tile.panel), lambda w: pack_array(w, tile.panel))
    columns = math.ceil(ow / tile.rows) * tile.rows
    return emit(bb, lambda a, b: conv_te.direct(a, b, out, window, columns), "conv2d", x, packed)


NOMINAL_WIDTH = 48
"""Columns that a symbolic width is taken for when the register tile is chosen."""


def symbolic_conv2d(bb: Any, call: Any, x: Any, weight: Any, window: Window, target: Target) -> Any:
    """conv2d of one group whose batch, height or width is symbolic: direct, with the tile along an output row."""
    from tvm import tirx

    width, channels = x.ty.shape.values[2:]
    if not isinstance(channels, tirx.IntImm):
        return default_legalization(bb, call)
    kh, kw, depth, out = (int(d) for d in weight.ty.shape.values)
    ow = window.output(1, int(width))[1] if isinstance(width, tirx.IntImm) else NOMINAL_WIDTH
    tile = register_tile(ow, out, kh * kw * depth, target)
    packed = transformed(bb, weight, lambda w: conv_te.pack_panels(w, tile.panel), lambda w: pack_array(w, tile.panel))
    return emit(bb, lambda a, b: conv_te.direct_symbolic(a, b, out, window, tile.rows), "conv2d_symbolic", x, packed)


def conv2d_transpose(bb: Any, call: Any, target: Target) -> Any:
    """R.nn.conv2d_transpose over NHWC × HWIO (I the input's channels) float32, constant weight, one group."""
    from tvm import relax, tirx

    attrs = call.attrs
    x, weight = call.args
    shape, filters = static_shape(x), constant_of(bb, weight)
    sizes = [int(d) if isinstance(d, tirx.IntImm) else d for d in x.ty.shape.values]
    usual = (attrs.data_layout, attrs.kernel_layout, str(attrs.out_layout)) == ("NHWC", "HWIO", "NHWC")
    if (
        not usual
        or not isinstance(sizes[3], int)
        or filters is None
        or int(attrs.groups) != 1
        or _pair(attrs.dilation) != (1, 1)
    ):
        return unusual_transpose(bb, call)
    if not short.is_float_product(call):
        return unusual_transpose(bb, call)
    x = short.widened(bb, x)

    kh, kw, depth, out = filters.shape
    up = conv_te.Upsampling.of(
        (sizes[1], sizes[2]),
        (kh, kw),
        _pair(attrs.strides),
        tuple(int(p) for p in attrs.padding),  # type: ignore[arg-type]
        _pair(attrs.output_padding),
    )
    dense = up.filters(filters)
    if shape is None:
        tile = register_tile(NOMINAL_WIDTH, dense.shape[3], dense.shape[0] * dense.shape[1] * depth, target)
        panels = relax.const(pack_array(dense, tile.panel))
        return emit(bb, lambda a, b: conv_te.transposed(a, b, out, up, tile.rows), "conv2d_transpose", x, panels)
    width = up.window.output(shape[1], shape[2])[1]
    positions = shape[0] * shape[1] * shape[2] if up.window.is_pointwise else width
    taps = dense.shape[0] * dense.shape[1]
    tile = register_tile(positions, dense.shape[3], taps * depth, target)
    packed = pack_array(dense, tile.panel)
    columns = math.ceil(positions / tile.rows) * tile.rows
    return emit(
        bb,
        lambda a, b: conv_te.transposed(a, b, out, up, columns),
        "conv2d_transpose",
        x,
        relax.const(np.ascontiguousarray(packed[:, 0, 0] if up.window.is_pointwise else packed)),
    )


def unusual_transpose(bb: Any, call: Any) -> Any:
    """TVM's lowering of conv2d_transpose, which knows NCHW × IOHW only: transposed there and back."""
    from tvm import relax

    attrs = call.attrs
    if (attrs.data_layout, attrs.kernel_layout) != ("NHWC", "HWIO"):
        return default_legalization(bb, call)
    op = relax.op
    there = bb.emit(default(bb, op.permute_dims(call.args[0], [0, 3, 1, 2])))
    weight = bb.emit(default(bb, op.permute_dims(call.args[1], [2, 3, 0, 1])))
    result = op.nn.conv2d_transpose(
        there,
        weight,
        strides=attrs.strides,
        padding=attrs.padding,
        output_padding=attrs.output_padding,
        dilation=attrs.dilation,
        groups=attrs.groups,
        out_dtype=attrs.out_dtype or None,
    )
    back = op.permute_dims(bb.emit(default(bb, result)), [0, 2, 3, 1])
    return default(bb, back)


def default(bb: Any, call: Any) -> Any:
    """A new call, normalised and lowered as TVM does."""
    return default_legalization(bb, bb.normalize(call))


def use_winograd(x: tuple[int, ...], out: int, window: Window, tile: Tile, target: Target) -> bool:
    """Whether the model predicts F(4×4, 3×3) faster than the direct kernel with register tile `tile`."""
    n, height, width, channels = x
    if window.kernel != (3, 3) or window.strides != (1, 1) or window.dilation != (1, 1) or channels % 4 or out % 4:
        return False
    oh, ow = window.output(height, width)
    direct = tile_cycles(tile, ow, out, 9 * channels, target) * n * oh
    rows, columns = math.ceil(oh / winograd_te.TILE), math.ceil(ow / winograd_te.TILE)
    threads = target.threads if direct > MIN_PARALLEL_MACS / target.lanes("float32") else 1
    plan = winograd_plan(n, rows, columns, channels, out, target, threads)
    return bool(plan.cycles < 0.9 * direct / threads)


def is_integral(filters: np.ndarray) -> bool:
    """Whether every weight is an integer, as those of a ConvInteger computed in float32.

    Its sums are cast to int32 afterwards. The direct kernel computes them exactly; the Winograd transforms divide and
    would leave 4.9999 in place of 5.
    """
    return bool((np.rint(filters) == filters).all())


def emit(bb: Any, te_function: Callable[..., Any], name: str, *args: Any) -> Any:
    """call_te whose PrimFunc is declared open to elementwise epilogues, whatever its blocks look like."""
    return bb.call_te(
        te_function, *args, primfunc_name_hint=name, primfunc_attrs={"op_pattern": OUT_ELEMENTWISE_FUSABLE}
    )


def transformed(bb: Any, weight: Any, te_function: Callable[[Any], Any], array_function: Callable[[Any], Any]) -> Any:
    """A weight in its kernel's layout: computed now when it is a constant, else by a kernel of its own."""
    from tvm import relax

    constant = constant_of(bb, weight)
    if constant is not None:
        return relax.const(np.ascontiguousarray(array_function(constant)))
    return bb.emit(
        bb.call_te(te_function, weight, primfunc_name_hint="pack_weight", primfunc_attrs={"op_pattern": OPAQUE})
    )


def constant_of(bb: Any, value: Any) -> Any:
    """The numpy array behind a constant or a variable bound to one, else None."""
    from tvm import ir, relax

    if isinstance(value, relax.Var):
        value = bb.lookup_binding(value)
    return value.value.numpy() if isinstance(value, ir.GenericConst) else None


def pack_array(weight: Any, width: int, groups: int = 1) -> Any:
    """numpy twin of conv_te.pack_panels."""
    kh, kw, depth, out = weight.shape
    mine = out // groups
    panels = math.ceil(mine / width)
    wide = np.zeros((kh, kw, depth, groups, panels * width), weight.dtype)
    wide[..., :mine] = weight.reshape(kh, kw, depth, groups, mine)
    return wide.reshape(kh, kw, depth, groups * panels, width).transpose(3, 0, 1, 2, 4)


def static_shape(value: Any) -> tuple[int, ...] | None:
    """The shape of a tensor expression as ints, None where any dim is unknown."""
    from tvm import tirx

    shape = getattr(value.ty, "shape", None)
    if shape is None or not all(isinstance(d, (int, tirx.IntImm)) for d in shape):
        return None
    return tuple(int(d) for d in shape)


def default_legalization(bb: Any, call: Any) -> Any:
    """What LegalizeOps would have done without us."""
    return call.op.get_attr("FLegalize")(bb, call)


def _reshape_te(tensor: Any, shape: tuple[int, ...]) -> Any:
    from tvm import topi

    return topi.reshape(tensor, shape)


def _pair(values: Any) -> tuple[int, int]:
    first, second = (int(v) for v in values)
    return first, second
