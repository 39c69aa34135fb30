"""Constant codes scaled block by block along K: `(codes - zero) · scale`, whose codes stay 8-bit initialisers."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from tvmx.frontend.rewrite.context import Array
from tvmx.frontend.rewrite.emit import Emitter


def scaled_blocks(e: Emitter, codes: Array, scale: Array, zero: Array, block: int) -> str:
    """Float32 [K, N] of 8-bit codes [K, N] and, per block of rows, scale and zero [blocks, N].

    The last block may be short.
    """
    depth, width = codes.shape
    blocks = scale.shape[0]
    whole = np.zeros((blocks * block, width), codes.dtype)
    whole[:depth] = codes
    value = e.cast(e.const(whole.reshape(blocks, block, width), "codes"), TensorProto.FLOAT)
    if zero.any():
        value = e.sub(value, e.const(zero.reshape(blocks, 1, width), "zero", np.float32))
    value = e.mul(value, e.const(scale.reshape(blocks, 1, width), "scale", np.float32))
    value = e.reshape(value, (blocks * block, width))
    return value if depth == blocks * block else e.slice(value, 0, 0, depth)
