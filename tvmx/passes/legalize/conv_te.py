"""Tensor expressions of convolutions over NHWC activations and packed weights.

Every function returns the output tensor; the anchor block carries `tvmx.op`. The last block always is a copy into the
output's own shape, so a schedule finds a block after the anchor whether or not FuseOps added an epilogue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvmx.schedule.workload import OP_ANNOTATION


@dataclass(frozen=True)
class Window:
    """A convolution's spatial attributes over (h, w). `pads` is (top, left, bottom, right), as Relax orders them."""

    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)

    def output(self, height: int, width: int) -> tuple[int, int]:
        """(H, W) of the input → (OH, OW)."""
        spans = [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation)]
        return (
            (height + self.pads[0] + self.pads[2] - spans[0]) // self.strides[0] + 1,
            (width + self.pads[1] + self.pads[3] - spans[1]) // self.strides[1] + 1,
        )

    @property
    def is_pointwise(self) -> bool:
        return self.kernel == (1, 1) and self.strides == (1, 1) and not any(self.pads)


def padded(x: Any, window: Window, rows: int, columns: int) -> Any:
    """x[N, H, W, C] with zeros around it: [N, rows, columns, C], `x` itself when nothing is added."""
    from tvm import te, tirx

    n, h, w, c = x.shape
    top, left = window.pads[:2]
    if (rows, columns) == (int(h), int(w)) and top == 0 and left == 0:
        return x
    zero = tirx.const(0, x.dtype)

    def value(b: Any, i: Any, j: Any, k: Any) -> Any:
        inside = tirx.all(i >= top, i < h + top, j >= left, j < w + left)
        return tirx.if_then_else(inside, x[b, i - top, j - left, k], zero)

    return te.compute((n, rows, columns, c), value, name="pad")


def pointwise(x: Any, packed: Any, channels: int) -> Any:
    """1×1 convolution as a GEMM over fused rows. x[N, H, W, K], packed[P, K, nb] → [N, H, W, channels]."""
    from tvm import te

    n, h, w, depth = (int(d) for d in x.shape)
    panels, _, width = (int(d) for d in packed.shape)
    k = te.reduce_axis((0, depth), "k")
    out = te.compute(
        (n * h * w, panels * width),
        lambda m, o: te.sum(
            x[m // (h * w), m % (h * w) // w, m % w, k] * packed[o // width, k, o % width],
            axis=k,
        ),
        name="conv2d_1x1",
        attrs={OP_ANNOTATION: "conv2d_1x1"},
    )
    return te.compute((n, h, w, channels), lambda b, i, j, o: out[(b * h + i) * w + j, o], name="unpack")


def direct(x: Any, packed: Any, channels: int, window: Window, columns: int) -> Any:
    """k×k convolution. x[N, H, W, K], packed[P, KH, KW, K, nb] → [N, OH, OW, channels].

    `columns` ≥ OW is how many output columns are computed, a multiple of the register tile.
    """
    from tvm import te

    n, h, w, depth = (int(d) for d in x.shape)
    panels, kh, kw, _, width = (int(d) for d in packed.shape)
    (sh, sw), (dh, dw) = window.strides, window.dilation
    oh, ow = window.output(h, w)
    source = padded(x, window, (oh - 1) * sh + (kh - 1) * dh + 1, (columns - 1) * sw + (kw - 1) * dw + 1)
    ry, rx = te.reduce_axis((0, kh), "kh"), te.reduce_axis((0, kw), "kw")
    k = te.reduce_axis((0, depth), "k")
    out = te.compute(
        (n, oh, columns, panels * width),
        lambda b, i, j, o: te.sum(
            source[b, i * sh + ry * dh, j * sw + rx * dw, k] * packed[o // width, ry, rx, k, o % width],
            axis=[ry, rx, k],
        ),
        name="conv2d",
        attrs={OP_ANNOTATION: "conv2d"},
    )
    return te.compute((n, oh, ow, channels), lambda b, i, j, o: out[b, i, j, o], name="unpack")


def depthwise(x: Any, weight: Any, window: Window) -> Any:
    """Depthwise convolution. x[N, H, W, C], weight[KH, KW, C] → [N, OH, OW, C]."""
    from tvm import te

    n, h, w, c = (int(d) for d in x.shape)
    kh, kw, _ = (int(d) for d in weight.shape)
    (sh, sw), (dh, dw) = window.strides, window.dilation
    oh, ow = window.output(h, w)
    source = padded(x, window, (oh - 1) * sh + (kh - 1) * dh + 1, (ow - 1) * sw + (kw - 1) * dw + 1)
    ry, rx = te.reduce_axis((0, kh), "kh"), te.reduce_axis((0, kw), "kw")
    out = te.compute(
        (n, oh, ow, c),
        lambda b, i, j, o: te.sum(source[b, i * sh + ry * dh, j * sw + rx * dw, o] * weight[ry, rx, o], axis=[ry, rx]),
        name="depthwise",
        attrs={OP_ANNOTATION: "depthwise_conv2d"},
    )
    return te.compute((n, oh, ow, c), lambda b, i, j, o: out[b, i, j, o], name="unpack")


def pack_panels(weight: Any, width: int) -> Any:
    """weight[KH, KW, K, O] → [⌈O/width⌉, KH, KW, K, width], zeros past O."""
    from tvm import te, tirx

    kh, kw, depth, out = (int(d) for d in weight.shape)
    panels = math.ceil(out / width)

    def value(p: Any, i: Any, j: Any, k: Any, o: Any) -> Any:
        if panels * width == out:
            return weight[i, j, k, p * width + o]
        channel = p * width + o
        return tirx.if_then_else(channel < out, weight[i, j, k, channel], tirx.const(0, weight.dtype))

    return te.compute((panels, kh, kw, depth, width), value, name="pack")
