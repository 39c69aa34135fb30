"""Convolutions to our own tensor expressions: NHWC activations, weights packed into channel panels.

What no case here claims (NCHW leftovers, symbolic shapes, dtypes other than float32) keeps TVM's own lowering.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tvmx.passes.legalize import conv_te, winograd_te
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
    return {"relax.nn.conv2d": lambda bb, call: conv2d(bb, call, target)}


def conv2d(bb: Any, call: Any, target: Target) -> Any:
    """R.nn.conv2d over NHWC × HWIO float32 → pointwise, direct or depthwise kernels on packed weights."""
    attrs = call.attrs
    x, weight = call.args
    shapes = [static_shape(a) for a in (x, weight)]
    if shapes[0] is None or shapes[1] is None:
        return default_legalization(bb, call)
    if (attrs.data_layout, attrs.kernel_layout) != ("NHWC", "HWIO") or str(attrs.out_layout) != "NHWC":
        return default_legalization(bb, call)
    if any(str(a.ty.dtype) != "float32" for a in (x, weight, call)):
        return default_legalization(bb, call)
    _, height, width, channels = shapes[0]
    kh, kw, _, out = shapes[1]
    groups = int(attrs.groups)
    window = Window(
        (kh, kw),
        _pair(attrs.strides),
        tuple(int(p) for p in attrs.padding),  # type: ignore[arg-type]
        _pair(attrs.dilation),
    )
    ow = window.output(height, width)[1]
    if groups == channels == out and groups > 1:
        flat = transformed(bb, weight, lambda w: _reshape_te(w, (kh, kw, out)), lambda w: w.reshape(kh, kw, out))
        return emit(bb, lambda a, b: conv_te.depthwise(a, b, window), "depthwise_conv2d", x, flat)
    if groups != 1:
        return default_legalization(bb, call)

    from tvm import relax
    from tvmx.passes.legalize.conv_model import register_tile

    if window.is_pointwise:
        positions = shapes[0][0] * height * width
        tile = register_tile(positions, out, channels, target, rounding=False)
        packed = transformed(
            bb,
            weight,
            lambda w: _reshape_te(conv_te.pack_panels(w, tile.panel), (-(-out // tile.panel), channels, tile.panel)),
            lambda w: pack_array(w, tile.panel)[:, 0, 0],
        )
        return emit(bb, lambda a, b: conv_te.pointwise(a, b, out), "conv2d_1x1", x, packed)
    tile = register_tile(ow, out, kh * kw * channels, target, rounding=True)
    filters = constant_of(bb, weight)
    if filters is not None and use_winograd(shapes[0], out, window, tile, target):
        tile = register_tile(math.ceil(ow / winograd_te.TILE), out, channels, target, rounding=False)
        packed = relax.const(winograd_te.weights(filters, tile.panel))
        return emit(bb, lambda a, b: winograd_te.winograd(a, b, out, window), "conv2d_winograd", x, packed)
    packed = transformed(bb, weight, lambda w: conv_te.pack_panels(w, tile.panel), lambda w: pack_array(w, tile.panel))
    columns = math.ceil(ow / tile.rows) * tile.rows
    return emit(bb, lambda a, b: conv_te.direct(a, b, out, window, columns), "conv2d", x, packed)


def use_winograd(x: tuple[int, ...], out: int, window: Window, tile: Any, target: Target) -> bool:
    """Whether the model predicts F(4×4, 3×3) faster than the direct kernel with register tile `tile`."""
    from tvmx.passes.legalize.conv_model import tile_cycles, winograd_cycles

    n, height, width, channels = x
    if window.kernel != (3, 3) or window.strides != (1, 1) or window.dilation != (1, 1) or channels % 4 or out % 4:
        return False
    oh, ow = window.output(height, width)
    direct = tile_cycles(tile, ow, out, 9 * channels, target) * n * oh
    rows, columns = math.ceil(oh / winograd_te.TILE), math.ceil(ow / winograd_te.TILE)
    return winograd_cycles(n, rows, columns, channels, out, target) < 0.9 * direct


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


def pack_array(weight: Any, width: int) -> Any:
    """numpy twin of conv_te.pack_panels."""
    kh, kw, depth, out = weight.shape
    panels = math.ceil(out / width)
    wide = np.zeros((kh, kw, depth, panels * width), weight.dtype)
    wide[..., :out] = weight
    return wide.reshape(kh, kw, depth, panels, width).transpose(3, 0, 1, 2, 4)


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
