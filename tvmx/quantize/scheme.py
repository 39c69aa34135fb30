"""What is quantised and how: one frozen dataclass, filled by the Python API, the command line or a TOML file."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

from tvmx.errors import ConfigError
from tvmx.target import Target

PRECISIONS = ("int8", "weight", "float")


@dataclass(frozen=True)
class Override:
    """Operators whose name or kind matches `pattern` (a glob; `op:Conv` for a kind) get `precision`.

    "int8": weights and activations, whatever the cost model says. "weight": only the weight, computed in float.
    "float": left as it is.
    """

    pattern: str
    precision: str

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ConfigError(f"override {self.pattern!r}: {self.precision!r} is none of {', '.join(PRECISIONS)}")

    def matches(self, name: str, op: str) -> bool:
        """Whether an operator is meant."""
        if self.pattern.startswith("op:"):
            return fnmatch.fnmatchcase(op, self.pattern[3:])
        return fnmatch.fnmatchcase(name, self.pattern)


def parse_override(text: str) -> Override:
    """`"op:MatMul=float"`, `"/encoder/*=int8"` → Override."""
    pattern, equals, precision = text.rpartition("=")
    if not equals or not pattern:
        raise ConfigError(f"override {text!r}: write it as NAME=int8|weight|float, with op:KIND for a kind")
    return Override(pattern, precision)


def check_overrides(overrides: Iterable[Override], names: Iterable[tuple[str, str]]) -> None:
    """Raise ConfigError for an override that matches no (name, kind), with what is near it."""
    known = list(names)
    for override in overrides:
        if any(override.matches(name, op) for name, op in known):
            continue
        if override.pattern.startswith("op:"):
            kinds = sorted({op for _, op in known})
            near = difflib.get_close_matches(override.pattern[3:], kinds) or kinds[:8]
            raise ConfigError(f"override {override.pattern!r} matches no operator kind; there are {', '.join(near)}")
        all_names = [name for name, _ in known]
        near = difflib.get_close_matches(override.pattern, all_names, cutoff=0.4) or all_names[:5]
        raise ConfigError(f"override {override.pattern!r} matches no operator; near it are {', '.join(near)}")


@dataclass(frozen=True)
class Scheme:
    """Weights are symmetric int8, biases int32 at the accumulator's scale; the rest is chosen here.

    `activations`: "uint8" (asymmetric), "int8" (symmetric), or "auto": what the target's dot instruction takes.
    `reduce_range`: weights of 7 bits, for x86 without VNNI; None decides by the target.
    `rounding`: "adaptive" chooses each weight's integers so that their errors cancel on the calibration data, and
    takes the mean error that is left off the bias; "nearest" does not look at data.
    `keep_first`: None leaves a convolution of the model's input in float where its products are few.
    `equalize` balances weights across convolutions; `balance` the channels that a convolution reads.
    `bias_correction`, measured by running: None corrects where `max_drop` finds that too much is lost and weights
    are rounded to nearest.
    `prefer`: "speed" leaves layers in float where quantising costs more than it saves; "size" quantises every
    weight, those of layers in float included.
    """

    activations: str = "auto"
    per_channel: bool = True
    reduce_range: bool | None = None
    rounding: str = "adaptive"
    keep_first: bool | None = None
    keep_last: bool = False
    quantize_outputs: bool = False
    embeddings: bool = True
    equalize: bool = False
    balance: bool = True
    bias_correction: bool | None = None
    prefer: str = "speed"
    percentile: float = 99.99
    overrides: tuple[Override, ...] = ()

    def __post_init__(self) -> None:
        if self.activations not in ("auto", "uint8", "int8"):
            raise ConfigError(f"activations={self.activations!r}: use auto, uint8 or int8")
        if self.prefer not in ("speed", "size"):
            raise ConfigError(f"prefer={self.prefer!r}: use speed or size")
        if self.rounding not in ("adaptive", "nearest"):
            raise ConfigError(f"rounding={self.rounding!r}: use adaptive or nearest")
        if not 50 < self.percentile <= 100:
            raise ConfigError(f"percentile={self.percentile}: use a share above 50 and up to 100")

    def precision_of(self, name: str, op: str) -> str | None:
        """What the overrides say about an operator; the last that matches wins."""
        found = None
        for override in self.overrides:
            if override.matches(name, op):
                found = override.precision
        return found

    def for_target(self, target: Target) -> ResolvedScheme:
        """The choices that depend on the machine, made."""
        arm = target.arch == "aarch64"
        activations = self.activations
        if activations == "auto":
            activations = "int8" if arm else "uint8"
        reduce_range = self.reduce_range
        if reduce_range is None:
            vnni = target.has("avx512_vnni") or target.has("avx_vnni")
            reduce_range = not arm and target.kind == "cpu" and not vnni and activations == "uint8"
        return ResolvedScheme(self, activations, 64 if reduce_range else 127)


@dataclass(frozen=True)
class ResolvedScheme:
    """A Scheme for one target: activation type, and the greatest magnitude of a quantised weight."""

    scheme: Scheme
    activations: str
    weight_limit: int

    @property
    def symmetric(self) -> bool:
        """Whether activations have their zero point in the middle."""
        return self.activations == "int8"
