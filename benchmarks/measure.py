"""Interleaved timing: every contender runs in turn in one process, so that noise hits all alike."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from tvmx.target import cpu_features, cpu_model

Run = Callable[[], object]


def interleave(
    contenders: Mapping[str, Run], repeat: int = 30, warmup: int = 3, min_sample_s: float = 2e-3
) -> dict[str, list[float]]:
    """Seconds per call of each contender: `repeat` samples each, taken in turn, each sample >= `min_sample_s`."""
    calls = {}
    for name, run in contenders.items():
        for _ in range(warmup):
            run()
        start = time.perf_counter()
        run()
        calls[name] = max(1, int(min_sample_s / max(time.perf_counter() - start, 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeat):
        for name, run in contenders.items():
            count = calls[name]
            start = time.perf_counter()
            for _ in range(count):
                run()
            samples[name].append((time.perf_counter() - start) / count)
    return samples


def ratio(samples: Mapping[str, list[float]], ours: str, peer: str) -> float:
    """Median over rounds of (ours / peer) of the same round."""
    return statistics.median(a / b for a, b in zip(samples[ours], samples[peer], strict=True))


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    interesting = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd", "asimddp")
    versions = {}
    for package in ("tvmx", "apache-tvm", "onnxruntime", "openvino", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": cpu_model(),
        "features": [f for f in interesting if f in cpu_features()],
        "cores": len(os.sched_getaffinity(0)),
        "versions": versions,
        "date": datetime.date.today().isoformat(),
    }
