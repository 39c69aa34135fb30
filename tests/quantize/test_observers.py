"""Each observer against what its definition says on data where the answer is known."""

import numpy as np
import pytest

from tvmx.errors import ConfigError
from tvmx.quantize.observers import OBSERVERS, ObserverOptions, kl_threshold, observe, quantization_error
from tvmx.quantize.qparams import activation_qparams, fake_quantize
from tvmx.quantize.stats import TensorStats

OPTIONS = ObserverOptions()


def stats_of(*batches):
    stats = TensorStats(sample_limit=1 << 30)
    for batch in batches:
        stats.update(np.asarray(batch, np.float32))
    return stats


def test_minmax_is_exact():
    assert observe("minmax", stats_of([-1.5, 2.0], [0.0, 7.25]), OPTIONS) == (-1.5, 7.25)


def test_ema_is_the_mean_at_first_and_then_moves_by_a_tenth():
    low, high = observe("ema", stats_of([-1.0, 10.0], [-2.0, 20.0]), OPTIONS)
    assert (low, high) == pytest.approx((-1.5, 15.0))
    _, high = observe("ema", stats_of(*[[0.0, 10.0]] * 50, [0.0, 20.0]), OPTIONS)
    assert high == pytest.approx(11.0)


@pytest.mark.parametrize("share", [90.0, 99.0, 99.9])
def test_percentile_is_numpys_up_to_a_bin(share):
    values = np.random.default_rng(0).exponential(1.0, 200_000)
    stats = stats_of(*np.split(values, 8))
    _, high = observe("percentile", stats, ObserverOptions(percentile=share))
    assert high == pytest.approx(np.percentile(values, share), abs=2 * stats.histogram.width)


def test_percentile_splits_the_tail_between_both_sides():
    values = np.random.default_rng(0).standard_normal(200_000)
    low, high = observe("percentile", stats_of(values), ObserverOptions(percentile=98.0))
    assert (low, high) == pytest.approx((np.percentile(values, 1), np.percentile(values, 99)), abs=0.02)


def test_the_least_divergence_cuts_tails_off_and_leaves_uniform_data_alone():
    rng = np.random.default_rng(0)
    tails = np.bincount(np.minimum(np.abs(rng.standard_normal(200_000)) * 100, 1999).astype(int), minlength=2000)
    tails[1999] += 1
    assert 200 < kl_threshold(tails, 256) < 600
    uniform = np.bincount((rng.uniform(0, 1, 200_000) * 2000).astype(int), minlength=2000)
    assert kl_threshold(uniform, 256) > 1900


@pytest.mark.parametrize("outlier", [5.0, 20.0, 1000.0])
def test_entropy_never_clips_what_costs_more_than_it_saves(outlier):
    values = np.append(np.abs(np.random.default_rng(0).standard_normal(200_000)), [outlier])
    stats = stats_of(values)
    low, high = observe("entropy", stats, OPTIONS)
    assert low == 0
    assert 2 < high <= outlier
    error, unclipped = (quantization_error(stats, activation_qparams(0, h, "uint8", False)) for h in (high, outlier))
    assert error <= unclipped


def test_mse_beats_or_equals_every_other_observer():
    rng = np.random.default_rng(0)
    for values in (rng.laplace(0, 1, 50_000), np.append(rng.standard_normal(50_000), [40.0]), rng.uniform(-1, 3, 999)):
        stats = stats_of(values)
        errors = {}
        for name in OBSERVERS:
            low, high = observe(name, stats, OPTIONS)
            errors[name] = quantization_error(stats, activation_qparams(low, high, "uint8", False))
        assert errors["mse"] <= min(errors.values()) * 1.02


def test_the_error_is_that_of_quantising_the_values():
    values = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    params = activation_qparams(-2.0, 2.5, "uint8", False)
    measured = float(np.mean((values - fake_quantize(values, params)) ** 2))
    assert quantization_error(stats_of(values), params) == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("values", [[0.0, 0.0], [3.5, 3.5], [-2.0], [np.nan, np.inf], [1e-38, 2e-38], [3e38, -3e38]])
def test_degenerate_tensors_get_a_finite_positive_scale(observer, values):
    for dtype, symmetric in (("uint8", False), ("int8", True)):
        options = ObserverOptions(symmetric=symmetric, dtype=dtype)
        params = activation_qparams(*observe(observer, stats_of(values), options), dtype, symmetric)
        assert 0 < params.scale < np.inf
        assert np.isfinite(fake_quantize(np.zeros(1), params)).all()


def test_few_bins_keep_everything():
    """The last layer of a small model: fewer bins than steps must not fail."""
    assert kl_threshold(np.array([5, 3, 1]), 128) == 3
    assert kl_threshold(np.zeros(300, np.int64), 128) == 300


def test_an_unknown_observer_is_an_error():
    with pytest.raises(ConfigError, match="entropy"):
        observe("kl", stats_of([1.0, 2.0]), OPTIONS)
