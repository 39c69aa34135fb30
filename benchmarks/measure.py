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
    contenders: Mapping[str, Run],
    repeat: int = 30,
    warmup: int = 3,
    min_sample_s: float = 2e-3,
    settle_s: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds per call of each contender: `repeat` samples each, taken in turn, each sample >= `min_sample_s`.

    The order is turned by one place every round. With `settle_s` a contender first waits so long, for the threads of
    the one before it to stop spinning, and runs once untimed, for its data to be in the caches again. A `clock` of CPU
    time (`time.process_time`) leaves out what other processes took; it suits one thread only.
    """
    calls = {}
    for name, run in contenders.items():
        for _ in range(warmup):
            run()
        start = clock()
        run()
        calls[name] = max(1, int(min_sample_s / max(clock() - start, 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for index in range(repeat):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            run, count = contenders[name], calls[name]
            if settle_s:
                time.sleep(settle_s)
                run()
            start = clock()
            for _ in range(count):
                run()
            samples[name].append((clock() - start) / count)
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
        "load": [round(v, 2) for v in os.getloadavg()],
        "date": datetime.date.today().isoformat(),
    }
