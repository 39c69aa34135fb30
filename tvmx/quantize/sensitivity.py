"""Which layers an accuracy loss comes from, and which to leave in float so that at most a given share is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tvmx.quantize.data import Feed
from tvmx.quantize.graph import Array
from tvmx.quantize.metrics import Metric, Outputs, metric_of, noise_shares
from tvmx.quantize.observers import sqnr_db
from tvmx.quantize.placement import Placement
from tvmx.quantize.switched import FLAGS, flags_for, switchable

log = logging.getLogger(__name__)

AIM = 0.75  # of the drop allowed: layers chosen by some samples do a little better on those than on others
GLANCE_SAMPLES = 8  # that can rule a choice out before all are run
RANKING_SAMPLES = 4  # one run for each of them and each layer
AMPLIFIED = 4.0  # times the noise, at which a few samples show what many would at the noise itself
OUTPUT_BYTES = 128 << 20  # of the float model's outputs, kept for comparison


@dataclass(frozen=True)
class Sensitivity:
    """What measuring found. `noise`: per layer, its share of the outputs' noise power, each quantised alone.

    `measured_db`: per layer, SQNR of its result with every layer quantised. `in_float`: layers to leave in float.
    """

    metric: str
    before: float
    after: float
    noise: dict[str, float]
    measured_db: dict[str, float]
    in_float: tuple[str, ...]


class SwitchedRuns:
    """Runs of a switched program on a few kept samples, with any set of layers in float."""

    def __init__(
        self,
        run: Callable[[Feed], Mapping[str, Array]],
        samples: Sequence[Feed],
        placement: Placement,
        outputs: Sequence[str],
        shown: Mapping[str, str],
    ) -> None:
        """`outputs`: the model's float outputs; `shown`: layer → tensor of its result, where it is shown."""
        self._run = run
        self._samples = samples
        self._placement = placement
        self._outputs = outputs
        self._shown = shown

    def limit(self, output_bytes: int = OUTPUT_BYTES) -> None:
        """Keep no more samples than have outputs of so many bytes, but at least RANKING_SAMPLES."""
        made = self._run({**self._samples[0], FLAGS: flags_for(self._placement, set())})
        each = sum(made[name].nbytes for name in self._outputs)
        self._samples = self._samples[: max(RANKING_SAMPLES, output_bytes // max(each, 1))]

    def outputs(self, in_float: Iterable[str], samples: int | None = None) -> list[Outputs]:
        """The model's outputs for each sample, or only the first few."""
        flags = flags_for(self._placement, set(in_float))
        runs: list[Outputs] = []
        for sample in self._samples[:samples]:
            made = self._run({**sample, FLAGS: flags})
            runs.append([made[name].copy() for name in self._outputs])
        return runs

    def layer_sqnr(self) -> dict[str, float]:
        """SQNR in dB of each shown layer's result, all quantised against all in float."""
        everything = {la.name for la in self._placement.layers}
        power = dict.fromkeys(self._shown, 0.0)
        noise = dict.fromkeys(self._shown, 0.0)
        for sample in self._samples[:GLANCE_SAMPLES]:
            made = self._run({**sample, FLAGS: flags_for(self._placement, everything)})
            exact = {layer: made[name].astype("float64") for layer, name in self._shown.items()}
            made = self._run({**sample, FLAGS: flags_for(self._placement, set())})
            for layer, name in self._shown.items():
                power[layer] += float((exact[layer] ** 2).sum())
                noise[layer] += float(((exact[layer] - made[name]) ** 2).sum())
        return {layer: sqnr_db(power[layer], noise[layer]) for layer in self._shown}


def analyse(runs: SwitchedRuns, placement: Placement, metric: str | Metric, max_drop: float | None) -> Sensitivity:
    """Measure, and with `max_drop` find the layers to leave in float, most harmful first.

    All of them in float is the float model, so every `max_drop` is reached.
    """
    names = [la.name for la in switchable(placement)]
    expected = runs.outputs(names)
    name, measure = metric_of(metric, expected)
    quantized = runs.outputs(())
    before = measure(expected, quantized)
    sqnr = runs.layer_sqnr()
    if max_drop is None or careful(measure, expected, quantized) >= 1 - max_drop:
        return Sensitivity(name, before, before, {}, sqnr, ())
    few = RANKING_SAMPLES
    log.info("max_drop: all quantised: %s %.4f; quantising each of %d layers alone", name, before, len(names))
    # Each layer quantised alone: small noises add, whereas what one layer contributes to a large noise is chance.
    alone = {n: sum(noise_shares(expected[:few], runs.outputs([o for o in names if o != n], few))) for n in names}
    total = max(sum(alone.values()), 1e-30)
    noise = {n: value / total for n, value in alone.items()}
    ranked = sorted(names, key=lambda n: -noise[n])

    # The first of growing sets that suffices, for accuracy that counts decisions is not monotone; then fewer layers.
    def reached(size: int) -> float | None:
        """The metric with `size` layers in float, or None where that is not enough."""
        got = runs.outputs(ranked[:size], GLANCE_SAMPLES)
        value = measure(expected[: len(got)], got)
        if len(expected) > len(got) and value >= 1 - 2 * max_drop:  # else the rest could hardly mend it
            got = runs.outputs(ranked[:size])
            value = measure(expected, got)
        log.info("max_drop: %d of %d layers in float: %s %.4f", size, len(ranked), name, value)
        return value if careful(measure, expected[: len(got)], got) >= 1 - AIM * max_drop else None

    after, count, short = 1.0, len(ranked), 0
    for size in _growing(len(ranked)):
        if (value := reached(size)) is not None:
            after, count = value, size
            break
        short = size
    while count - short > 1 and count < len(ranked):  # between the last that failed and the first that did not
        size = (short + count) // 2
        if (value := reached(size)) is not None:
            after, count = value, size
        else:
            short = size
    return Sensitivity(name, before, after, noise, sqnr, tuple(ranked[:count]))


def careful(measure: Metric, expected: Sequence[Outputs], got: Sequence[Outputs]) -> float:
    """`measure`, and for one that counts decisions no more than it says of greater noise.

    A decision changes where its margin is smaller than the noise, which happens in proportion to the noise as long as
    it is rare. So a quarter of what is lost at four times the noise estimates what is lost, from four times as many
    events: of 50 samples none may change although one in a hundred does.
    """
    value = measure(expected, got)
    if any(measure([a], [b]) not in (0, 1) for a, b in zip(expected, got)):
        return value
    louder = [[x + AMPLIFIED * (y - x) for x, y in zip(a, b)] for a, b in zip(expected, got)]
    return min(value, 1 - (1 - measure(expected, louder)) / AMPLIFIED)


def _growing(total: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 11, ... below `total`, each a third more than the last."""
    size = 1
    while size < total:
        yield size
        size = max(size + 1, size * 4 // 3)
