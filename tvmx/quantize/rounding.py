"""Weights rounded so that their errors cancel in the layer's result, instead of each to its nearest step.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", ICLR 2023
(columns in the order of their power; each error is passed on to the columns not yet rounded).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tvmx.quantize.graph import Array
from tvmx.quantize.moments import Moments
from tvmx.quantize.qparams import QWeight, spread

_PANEL = 32
_DAMPING = 1e-2  # of the mean diagonal: columns that were seldom seen cannot take errors of any size


def round_to_data(weight: Array, quantized: QWeight, limit: int, moments: Moments, centred: bool) -> QWeight:
    """`quantized` with its integers chosen by what the layer reads; scales stay.

    `centred`: the mean error is taken off the layer's bias, see `mean_error`. A row that would not gain keeps its
    nearest integers.
    """
    known = moments.rounded
    if known is not None and known.axis == quantized.axis and np.array_equal(known.scale, quantized.scale):
        return known
    columns = moments.columns
    exact = columns.split(np.asarray(weight, np.float64))
    scale = np.broadcast_to(spread(quantized.scale, weight.ndim, quantized.axis).astype(np.float64), weight.shape)
    scale = columns.split(scale)[:, :, :1]
    nearest = columns.split(quantized.values.astype(np.float64))
    matrix = _conditioned(moments, centred)
    try:
        found = _rounded(exact / scale, matrix, limit)
    except np.linalg.LinAlgError:  # columns so uneven in size that their matrix cannot be inverted
        return quantized
    worse = _error(exact / scale - found, matrix) >= _error(exact / scale - nearest, matrix)
    chosen = np.where(worse[:, :, None], nearest, found)
    moments.rounded = dataclasses.replace(quantized, values=columns.join(chosen.astype(np.int8), weight.shape))
    return moments.rounded


def mean_error(weight: Array, quantized: QWeight, moments: Moments) -> Array:
    """[rows]: the mean of (quantised - float) of each output channel that the weight's rounding makes."""
    columns = moments.columns
    error = columns.split(quantized.dequantized().astype(np.float64) - weight)
    mean = np.einsum("grl,gl->gr", error, moments.mean())
    return np.asarray(mean.reshape(columns.groups, columns.blocks, -1).sum(1).reshape(-1))


def _conditioned(moments: Moments, centred: bool) -> Array:
    """The matrix, drawn towards its diagonal as far as the samples are too few to know the rest."""
    matrix = moments.matrix(centred)
    length = matrix.shape[-1]
    diagonal = np.maximum(np.einsum("gii->gi", matrix), 0)
    trust = moments.count / (moments.count + length)
    damping = _DAMPING * diagonal.mean(1, keepdims=True) + 1e-12
    return np.asarray(trust * matrix + ((1 - trust) * diagonal + damping)[:, :, None] * np.eye(length))


def _rounded(target: Array, matrix: Array, limit: int) -> Array:
    """Integers near `target` [g, rows, length] that make the error by `matrix` [g, length, length] small."""
    order = np.argsort(-np.einsum("gii->gi", matrix), axis=1, kind="stable")
    matrix = np.take_along_axis(np.take_along_axis(matrix, order[:, :, None], 1), order[:, None, :], 2)
    # Columns first, so that what one step reads lies together.
    left = np.take_along_axis(np.ascontiguousarray(target.transpose(0, 2, 1)), order[:, :, None], 1)
    factor = np.linalg.cholesky(np.linalg.inv(matrix)).transpose(0, 2, 1)
    result, errors = np.empty_like(left), np.empty_like(left)
    length = left.shape[1]
    for begin in range(0, length, _PANEL):  # within a panel one by one, from there on in one product
        end = min(begin + _PANEL, length)
        for k in range(begin, end):
            result[:, k] = np.clip(np.rint(left[:, k]), -limit, limit)
            errors[:, k] = (left[:, k] - result[:, k]) / factor[:, k, k][:, None]
            left[:, k + 1 : end] -= factor[:, k, k + 1 : end, None] * errors[:, None, k]
        left[:, end:] -= factor[:, begin:end, end:].transpose(0, 2, 1) @ errors[:, begin:end]
    back = np.argsort(order, axis=1)
    return np.asarray(np.take_along_axis(result, back[:, :, None], 1).transpose(0, 2, 1))


def _error(difference: Array, matrix: Array) -> Array:
    """[g, rows]: d^T M d of each row."""
    return np.asarray(np.einsum("grl,grl->gr", difference @ matrix, difference))
