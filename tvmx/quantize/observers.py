"""Observers: each turns the statistics of a tensor into the range that its integers should cover.

All work on the same `TensorStats`, so one pass over the data serves every observer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmx.errors import ConfigError
from tvmx.quantize.qparams import QParams, activation_qparams
from tvmx.quantize.stats import TensorStats

Range = tuple[float, float]


@dataclass(frozen=True)
class ObserverOptions:
    """`percentile`: share of the values, in percent, that the percentile observer keeps in range."""

    percentile: float = 99.99
    symmetric: bool = False
    dtype: str = "uint8"

    def __post_init__(self) -> None:
        if not 50 < self.percentile <= 100:
            raise ConfigError(f"percentile={self.percentile}: use a share above 50 and up to 100")


def minmax(stats: TensorStats, options: ObserverOptions) -> Range:
    """The extremes."""
    return stats.low, stats.high


def ema(stats: TensorStats, options: ObserverOptions) -> Range:
    """Moving averages of each run's extremes."""
    return stats.ema_low, stats.ema_high


def percentile(stats: TensorStats, options: ObserverOptions) -> Range:
    """The range that holds `options.percentile` percent of the values; what falls outside is split evenly."""
    counts = stats.histogram.counts
    tail = (1 - options.percentile / 100) * float(counts.sum())
    if stats.low < 0 < stats.high:
        tail /= 2
    cumulative = np.cumsum(counts)
    edges = stats.histogram.edges()
    first = int(np.searchsorted(cumulative, tail, side="right"))
    last = int(np.searchsorted(cumulative, float(cumulative[-1]) - tail, side="left"))
    low = stats.low if stats.low >= 0 else max(stats.low, float(edges[first]))
    high = stats.high if stats.high <= 0 else min(stats.high, float(edges[last + 1]))
    return low, high


def entropy(stats: TensorStats, options: ObserverOptions) -> Range:
    """Clip where the quantised distribution diverges least (Kullback-Leibler) from the one observed.

    The threshold t is searched over |x|; the range is [-t, t] cut to the extremes. One-sided tensors use all 256
    steps for it, others 128. Source: S. Migacz, "8-bit Inference with TensorRT", GTC 2017.
    """
    magnitude, width = _magnitudes(stats)
    one_sided = not options.symmetric and (stats.low >= 0 or stats.high <= 0)
    threshold = kl_threshold(magnitude, 256 if one_sided else 128) * width
    # Divergence does not see how far a clipped value was moved. Where clipping costs more squared error than the
    # finer steps save, the threshold moves out until it does not.
    unclipped = quantization_error(stats, _params(stats.low, stats.high, options))
    while True:
        low, high = max(stats.low, -threshold), min(stats.high, threshold)
        clips = low > stats.low or high < stats.high
        if not clips or quantization_error(stats, _params(low, high, options)) <= unclipped:
            return low, high
        threshold *= 1.05


def _magnitudes(stats: TensorStats) -> tuple[NDArray[np.int64], float]:
    """The histogram of |x|: counts per bin from 0 on, and the bin width."""
    histogram = stats.histogram
    k = histogram.start + np.arange(histogram.bins)
    index = np.where(k >= 0, k, -k - 1)
    used = histogram.counts > 0
    counts = np.bincount(index[used], weights=histogram.counts[used])
    return counts.astype(np.int64), histogram.width


