"""How close a quantised model is to the float one: 1 is equal; what is missing to 1 is the drop."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from tvmx.errors import ConfigError
from tvmx.quantize.graph import Array

Outputs = Sequence[Array]  # of one run, in the order of the model's outputs
Metric = Callable[[Sequence[Outputs], Sequence[Outputs]], float]  # (float runs, quantised runs)


def top1(expected: Sequence[Outputs], got: Sequence[Outputs]) -> float:
    """Share of rows (last axis) of the first output whose greatest element is at the same place."""
    equal = [np.mean(np.argmax(a[0], -1) == np.argmax(b[0], -1)) for a, b in zip(expected, got)]
    return float(np.mean(equal))


def cosine(expected: Sequence[Outputs], got: Sequence[Outputs]) -> float:
    """Of the worst output, all runs together: a run whose output is next to nothing weighs next to nothing."""

    def joined(runs: Sequence[Outputs], k: int) -> Array:
        return np.concatenate([run[k].ravel() for run in runs])

    return min(_cosine(joined(expected, k), joined(got, k)) for k in range(len(expected[0])))


def _cosine(a: Array, b: Array) -> float:
    x, y = (v.astype(np.float64).ravel() for v in (a, b))
    if not np.isfinite(y).all():
        return 0.0
    norms = float(np.linalg.norm(x) * np.linalg.norm(y))
    if norms == 0:
        return float(np.array_equal(x, y))
    return float(x @ y / norms)


def signal(expected: Sequence[Outputs], got: Sequence[Outputs]) -> float:
    """1 - noise power / signal power of the worst output, over all runs: 0.99 is an SQNR of 20 dB."""
    return 1 - max(noise_shares(expected, got))


def noise_shares(expected: Sequence[Outputs], got: Sequence[Outputs]) -> list[float]:
    """Noise power / signal power of each output over all runs."""
    shares = []
    for k in range(len(expected[0])):
        power = sum(float(np.sum(np.square(a[k], dtype=np.float64))) for a in expected)
        noise = sum(float(np.sum((a[k].astype(np.float64) - b[k]) ** 2)) for a, b in zip(expected, got))
        shares.append(noise / power if power > 0 else float(noise > 0))
    return shares


def ctc(expected: Sequence[Outputs], got: Sequence[Outputs]) -> float:
    """Share of the sequences that read alike: scores [N, T, classes] of the first output, decoded greedily.

    The best class of each step, repeats merged, class 0 (the blank) left out, as text recognisers are read.
    """
    alike = [
        np.array_equal(_decoded(x), _decoded(y))
        for a, b in zip(expected, got)
        for x, y in zip(_steps(a[0]), _steps(b[0]))
    ]
    return float(np.mean(alike))


def _steps(scores: Array) -> Array:
    """As [N, T, classes]."""
    if scores.ndim < 2:
        raise ConfigError(f"the metric ctc needs scores [batch, steps, classes]; the first output is {scores.shape}")
    return scores.reshape(-1, *scores.shape[-2:])


def _decoded(scores: Array) -> Array:
    best = scores.argmax(-1)
    changed = np.append(True, best[1:] != best[:-1])
    return np.asarray(best[changed & (best != 0)])


METRICS: dict[str, Metric] = {"top1": top1, "cosine": cosine, "sqnr": signal, "ctc": ctc}


def load_metric(text: str) -> Metric:
    """The function NAME of a Python file, from "FILE.py:NAME". Raises ConfigError."""
    path, _, name = text.rpartition(":")
    spec = importlib.util.spec_from_file_location("tvmx_user_metric", path) if Path(path).is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigError(f"metric {text!r}: {path!r} is no Python file; write it as FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as err:  # whatever the user's file raises
        raise ConfigError(f"metric {text!r}: {path} cannot be loaded ({type(err).__name__}: {err})") from err
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"metric {text!r}: {path} has no function {name!r}")
    return cast(Metric, function)


def _checked(function: Metric) -> Metric:
    """A user's metric that must return a number."""

    def measure(expected: Sequence[Outputs], got: Sequence[Outputs]) -> float:
        value = function(expected, got)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isnan(number):
            raise ConfigError(f"the metric returned {value!r}; it must return a number that is 1 where nothing is lost")
        return number

    return measure


def metric_of(name: str | Metric, expected: Sequence[Outputs]) -> tuple[str, Metric]:
    """A metric by name. "auto": top1 where the first output holds probabilities, else cosine. Raises ConfigError."""
    if callable(name):
        return getattr(name, "__name__", "metric"), _checked(name)
    if name == "auto":
        name = "top1" if all(_probabilities(a[0]) for a in expected) else "cosine"
    if name not in METRICS:
        raise ConfigError(f"unknown metric {name!r}; use auto, {', '.join(METRICS)} or a function")
    return name, METRICS[name]


def _probabilities(output: Array) -> bool:
    if output.ndim < 2 or output.shape[-1] < 2:
        return False
    return bool((output >= 0).all() and np.allclose(output.sum(-1), 1, atol=1e-3))
