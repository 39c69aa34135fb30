"""A histogram of fixed size whose range grows with the data and never loses a count."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tvmx.quantize.graph import Array

BINS = 2048


class GrowingHistogram:
    """Counts in `bins` bins of equal width; bin k holds the values in [(start + k) width, (start + k + 1) width).

    The width is a power of two and `start` an integer, so bin borders always include 0. When a value lies outside,
    the width doubles and each two bins become one, which keeps every count exactly; between half and all of the
    bins span the data seen. Memory does not depend on how much was added.
    """

    def __init__(self, bins: int = BINS) -> None:
        self.bins = bins
        self.counts: NDArray[np.int64] = np.zeros(bins, np.int64)
        self.exponent: int | None = None  # width = 2**exponent; None until the first value
        self.start = 0
        self._first, self._last = np.inf, -np.inf  # outer borders

    @property
    def width(self) -> float:
        """Width of one bin."""
        return math.ldexp(1.0, self.exponent) if self.exponent is not None else 0.0

    @property
    def total(self) -> int:
        """How many values were added."""
        return int(self.counts.sum())

    def edges(self) -> NDArray[np.float64]:
        """The bins + 1 borders."""
        return np.asarray((self.start + np.arange(self.bins + 1)) * self.width, np.float64)

    def centers(self) -> NDArray[np.float64]:
        """The middle of each bin."""
        return np.asarray((self.start + np.arange(self.bins) + 0.5) * self.width, np.float64)

    def add(self, values: Array, low: float, high: float) -> None:
        """Count `values` (any shape, finite), all of which lie in [low, high]."""
        if values.size == 0:
            return
        if not (self._first <= low and high < self._last):
            self._cover(low, high)
            edges = self.edges()
            self._first, self._last = float(edges[0]), float(edges[-1])
        # Exact: the width is a power of two, and float64 has room below float32's least value.
        index = np.floor(np.ravel(values).astype(np.float64) / self.width).astype(np.int64)
        index -= self.start
        self.counts += np.bincount(np.clip(index, 0, self.bins - 1), minlength=self.bins)

    def _cover(self, low: float, high: float) -> None:
        """Make room for [low, high]."""
        if self.exponent is None:
            span = max(high - low, max(abs(low), abs(high)) * 1e-3, 1e-30)
            self.exponent = max(math.ceil(math.log2(span / self.bins)), -120)
            self.start = math.floor(low / self.width)
        while True:
            first, last = math.floor(low / self.width), math.floor(high / self.width)
            used = np.flatnonzero(self.counts)
            if used.size:
                first = min(first, self.start + int(used[0]))
                last = max(last, self.start + int(used[-1]))
            if last - first < self.bins:
                break
            self._double()
        if first < self.start or last >= self.start + self.bins:
            self._move(first - (self.bins - (last - first + 1)) // 2)

    def _move(self, start: int) -> None:
        """Renumber the bins so that the first one is `start`; none that holds a count falls out."""
        used = np.flatnonzero(self.counts)
        moved = np.zeros_like(self.counts)
        moved[used + self.start - start] = self.counts[used]
        self.counts, self.start = moved, start

    def _double(self) -> None:
        assert self.exponent is not None
        used = np.flatnonzero(self.counts)
        pair = (used + self.start) // 2
        start = self.start // 2
        merged = np.zeros_like(self.counts)
        np.add.at(merged, pair - start, self.counts[used])
        self.counts, self.start = merged, start
        self.exponent += 1