def kl_threshold(counts: NDArray[np.int64], levels: int) -> int:
    """The number of leading bins to keep so that `levels` steps lose least; all of them when there are few.

    For each candidate the reference is the kept bins with the clipped counts added to the last, the quantised
    one spreads each step's count evenly over the bins in use. Both are smoothed alike, so an empty last bin or
    one outlier cannot make a divergence infinite.
    """
    bins = len(counts)
    if bins <= levels:
        return bins
    step = max(1, (bins - levels) // 128)
    candidates = np.unique(np.append(np.arange(levels, bins, step), bins))
    # Zeros say nothing about clipping, and after ReLU they would outweigh all the rest.
    counts = np.concatenate([counts[1:2], counts[1:]])
    total = np.cumsum(counts)
    best, found = np.inf, bins
    for kept in candidates:
        divergence = _divergence(counts[:kept], int(total[-1] - total[kept - 1]), levels)
        if divergence < best:
            best, found = divergence, int(kept)
    return found


def _divergence(kept: NDArray[np.int64], outside: int, levels: int) -> float:
    reference = kept.astype(np.float64)
    used = kept > 0
    borders = (np.arange(levels) * len(kept)) // levels
    sums = np.add.reduceat(kept, borders).astype(np.float64)
    in_use = np.add.reduceat(used, borders)
    share = np.divide(sums, in_use, out=np.zeros(levels), where=in_use > 0)
    spread = np.repeat(share, np.diff(np.append(borders, len(kept))))
    quantized = np.where(used, spread, 0.0)
    reference[-1] += outside
    if reference.sum() == 0 or quantized.sum() == 0:
        return np.inf
    epsilon = 1e-4
    p = reference / reference.sum() + epsilon / len(kept)
    q = quantized / quantized.sum() + epsilon / len(kept)
    return float(np.sum(p * np.log(p / q)))


def mse(stats: TensorStats, options: ObserverOptions) -> Range:
    """The range with the least mean squared error of quantising, searched over both ends."""
    best = (np.inf, stats.low, stats.high)
    steps = 1 - np.arange(24) / 25
    lows = stats.low * steps if stats.low < 0 else np.array([stats.low])
    highs = stats.high * steps if stats.high > 0 else np.array([stats.high])
    # One end at a time, then again from where the other one stopped: 96 candidates instead of 576.
    low, high = stats.low, stats.high
    for _ in range(2):
        for low_candidate in lows:
            error = quantization_error(stats, _params(float(low_candidate), high, options))
            if error < best[0]:
                best = (error, float(low_candidate), high)
        low = best[1]
        for high_candidate in highs:
            error = quantization_error(stats, _params(low, float(high_candidate), options))
            if error < best[0]:
                best = (error, low, float(high_candidate))
        high = best[2]
    return best[1], best[2]


def _params(low: float, high: float, options: ObserverOptions) -> QParams:
    return activation_qparams(low, high, options.dtype, options.symmetric)


def quantization_error(stats: TensorStats, params: QParams) -> float:
    """Mean squared error of quantising what the histogram holds.

    Each bin is taken at its centre; inside a step much wider than a bin this is exact, else a step's own
    uniform error, scale² / 12, bounds it.
    """
    counts = stats.histogram.counts
    used = counts > 0
    x = stats.histogram.centers()[used]
    info = np.iinfo(params.dtype)
    q = np.clip(np.rint(x / params.scale), info.min - params.zero_point, info.max - params.zero_point)
    return float(np.average((x - q * params.scale) ** 2, weights=counts[used]))


def signal_power(stats: TensorStats) -> float:
    """Mean of x² of what the histogram holds."""
    counts = stats.histogram.counts
    return float(np.average(stats.histogram.centers() ** 2, weights=counts)) if counts.any() else 0.0


def sqnr_db(power: float, error: float) -> float:
    """Signal to quantisation noise ratio in dB; inf without noise, 0 for a signal of zeros with noise."""
    if error <= 0:
        return float("inf")
    return 10 * float(np.log10(power / error)) if power > 0 else 0.0


OBSERVERS: dict[str, Callable[[TensorStats, ObserverOptions], Range]] = {
    "minmax": minmax,
    "ema": ema,
    "percentile": percentile,
    "entropy": entropy,
    "mse": mse,
}


DEFAULT_OBSERVER = "mse"


def observe(name: str, stats: TensorStats, options: ObserverOptions) -> Range:
    """The range of one tensor by one observer; (0, 0) for a tensor that showed no finite value."""
    if name not in OBSERVERS:
        raise ConfigError(f"unknown observer {name!r}; use one of {', '.join(OBSERVERS)}")
    if stats.empty:
        return 0.0, 0.0
    if stats.constant:
        return min(stats.low, 0.0), max(stats.high, 0.0)
    low, high = OBSERVERS[name](stats, options)
    return min(low, 0.0), max(high, 0.0)
