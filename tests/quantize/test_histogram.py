"""The growing histogram: no count is lost, memory is fixed, borders hold 0."""

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvmx.quantize.histogram import GrowingHistogram
from tvmx.quantize.stats import TensorStats


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-(2.0**99), 2.0**99, width=32), st.floats(0, 2.0**20, width=32), st.integers(1, 50)),
        min_size=1,
        max_size=12,
    )
)
def test_no_count_is_lost_and_each_lies_in_its_bin(batches):
    rng = np.random.default_rng(0)
    histogram, everything = GrowingHistogram(64), []
    for center, spread, size in batches:
        values = (center + spread * rng.standard_normal(size)).astype(np.float32)
        everything.append(values)
        seen = np.concatenate(everything)
        histogram.add(values, float(seen.min()), float(seen.max()))
    values = np.sort(np.concatenate(everything).astype(np.float64))
    assert histogram.total == values.size
    assert histogram.counts.size == 64
    edges = histogram.edges()
    assert edges[0] <= values[0]
    assert values[-1] < edges[-1]
    expected = np.searchsorted(values, edges[1:], side="left") - np.searchsorted(values, edges[:-1], side="left")
    np.testing.assert_array_equal(histogram.counts, expected)


def test_the_range_that_grew_is_used_well():
    histogram = GrowingHistogram(128)
    for k in range(20):
        values = np.array([-(2.0**k), 2.0**k], np.float32)
        histogram.add(values, float(values[0]), float(values[1]))
    used = np.flatnonzero(histogram.counts)
    assert used[-1] - used[0] + 1 > 128 // 2 - 2
    assert 0.0 in histogram.edges()


def test_more_batches_take_no_more_memory():
    """What percentile calibrators elsewhere collect in a list that grows to 100 GB."""
    stats = TensorStats()
    block = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    tracemalloc.start()
    for _ in range(4):
        stats.update(block)
    few = tracemalloc.get_traced_memory()
    for _ in range(40):
        stats.update(block)
    many = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert many[0] - few[0] < 4096
    assert many[1] <= few[1] * 1.05


def test_values_that_are_not_finite_are_left_out_and_counted():
    stats = TensorStats()
    stats.update(np.array([[1.0, np.nan], [np.inf, -2.0]], np.float32))
    stats.update(np.full((3,), np.nan, np.float32))
    assert (stats.low, stats.high, stats.not_finite, stats.runs) == (-2.0, 1.0, 5, 1)


def test_statistics_go_through_json_unchanged():
    stats = TensorStats()
    for k in range(3):
        stats.update(np.random.default_rng(k).standard_normal((5, 7)).astype(np.float32) * 10**k)
    again = TensorStats.from_json(json.loads(json.dumps(stats.to_json())))
    assert again.to_json() == stats.to_json()
    assert again.histogram.total == stats.histogram.total == 105


def test_a_damaged_histogram_is_refused():
    stats = TensorStats()
    stats.update(np.ones(3, np.float32))
    document = stats.to_json()
    document["counts"] = [1] * 5000
    with pytest.raises(ValueError, match="bins"):
        TensorStats.from_json(document)
