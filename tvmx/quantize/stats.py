"""What calibration keeps of one tensor: fixed memory, whatever number of batches it sees."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvmx.quantize.graph import Array
from tvmx.quantize.histogram import BINS, GrowingHistogram

# Elements of one tensor and one run that the histogram counts. Extremes are taken over all elements; the shape of
# a distribution is known from far fewer, and counting is what costs time.
SAMPLE_LIMIT = 4096


class TensorStats:
    """Extremes, their moving average, and a histogram of one tensor over all runs.

    Values that are not finite are left out and counted in `not_finite`.
    """

    def __init__(self, ema: float = 0.9, bins: int = BINS, sample_limit: int = SAMPLE_LIMIT) -> None:
        self.ema = ema
        self.sample_limit = sample_limit
        self.low = np.inf
        self.high = -np.inf
        self.ema_low = 0.0
        self.ema_high = 0.0
        self.runs = 0
        self.elements = 0
        self.not_finite = 0
        self.shape: tuple[int, ...] = ()
        self.histogram = GrowingHistogram(bins)

    def update(self, values: Array) -> None:
        """Take in one run's tensor, of any shape."""
        self.shape = values.shape
        flat = values.reshape(-1)
        if flat.dtype != np.float32:
            flat = flat.astype(np.float32)
        self.elements += flat.size
        if flat.size == 0:
            return
        low, high = float(flat.min()), float(flat.max())
        if not (np.isfinite(low) and np.isfinite(high)):
            flat = flat[np.isfinite(flat)]
            self.not_finite += values.size - flat.size
            if flat.size == 0:
                return
            low, high = float(flat.min()), float(flat.max())
        self._extremes(low, high)
        self.histogram.add(self._sample(flat), self.low, self.high)

    def _extremes(self, low: float, high: float) -> None:
        share = max(1 - self.ema, 1 / (self.runs + 1))  # a plain mean at first: the first run is not special
        self.ema_low += share * (low - self.ema_low)
        self.ema_high += share * (high - self.ema_high)
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.runs += 1

    def _sample(self, flat: Array) -> Array:
        """Every n-th element, n odd (so that no power-of-two axis aliases) and the start different in each run."""
        stride = -(-flat.size // self.sample_limit)
        if stride <= 1:
            return flat
        stride += 1 - stride % 2
        return flat[self.runs % stride :: stride]

    @property
    def constant(self) -> bool:
        """Whether only one value was seen."""
        return self.runs > 0 and self.low == self.high

    @property
    def empty(self) -> bool:
        """Whether no finite value was seen."""
        return self.runs == 0

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON values; `from_json` reads it back exactly."""
        histogram = self.histogram
        used = np.flatnonzero(histogram.counts)
        first, last = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 0)
        return {
            "low": self.low if self.runs else None,
            "high": self.high if self.runs else None,
            "ema": [self.ema_low, self.ema_high],
            "runs": self.runs,
            "elements": self.elements,
            "not_finite": self.not_finite,
            "shape": list(self.shape),
            "exponent": histogram.exponent,
            "start": histogram.start + first,
            "counts": histogram.counts[first:last].tolist(),
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> TensorStats:
        """Raises KeyError, TypeError or ValueError for what `to_json` did not write."""
        stats = cls()
        stats.runs = int(document["runs"])
        if stats.runs:
            stats.low, stats.high = float(document["low"]), float(document["high"])
        stats.ema_low, stats.ema_high = (float(v) for v in document["ema"])
        stats.elements, stats.not_finite = int(document["elements"]), int(document["not_finite"])
        stats.shape = tuple(int(d) for d in document["shape"])
        histogram, counts = stats.histogram, document["counts"]
        histogram.exponent = None if document["exponent"] is None else int(document["exponent"])
        histogram.start = int(document["start"])
        if len(counts) > histogram.bins:
            raise ValueError(f"{len(counts)} histogram bins, at most {histogram.bins} are possible")
        histogram.counts[: len(counts)] = counts
        return stats
