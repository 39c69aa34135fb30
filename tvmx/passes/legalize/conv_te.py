"""Tensor expressions of convolutions over NHWC activations and packed weights.

Every function returns the output tensor; the anchor block carries `tvmx.op`. The last block always is a copy into the
output's own shape, so a schedule finds a block after the anchor whether or not FuseOps added an epilogue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmx.schedule.workload import OP_ANNOTATION

STAGE_ANNOTATION = "tvmx.stage"
"""Block annotation of the transforms beside the anchor; schedules find them by it."""
SYMBOLIC = "conv2d_symbolic"
ROWS_ANNOTATION = "tvmx.rows"
"""Columns of the register tile that the output of a symbolic convolution is rounded up to."""


@dataclass(frozen=True)
class Window:
    """A convolution's spatial attributes over (h, w). `pads` is (top, left, bottom, right), as Relax orders them."""

    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)

    def output(self, height: Any, width: Any) -> tuple[Any, Any]:
        """(H, W) of the input → (OH, OW); ints, or expressions over symbolic dims."""
        spans = [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation)]
        return (
            _plain((height + self.pads[0] + self.pads[2] - spans[0]) // self.strides[0] + 1),
            _plain((width + self.pads[1] + self.pads[3] - spans[1]) // self.strides[1] + 1),
        )

    @property
    def is_pointwise(self) -> bool:
        return self.kernel == (1, 1) and self.strides == (1, 1) and not any(self.pads)


def _plain(size: Any) -> Any:
    """A symbolic size as Relax and topi write it: FuseTIR joins only buffers whose shapes look alike."""
    if isinstance(size, int):
        return size
    from tvm.sym import Analyzer

    return Analyzer().simplify(size)


def padded(x: Any, window: Window, rows: Any, columns: Any, dtype: str = "", fill: int = 0) -> Any:
    """x[N, H, W, C] with `fill` around it, as `dtype` if given: [N, rows, columns, C]; `x` itself if it is the same."""
    from tvm import te, tirx

    n, h, w, c = x.shape
    top, left = window.pads[:2]
    dtype = dtype or str(x.dtype)
    fixed = isinstance(rows, int) and isinstance(columns, int)
    inner = fixed and (rows, columns) == (_size(h), _size(w)) and top == 0 and left == 0
    if inner and dtype == str(x.dtype):
        return x
    around = tirx.const(fill, dtype)

    def value(b: Any, i: Any, j: Any, k: Any) -> Any:
        element = x[b, i - top, j - left, k].astype(dtype)
        if inner:
            return element
        return tirx.if_then_else(tirx.all(i >= top, i < h + top, j >= left, j < w + left), element, around)

    return te.compute((n, rows, columns, c), value, name="pad")


def pointwise(x: Any, packed: Any, channels: int, positions: int) -> Any:
    """1×1 convolution as a GEMM over fused rows. x[N, H, W, K], packed[P, K, nb] → [N, H, W, channels].

    `positions` ≥ N·H·W is how many rows are computed, a multiple of the register tile; those past the end repeat the
    last one and are dropped.
    """
    from tvm import te

    n, h, w, _ = (int(d) for d in x.shape)
    out = _pointwise(x, packed, positions, "conv2d_1x1")
    return te.compute((n, h, w, channels), lambda b, i, j, o: out[(b * h + i) * w + j, o], name="unpack")


def _pointwise(x: Any, packed: Any, positions: int, op: str) -> Any:
    """[positions, P·nb]"""
    from tvm import te, tirx

    n, h, w, depth = (int(d) for d in x.shape)
    panels, _, width = (int(d) for d in packed.shape)
    k = te.reduce_axis((0, depth), "k")

    def product(m: Any, o: Any) -> Any:
        row = m if positions == n * h * w else tirx.min(m, n * h * w - 1)
        value = x[row // (h * w), row % (h * w) // w, row % w, k]
        return te.sum(value * packed[o // width, k, o % width].astype(x.dtype), axis=k)

    return te.compute((positions, panels * width), product, name=op, attrs={OP_ANNOTATION: op})


def direct_symbolic(x: Any, packed: Any, channels: int, window: Window, rows: int) -> Any:
    """`direct` for a batch or an image of unknown size: x[N, H, W, K] → [N, OH, OW, channels]."""
    from tvm import te

    oh, ow = window.output(*(_size(d) for d in x.shape[1:3]))
    out = _direct_symbolic(x, packed, window, rows, SYMBOLIC)
    return te.compute((x.shape[0], oh, ow, channels), lambda b, i, j, o: out[b, i, j, o], name="unpack")


def _direct_symbolic(x: Any, packed: Any, window: Window, rows: int, op: str) -> Any:
    """[N, OH, columns, P·nb], columns rounded up to the register tile of `rows` columns.

    Past the end of a row a 1×1 kernel reads the last column again, and any other finds padding.
    """
    from tvm import te, tirx

    n, h, w, _ = (_size(d) for d in x.shape)
    panels, kh, kw, depth, width = (int(d) for d in packed.shape)
    (sh, sw), (dh, dw) = window.strides, window.dilation
    oh, ow = window.output(h, w)
    columns = (ow + (rows - 1)) // rows * rows
    source = x
    if not window.is_pointwise:
        source = padded(x, window, (oh - 1) * sh + (kh - 1) * dh + 1, (columns - 1) * sw + (kw - 1) * dw + 1)
    ry, rx = te.reduce_axis((0, kh), "kh"), te.reduce_axis((0, kw), "kw")
    k = te.reduce_axis((0, depth), "k")

    def product(b: Any, i: Any, j: Any, o: Any) -> Any:
        column = tirx.min(j, ow - 1) if window.is_pointwise else j * sw + rx * dw
        return te.sum(
            source[b, i * sh + ry * dh, column, k] * packed[o // width, ry, rx, k, o % width], axis=[ry, rx, k]
        )

    attrs = {OP_ANNOTATION: op, ROWS_ANNOTATION: rows}
    return te.compute((n, oh, columns, panels * width), product, name=op, attrs=attrs)


def _size(dim: Any) -> Any:
    from tvm import tirx

    return int(dim) if isinstance(dim, int | tirx.IntImm) else dim


def direct(x: Any, packed: Any, channels: int, window: Window, columns: int) -> Any:
    """k×k convolution. x[N, H, W, K], packed[P, KH, KW, K, nb] → [N, OH, OW, channels].

    `columns` ≥ OW is how many output columns are computed, a multiple of the register tile.
    """
    from tvm import te

    oh, ow = window.output(int(x.shape[1]), int(x.shape[2]))
    out = _direct(x, packed, window, columns, "conv2d")
    return te.compute((x.shape[0], oh, ow, channels), lambda b, i, j, o: out[b, i, j, o], name="unpack")


def _direct(x: Any, packed: Any, window: Window, columns: int, op: str, groups: int = 1) -> Any:
    """[N, OH, columns, P·nb]; the panels of a group read that group's channels of x."""
    from tvm import te

    n, h, w, _ = (int(d) for d in x.shape)
    panels, kh, kw, depth, width = (int(d) for d in packed.shape)
    (sh, sw), (dh, dw) = window.strides, window.dilation
    oh, _ = window.output(h, w)
    source = padded(x, window, (oh - 1) * sh + (kh - 1) * dh + 1, (columns - 1) * sw + (kw - 1) * dw + 1)
    ry, rx = te.reduce_axis((0, kh), "kh"), te.reduce_axis((0, kw), "kw")
    k = te.reduce_axis((0, depth), "k")

    def product(b: Any, i: Any, j: Any, o: Any) -> Any:
        channel = k if groups == 1 else o // width // (panels // groups) * depth + k
        weight = packed[o // width, ry, rx, k, o % width].astype(x.dtype)
        return te.sum(source[b, i * sh + ry * dh, j * sw + rx * dw, channel] * weight, axis=[ry, rx, k])

    return te.compute((n, oh, columns, panels * width), product, name=op, attrs={OP_ANNOTATION: op})


def grouped(x: Any, packed: Any, channels: int, window: Window, columns: int, groups: int) -> Any:
    """Grouped convolution; packed[G·p, KH, KW, K/G, nb] holds each group's panels, its last padded to nb channels."""
    from tvm import te

    panels, width = int(packed.shape[0]), int(packed.shape[-1])
    oh, ow = window.output(int(x.shape[1]), int(x.shape[2]))
    mine, stored = channels // groups, panels // groups * width
    op = "conv2d" if mine == stored else "conv2d_detached"
    out = _direct(x, packed, window, columns, op, groups)

    def value(b: Any, i: Any, j: Any, o: Any) -> Any:
        return out[b, i, j, o if mine == stored else o // mine * stored + o % mine]

    return te.compute((x.shape[0], oh, ow, channels), value, name="unpack")


@dataclass(frozen=True)
class Upsampling:
    """A transposed convolution as a dense one over the input that makes all strides[0]·strides[1] phases of an output
    block as channels, followed by moving the phases to their places.

    Output row y is phase (y + before) % stride of block (y + before) // stride, blocks counted from the first used.
    """

    window: Window  # of the dense convolution: stride 1, pads may be negative (rows never read)
    strides: tuple[int, int]
    before: tuple[int, int]
    output: tuple[Any, Any]

    @classmethod
    def of(
        cls,
        size: tuple[Any, Any],
        kernel: tuple[int, int],
        strides: tuple[int, int],
        pads: tuple[int, int, int, int],
        output_padding: tuple[int, int],
    ) -> Upsampling:
        """From the attributes of a transposed convolution over an input of `size` (H, W)."""
        taps, starts, ends, before, outputs = [], [], [], [], []
        for axis in (0, 1):
            k, s, first = kernel[axis], strides[axis], pads[axis]
            out = (size[axis] - 1) * s - first - pads[axis + 2] + k + output_padding[axis]
            tap, block = -(-k // s), first // s
            beyond = (k - 1 - s - pads[axis + 2] + output_padding[axis]) // s + 1  # blocks beyond one an input row
            start = tap - 1 - block
            taps.append(tap)
            starts.append(start)
            ends.append(beyond - block + tap - 1 - start)
            before.append(first % s)
            outputs.append(out)
        window = Window((taps[0], taps[1]), pads=(starts[0], starts[1], ends[0], ends[1]))
        return cls(window, strides, (before[0], before[1]), (outputs[0], outputs[1]))

    def filters(self, weight: Any) -> Any:
        """numpy weight[KH, KW, K, O] → the dense convolution's [TH, TW, K, SH·SW·O]."""
        (sh, sw), (th, tw) = self.strides, self.window.kernel
        kh, kw, depth, out = weight.shape
        full = np.zeros((th * sh, tw * sw, depth, out), weight.dtype)
        full[:kh, :kw] = weight
        # tap u of phase r is row r + s·(T-1-u)
        split = full.reshape(th, sh, tw, sw, depth, out)[::-1, :, ::-1]
        return np.ascontiguousarray(split.transpose(0, 2, 4, 1, 3, 5)).reshape(th, tw, depth, sh * sw * out)


def transposed(x: Any, packed: Any, channels: int, up: Upsampling, columns: int) -> Any:
    """Transposed convolution. x[N, H, W, K], packed panels of `up.filters` → [N, OH, OW, channels].

    `columns` is what `direct` takes, or the `positions` of `pointwise` where the dense convolution is 1×1; for symbolic
    sizes the rows of the register tile.
    """
    from tvm import te

    sh, sw = up.strides
    oh, ow = up.output
    n, h, w, _ = (_size(d) for d in x.shape)
    symbolic = not all(isinstance(d, int) for d in (n, h, w))
    if symbolic:
        grid = _direct_symbolic(x, packed, up.window, columns, SYMBOLIC + "_detached")
    elif up.window.is_pointwise:
        flat = _pointwise(x, packed, columns, "conv2d_1x1_detached")
    else:
        grid = _direct(x, packed, up.window, columns, "conv2d_detached")

    def value(b: Any, y: Any, z: Any, o: Any) -> Any:
        i, j = y + up.before[0], z + up.before[1]
        channel = (i % sh * sw + j % sw) * channels + o
        if up.window.is_pointwise and not symbolic:
            return flat[(b * h + i // sh) * w + j // sw, channel]
        return grid[b, i // sh, j // sw, channel]

    return te.compute((n, oh, ow, channels), value, name="unpack")


def depthwise(x: Any, weight: Any, window: Window, fill: int = 0) -> Any:
    """Depthwise convolution: x[N, H, W, C], weight[KH, KW, C] → [N, OH, OW, C].

    In the data's type where that is a float, else in the weight's; between integers in float32, to which a block
    `widen` brings the weights. `fill` is what lies around the image.
    """
    from tvm import te

    if "int" in str(weight.dtype):
        codes, attrs = weight, {STAGE_ANNOTATION: "widen"}
        weight = te.compute(codes.shape, lambda *i: codes(*i).astype("float32"), name="widen", attrs=attrs)
    dtype = str(x.dtype) if "float" in str(x.dtype) else str(weight.dtype)
    n, h, w, c = (int(d) for d in x.shape)
    kh, kw, _ = (int(d) for d in weight.shape)
    (sh, sw), (dh, dw) = window.strides, window.dilation
    oh, ow = window.output(h, w)
    size = (oh - 1) * sh + (kh - 1) * dh + 1, (ow - 1) * sw + (kw - 1) * dw + 1
    source = padded(x, window, *size, dtype=dtype, fill=fill)
    ry, rx = te.reduce_axis((0, kh), "kh"), te.reduce_axis((0, kw), "kw")
    out = te.compute(
        (n, oh, ow, c),
        lambda b, i, j, o: te.sum(
            source[b, i * sh + ry * dh, j * sw + rx * dw, o] * weight[ry, rx, o].astype(dtype), axis=[ry, rx]
        ),
        name="depthwise",
        attrs={OP_ANNOTATION: "depthwise_conv2d"},
    )
    return te.compute((n, oh, ow, c), lambda b, i, j, o: out[b, i, j, o], name="unpack")


def pack_panels(weight: Any, width: int, groups: int = 1) -> Any:
    """weight[KH, KW, K, G·O] → [G·⌈O/width⌉, KH, KW, K, width], zeros past O."""
    from tvm import te, tirx

    kh, kw, depth, out = (int(d) for d in weight.shape)
    mine = out // groups
    panels = math.ceil(mine / width)

    def value(p: Any, i: Any, j: Any, k: Any, o: Any) -> Any:
        channel = p % panels * width + o
        source = weight[i, j, k, p // panels * mine + channel]
        if panels * width == mine:
            return source
        return tirx.if_then_else(channel < mine, source, tirx.const(0, weight.dtype))

    return te.compute((groups * panels, kh, kw, depth, width), value, name="pack")
