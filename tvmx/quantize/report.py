"""What quantising did, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LayerReport:
    """One integer layer. SQNR in dB, of what it reads, of its weight, and of its result by both (inf: exact).

    `measured_db`: of its result with everything before it quantised too, where that was measured.
    """

    name: str
    op: str
    input_range: tuple[float, float]
    input_db: float
    weight_db: float
    measured_db: float | None = None

    @property
    def local_db(self) -> float:
        """SQNR that rounding input and weight leaves of the result: their relative noises add."""
        noise = 10 ** (-self.input_db / 10) + 10 ** (-self.weight_db / 10)
        return -10 * math.log10(noise) if noise > 0 else math.inf


@dataclass(frozen=True)
class QuantReport:
    """Layers in integers, operators left in float with the reason, warnings, sizes in bytes.

    `observers`: per observer the mean SQNR over all quantised tensors, in dB. `accuracy`: what `max_drop` measured.
    """

    layers: tuple[LayerReport, ...]
    kept: tuple[tuple[str, str, str], ...]  # name, operator, reason
    weight_only: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]
    observer: str
    samples: int
    bytes_before: int
    bytes_after: int
    observers: dict[str, float] = field(default_factory=dict)
    accuracy: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values; infinite SQNRs are null."""
        document = dataclasses.asdict(self)
        for layer, entry in zip(document["layers"], self.layers):
            layer["local_db"] = entry.local_db
            for key, value in layer.items():
                if isinstance(value, float) and not math.isfinite(value):
                    layer[key] = None
        return document

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        width = max((len(la.name) for la in self.layers), default=5)
        width = min(max(width, 5), 48)
        lines = [f"{'layer':<{width}}  {'op':<17} {'range':>21}  {'input':>6} {'weight':>6} {'both':>6} {'run':>6}  dB"]
        for la in self.layers:
            low, high = la.input_range
            lines.append(
                f"{la.name[-width:]:<{width}}  {la.op:<17} {low:>10.4g} {high:>10.4g}  "
                f"{_db(la.input_db)} {_db(la.weight_db)} {_db(la.local_db)} {_db(la.measured_db)}"
            )
        for name, op in self.weight_only:
            lines.append(f"{name[-width:]:<{width}}  {op:<17} int8 weight, computed in float")
        for name, op, reason in self.kept:
            lines.append(f"{name[-width:]:<{width}}  {op:<17} float: {reason}")
        for observer, value in self.observers.items():
            lines.append(f"observer {observer}: mean SQNR of the quantised tensors {value:.1f} dB")
        for key, value in self.accuracy.items():
            lines.append(f"{key}: {value}")
        ratio = self.bytes_after / max(1, self.bytes_before)
        lines.append(
            f"{len(self.layers)} operators in int8 by {self.samples} samples ({self.observer}); parameters "
            f"{self.bytes_before / 1e6:.2f} MB → {self.bytes_after / 1e6:.2f} MB ({ratio:.2f} of it)"
        )
        lines += [f"warning: {text}" for text in self.warnings]
        return lines


def _db(value: float | None) -> str:
    return f"{value:6.1f}" if value is not None and math.isfinite(value) else "     -"
