"""Which of two kernels is faster, from interleaved samples. Standard library only; carried along in offline bundles."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

NOISE = "noise"  # what the reason of a rejection ends in that a busy machine is to blame for
SIDE_BY_SIDE_SLACK = 0.01  # the median of ratios is the noisier view: it may only veto a clear loss
RIVALS = ("the default", "the winner so far")


def robust_seconds(samples: Sequence[float]) -> float:
    """Low quintile of many short samples: what a kernel takes while nothing else disturbs it."""
    return sorted(samples)[len(samples) // 5]


def digits(samples: Sequence[float]) -> list[float]:
    """To five digits: more is noise that only fills the log."""
    return [float(f"{s:.5g}") for s in samples]


def speedup(rival: Sequence[float], challenger: Sequence[float]) -> float:
    """How much faster the challenger is, by the more cautious of two views on interleaved samples.

    The ratio of the undisturbed times; and the median of the ratios side by side, where what disturbs one
    sample disturbs its neighbour too.
    """
    undisturbed = robust_seconds(rival) / robust_seconds(challenger)
    return min(undisturbed, statistics.median(a / b for a, b in zip(rival, challenger)) + SIDE_BY_SIDE_SLACK)


def unsteadiness(samples: Sequence[float]) -> float:
    """How far apart the latencies of every other sample and of the rest are: what a busy machine may feign."""
    halves = samples[::2], samples[1::2] or samples
    first, second = (robust_seconds(half) for half in halves)
    return abs(first / second - 1)


Compare = Callable[[], tuple[str, str, Sequence[Sequence[float]]]]
"""One interleaved comparison on fresh inputs → (status, error, samples of each rival)."""


def contest(compare: Compare, rivals: int, min_gain: float) -> tuple[str, list[list[float]]]:
    """Why the second of `rivals` does not beat the default (the first) and the winner so far; all samples.

    It must win twice, each time on other inputs: one run may favour a kernel by where its data happens to lie.
    """
    samples: list[list[float]] = [[] for _ in range(rivals)]
    for _ in range(2):
        status, error, found = compare()
        if status != "OK":
            return f"{status}: {error}", samples
        for kept, new in zip(samples, found):
            kept += new
        noise = max(map(unsteadiness, found))
        for rival, name in zip((0, 2)[: rivals - 1], RIVALS):
            gain = speedup(found[rival], found[1])
            if gain < 1 + max(noise, min_gain) * (rival == 0):
                reason = f"{gain:.3f} x the speed of {name} when interleaved"
                return (f"{reason}, {noise:.1%} {NOISE}" if gain > 1 else reason), samples
    return "", samples
