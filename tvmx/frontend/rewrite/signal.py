"""DFT and STFT as products with constant matrices."""

from __future__ import annotations

import numpy as np
from onnx import helper

from tvmx.frontend.rewrite.context import Array, Refuse
from tvmx.frontend.rewrite.rule import Match, RewriteRule

LONGEST = 4096  # a 4096-point matrix holds 64 MB; past that a product is no way to transform


def dft_matrix(length: int, points: int, bins: int, complex_in: bool, inverse: bool) -> Array:
    """Real [length * (1|2), bins * 2]: interleaved parts in, interleaved parts out.

    `length` samples of a `points`-point transform, of which `bins` outputs are kept.
    """
    angle = 2 * np.pi / points * np.outer(np.arange(length), np.arange(bins))
    cos, sin = np.cos(angle), np.sin(angle) * (1 if inverse else -1)
    # (a + ib)(cos + i sin) = (a cos - b sin) + i (a sin + b cos)
    rows = [np.stack([cos, sin], -1)]
    if complex_in:
        rows.append(np.stack([-sin, cos], -1))
    matrix = np.stack(rows, 1).reshape(length * len(rows), bins * 2)
    return matrix / points if inverse else matrix


def irfft_matrix(length: int, points: int) -> Array:
    """Real [length * 2, points]: the one-sided spectrum of a real signal back to the signal."""
    k = np.arange(length)
    angle = 2 * np.pi / points * np.outer(k, np.arange(points))
    # Every bin but 0 and the middle one stands for itself and its mirror image.
    weight = np.where((k == 0) | (2 * k == points), 1.0, 2.0)[:, None] / points
    matrix = np.stack([weight * np.cos(angle), -weight * np.sin(angle)], 1)
    return matrix.reshape(length * 2, points)


def _points(m: Match, index: int, default: int) -> int:
    points = int(m.need_const(index, "the transform length").reshape(-1)[0]) if m.input(index) else default
    if not 0 < points <= LONGEST:
        raise Refuse(f"a transform of {points} points", f"use 1 to {LONGEST}")
    return points


def dft(m: Match) -> list[str]:
    """DFT: the axis moved before the complex parts, one product, and back."""
    e = m.emit
    rank = m.rank(0)
    if m.graph.opset >= 20:
        axis = int(m.need_const(2, "the axis").reshape(-1)[0]) if m.input(2) else -2
    else:
        axis = m.attr("axis", 1)
    axis %= rank
    inverse, onesided = bool(m.attr("inverse", 0)), bool(m.attr("onesided", 0))
    parts, available = m.dim(0, rank - 1), m.dim(0, axis)
    back = inverse and onesided
    points = _points(m, 1, 2 * (available - 1) if back else available)
    bins = points // 2 + 1 if onesided else points
    length = min(available, bins if back else points)
    perm = [k for k in range(rank) if k not in (axis, rank - 1)] + [axis, rank - 1]
    x = e.transpose(m.input(0), perm)
    if length < available:
        x = e.slice(x, rank - 2, 0, length)
    outer = [0] * (rank - 2)
    x = e.reshape(x, (*outer, length * parts))
    if back:
        if parts != 2:
            raise Refuse("an inverse one-sided transform of a real input", "give it real and imaginary parts")
        matrix, result = irfft_matrix(length, points), (points, 1)
    else:
        matrix, result = dft_matrix(length, points, bins, parts == 2, inverse), (bins, 2)
    dtype = helper.tensor_dtype_to_np_dtype(m.elem(0))
    y = e.reshape(e.matmul(x, e.const(matrix, "dft", dtype)), (*outer, *result))
    return [e.transpose(y, [perm.index(k) for k in range(rank)])]


def stft(m: Match) -> list[str]:
    """STFT [B, L, 1|2] → [B, frames, bins, 2]: a strided convolution with the windowed DFT."""
    e = m.emit
    step = int(m.need_const(1, "the frame step").reshape(-1)[0])
    parts = m.dim(0, 2) if m.rank(0) == 3 else 1
    window = m.dim(2, 0) if m.input(2) else 0
    frame = int(m.need_const(3, "the frame length").reshape(-1)[0]) if m.input(3) else window
    if window and window != frame:
        raise Refuse(f"a window of {window} for frames of {frame}", "make them equal")
    if not 0 < frame <= LONGEST or step <= 0:
        raise Refuse(f"frames of {frame} every {step}", f"use 1 to {LONGEST} and a positive step")
    bins = frame // 2 + 1 if m.attr("onesided", 1) else frame
    matrix = dft_matrix(frame, frame, bins, parts == 2, False).reshape(frame, parts, bins * 2)
    dtype = helper.tensor_dtype_to_np_dtype(m.elem(0))
    kernel = e.const(matrix.transpose(2, 1, 0), "dft", dtype)  # [bins * 2, parts, frame]
    if window:
        kernel = e.mul(kernel, e.reshape(m.input(2), (1, 1, frame)))
    if m.rank(0) == 3:
        x = e.transpose(m.input(0), (0, 2, 1))
    else:
        x = e.unsqueeze(m.input(0), 1)
    y = e.op("Conv", x, kernel, strides=[step], kernel_shape=[frame])
    frames = (m.dim(0, 1) - frame) // step + 1
    return [e.reshape(e.transpose(y, (0, 2, 1)), (0, frames, bins, 2))]


def mel_weight_matrix(m: Match) -> list[str]:
    """Only reached when a parameter is computed: constants fold before."""
    for index, what in enumerate(("num_mel_bins", "dft_length", "sample_rate", "lower edge", "upper edge")):
        m.need_const(index, what)
    raise Refuse("its parameters are constants but cannot be evaluated", "check their types")


RULES = (
    RewriteRule("product_DFT", ("DFT",), dft),
    RewriteRule("convolve_STFT", ("STFT",), stft),
    RewriteRule("constant_MelWeightMatrix", ("MelWeightMatrix",), mel_weight_matrix),
)
